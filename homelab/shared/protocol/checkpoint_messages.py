"""The messages of the node program about the files and the checkpoints that are sent between nodes."""

from __future__ import annotations

from typing import Annotated

from homelab.shared.markers import AtLeast, AtMost, Longest
from homelab.shared.protocol.marks import MOST_FILES, MOST_STEPS, Count, FileName, Path, Step, StepName, Words
from homelab.shared.protocol.message import Message


class HasFile(Message):
    """The answer of `has-file`: it is there with the content it was sent with, or with another one."""

    found: bool
    differs: bool


class Shards(Message):
    """The parts of a checkpoint that a folder has, counted from 0, and how many there are."""

    of: Annotated[int, AtLeast(1), AtMost(65536)]
    held: Annotated[tuple[Annotated[int, AtLeast(0), AtMost(65535)], ...], Longest(65536)]


class Checkpoints(Message):
    """The answer of `checkpoints`: steps. Those older than the newest good one are read only where each node has its own part (`shards`, by step)."""

    good: Annotated[tuple[Step, ...], Longest(MOST_STEPS)]
    bad: Annotated[dict[StepName, Words], Longest(MOST_STEPS)]
    run_known: bool = True
    shards: Annotated[dict[StepName, Shards], Longest(MOST_STEPS)] = {}


class Manifest(Message):
    """The answer of `manifest`: fingerprint of the recipe with which it was saved, None without a manifest; digests and bytes of its files."""

    recipe_hash: Annotated[str, Longest(200)] | None
    path: Path
    files: Annotated[dict[FileName, Annotated[str, Longest(100)]], Longest(MOST_FILES)] = {}
    sizes: Annotated[dict[FileName, Count], Longest(MOST_FILES)] = {}
