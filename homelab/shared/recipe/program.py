"""`[script]`: a program of one's own. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from homelab.shared.markers import Shortest


@dataclass(frozen=True)
class Script:
    """Any Python program that torchrun can start, instead of the built-in worker."""

    path: Annotated[str, Shortest(1)]
    args: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
