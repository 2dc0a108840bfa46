"""The messages of the node program about what a run has made. The controller validates them: `homelab.controller.remote.answers_of_nodes`."""

from __future__ import annotations

from typing import TypedDict


class Results(TypedDict):
    """The answer of `result-look`. `merged`: folder of the adapter that was merged, or ""; `steps`: complete checkpoints; `exported`: those of them in the format of final/;
    `profiles`: ranks whose profile is here; `saved_files`: what a program of one's own has saved here, `saved_step`: its newest checkpoint, 0 for none."""

    run_known: bool
    final: bool
    merged: str
    machine: str
    gguf: list[str]
    steps: list[int]
    exported: list[int]
    profiles: list[int]
    saved_files: int
    saved_step: int
    memory_bytes: int
    disk_bytes: int


class ResultFile(TypedDict):
    """One file of a result."""

    name: str
    size: int
    sha256: str


class ResultFiles(TypedDict):
    """The answer of `result-files`."""

    path: str
    files: list[ResultFile]
    left_out: list[str]


class RunFolder(TypedDict):
    """How large a run's folder is on a node, whether a trained model is in it, and who is at work on it ("" for nobody)."""

    bytes: int
    final: bool
    busy: str


class RunFolders(TypedDict):
    """The answer of `run-weigh`, by run."""

    runs: dict[str, RunFolder]
