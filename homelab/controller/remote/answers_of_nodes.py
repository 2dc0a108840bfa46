"""How a program on a node that makes a result ends. Pure."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from homelab.controller.base.models import WireModel
from homelab.shared.protocol import result_files


class Made(WireModel):
    """The end of `result-make`: what the program has made, in its own words."""

    folder: Annotated[str, Field(max_length=200)]
    notes: Annotated[tuple[Annotated[str, Field(max_length=1000)], ...], Field(max_length=100)] = ()
    figures: Annotated[dict[Annotated[str, Field(max_length=100)], float | None], Field(max_length=100)] = {}

    @field_validator("folder")
    @classmethod
    def _known(cls, folder: str) -> str:
        return result_files.folder(folder)
