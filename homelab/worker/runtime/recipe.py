"""The resolved recipe as run.json has it, with the types of `homelab.shared.recipe`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

from homelab.shared.recipe.neutral import NEUTRAL
from homelab.worker.errors import WorkerError

Section = TypeVar("Section")


def section(kind: type[Section], recipe: Mapping[str, Any], where: str = "run.json", *, whole: bool = False) -> Section:
    """The section of a recipe that is named like `kind`, without keys that this version does not know.

    Raises WorkerError where the section or one of its keys is missing. `whole`: a key with a default may not be missing either, because a
    launch writes them all, and a default in the place of what was launched would be another training.
    """
    name = kind.__name__.lower()
    hint = "stop the run and launch it again: the file is written by `homelab launch`"
    values = recipe.get(name)
    if not isinstance(values, dict):
        raise WorkerError(f"the recipe has no [{name}]", where=where, hint=hint)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    missing = [
        field.name
        for field in fields
        if field.name not in values and (field.default is dataclasses.MISSING or (whole and field.name not in NEUTRAL.get(name, ())))
    ]
    if missing:
        raise WorkerError(f"[{name}] of the recipe lacks {', '.join(missing)}", where=where, hint=hint)
    found = {field.name: values[field.name] for field in fields if field.name in values}
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in found.items()})
