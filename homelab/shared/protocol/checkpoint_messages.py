"""The messages of the node program about the files and the checkpoints that are sent between nodes."""

from __future__ import annotations

from typing import Annotated, Optional

from homelab.shared.markers import AtLeast, AtMost, Longest
from homelab.shared.protocol.marks import MOST_FILES, MOST_STEPS, Count, FileName, Path, Step, StepName, Words
from homelab.shared.protocol.message import Message
from homelab.shared.protocol.request import Request, RunRequest

Sha256 = Annotated[str, Longest(64)]


class FileRequest(Request):
    """`has-file` and `receive-file`, with its bytes: a shipped file (`homelab.shared.protocol.layout.data_file`). `size`: no more bytes are written."""

    sha256: Sha256
    name: FileName
    folder: Optional[Sha256] = None
    inside: Optional[Path] = None
    size: Optional[Count] = None


class CheckpointsRequest(RunRequest):
    """`checkpoints`. With `set_aside` the bad ones are moved out of the way where a good one is left, with `begin_again` all; nothing of the run may be
    running then."""

    layout: Annotated[str, Longest(40)] = ""  # of the strategy: `homelab.shared.protocol.checkpoint_holders.SHARDED`
    set_aside: bool = False
    begin_again: bool = False


class CheckpointRequest(RunRequest):
    """`manifest`, `unpack-checkpoint`, `send-checkpoint`, and `receive-checkpoint`, with its archive: that has these `files` (name -> sha256) and no more `bytes`."""

    step: Step
    files: Annotated[dict[FileName, str], Longest(MOST_FILES)] = {}
    bytes: Optional[Count] = None


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
