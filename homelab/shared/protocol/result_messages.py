"""The messages of the node program about what a run has made. Names and sizes become paths and bytes at the controller: they are bounded."""

from __future__ import annotations

from typing import Annotated, Literal

from homelab.shared.markers import Longest, Matches, Shortest
from homelab.shared.protocol import result_files
from homelab.shared.protocol.marks import MOST_RUNS, Count, FileName, Line, Path, RunName, Step, Steps
from homelab.shared.protocol.message import Message
from homelab.shared.protocol.request import RunRequest


class ResultRequest(RunRequest):
    """`result-files` and `saved-files`."""

    folder: FileName


class PartRequest(ResultRequest):
    """`result-part`: so many bytes of a file, from a place on."""

    name: Path
    offset: Count
    count: Count


class Results(Message):
    """The answer of `result-look`. `merged`: folder of the adapter that was merged, or ""; `steps`: complete checkpoints; `exported`: those of them in the format of final/;
    `profiles`: ranks whose profile is here; `saved_files`: what a program of one's own has saved here, `saved_step`: its newest checkpoint, 0 for none."""

    run_known: bool
    final: bool
    merged: Annotated[str, Longest(40)]
    machine: Annotated[str, Matches(r"^\w{1,40}\z")]
    gguf: Annotated[tuple[Annotated[str, Longest(20)], ...], Longest(100)]
    steps: Steps
    exported: Steps
    profiles: Steps = ()
    saved_files: Count = 0
    saved_step: Step = 0
    memory_bytes: Count
    disk_bytes: Count


class ResultFile(Message):
    """One file of a result: one path component, of a kind that holds no code."""

    name: str
    size: Count
    sha256: Annotated[str, Matches(r"^[0-9a-f]{64}\z")]

    def check(self) -> None:
        """Raises ValueError for another name, and for more bytes than such a file has."""
        if not result_files.is_name(self.name):
            raise ValueError(f"not a file of a result: {self.name[:100]!r}")
        if self.size > result_files.most_bytes(self.name):
            raise ValueError(f"{self.name} has {self.size} bytes")


class SavedFile(ResultFile):
    """One file of what a program of one's own has saved: of any kind, in a folder below saved/ or in none."""

    def check(self) -> None:
        """Raises ValueError for another name, and for more bytes than such a file has."""
        if not result_files.is_saved_name(self.name):
            raise ValueError(f"not a file below saved/: {self.name[:100]!r}")
        if self.size > result_files.MOST_WEIGHT_BYTES:
            raise ValueError(f"{self.name} has {self.size} bytes")


class ResultFiles(Message):
    """The answer of `result-files`."""

    path: Path
    files: Annotated[tuple[ResultFile, ...], Shortest(1), Longest(result_files.MOST_FILES)]
    left_out: Annotated[tuple[FileName, ...], Longest(10_000)] = ()

    def check(self) -> None:
        """Raises ValueError where two files have the same name: some disks do not tell small letters from capital ones."""
        if len({file.name.lower() for file in self.files}) != len(self.files):
            raise ValueError("two files have the same name")


class SavedFiles(ResultFiles):
    """The answer of `saved-files`."""

    files: Annotated[tuple[SavedFile, ...], Shortest(1), Longest(result_files.MOST_FILES)]


class RunFolder(Message):
    """How large a run's folder is on a node, and who is at work on it ("" for nobody). `result`: the folder in it that a person would miss,
    final/ or saved/, or ""; `step`: of the newest complete checkpoint, 0 for none."""

    bytes: Count
    result: Literal["", "final", "saved"]
    step: Step
    busy: Line


class RunFolders(Message):
    """The answer of `run-weigh`, by run."""

    runs: Annotated[dict[RunName, RunFolder], Longest(MOST_RUNS)]
