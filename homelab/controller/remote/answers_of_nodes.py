"""What a node answers about the results of a run. Pure. Names and sizes from a node become paths and bytes here: they are bounded."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from homelab.controller.base.models import WireModel
from homelab.shared.protocol import result_files

Step = Annotated[int, Field(ge=0, lt=10**12)]
Steps = Annotated[tuple[Step, ...], Field(max_length=100_000)]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]


class Results(WireModel):
    """`result-look`. `steps`: complete checkpoints; `exported`: those that were put into the format of final/;
    `profiles`: ranks."""

    run_known: bool
    final: bool
    merged: Annotated[str, Field(max_length=40)]
    machine: Annotated[str, Field(pattern=r"^\w{1,40}\z")]
    gguf: Annotated[tuple[Annotated[str, Field(max_length=20)], ...], Field(max_length=100)]
    steps: Steps
    exported: Steps
    profiles: Steps = ()
    saved_files: Bytes = 0
    saved_step: Step = 0
    memory_bytes: Bytes
    disk_bytes: Bytes


class ResultFile(WireModel):
    """One file of a result: one path component, of a kind that holds no code."""

    name: str
    size: Bytes
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}\z")]

    @field_validator("name")
    @classmethod
    def _usable(cls, name: str) -> str:
        if not result_files.is_name(name):
            raise ValueError(f"not a file of a result: {name[:100]!r}")
        return name

    @model_validator(mode="after")
    def _bounded(self) -> ResultFile:
        if self.size > result_files.most_bytes(self.name):
            raise ValueError(f"{self.name} has {self.size} bytes")
        return self


class SavedFile(ResultFile):
    """One file of what a program of one's own has saved: of any kind, in a folder below saved/ or in none."""

    @field_validator("name")
    @classmethod
    def _usable(cls, name: str) -> str:
        if not result_files.is_saved_name(name):
            raise ValueError(f"not a file below saved/: {name[:100]!r}")
        return name

    @model_validator(mode="after")
    def _bounded(self) -> SavedFile:
        if self.size > result_files.MOST_WEIGHT_BYTES:
            raise ValueError(f"{self.name} has {self.size} bytes")
        return self


class ResultFiles(WireModel):
    """`result-files`."""

    path: Annotated[str, Field(max_length=4096)]
    files: Annotated[tuple[ResultFile, ...], Field(min_length=1, max_length=result_files.MOST_FILES)]
    left_out: Annotated[tuple[Annotated[str, Field(max_length=300)], ...], Field(max_length=10_000)] = ()

    @field_validator("files")
    @classmethod
    def _distinct(cls, files: tuple[ResultFile, ...]) -> tuple[ResultFile, ...]:
        # Some disks do not tell small letters from capital ones.
        if len({file.name.lower() for file in files}) != len(files):
            raise ValueError("two files have one name")
        return files


class SavedFiles(ResultFiles):
    """`result-files` of saved/."""

    files: Annotated[tuple[SavedFile, ...], Field(min_length=1, max_length=result_files.MOST_FILES)]


class Made(WireModel):
    """The end of `result-make`: what the program has made, in its own words."""

    folder: Annotated[str, Field(max_length=200)]
    notes: Annotated[tuple[Annotated[str, Field(max_length=1000)], ...], Field(max_length=100)] = ()
    figures: Annotated[dict[Annotated[str, Field(max_length=100)], float | None], Field(max_length=100)] = {}

    @field_validator("folder")
    @classmethod
    def _known(cls, folder: str) -> str:
        return result_files.folder(folder)
