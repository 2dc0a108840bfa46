"""What counts as whole is on the disk by then: a power cut may lose whatever was not synced."""

from __future__ import annotations

import io
import os
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from homelab.controller.remote import bootstrap, ship
from homelab.node.setup import pieces, record, worker_environment
from tests.fakes import ask_node


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The files of the home at each os.sync(), by name."""
    monkeypatch.setenv("HOME", str(tmp_path))
    seen: list[set[str]] = []
    monkeypatch.setattr(os, "sync", lambda: seen.append({path.name for path in tmp_path.rglob("*")}))
    return seen


def test_shipped_code_has_its_place_once_it_is_on_the_disk(tmp_path: Path, synced: list[set[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    archive = ship.tar({"homelab/a.py": b"1"}, mode=0o644)
    monkeypatch.setattr(sys, "argv", ["-c", str(tmp_path / "code")])
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(archive)))
    on_disk: list[Path] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda descriptor: on_disk.append(Path(f"/proc/self/fd/{descriptor}").readlink()) or fsync(descriptor))
    before: list[Path] = []
    monkeypatch.setattr(os, "rename", lambda *names: before.extend(on_disk) or rename(*names))
    exec(bootstrap._UNPACK, {})
    assert (tmp_path / "code/homelab/a.py").read_text() == "1"
    assert {path.name for path in before} == {"a.py", "complete"} and not synced, (
        "a checkpoint of many GB may be on its way to the same disk"
    )


def test_a_python_has_its_place_once_it_is_on_the_disk(tmp_path: Path, synced: list[set[str]]) -> None:
    record.note(record.folder())
    with tarfile.open(pieces.place(worker_environment.ARCHIVE), "w:gz") as archive:
        program = tarfile.TarInfo("bin/python3.12")
        program.mode = 0o755
        archive.addfile(program, io.BytesIO())
    place = worker_environment.unpack("3.12")
    (before,) = synced
    assert "python3.12" in before and Path(place).parent.parent.name not in before


def test_an_environment_counts_as_whole_once_it_is_on_the_disk(
    tmp_path: Path, synced: list[set[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    locks: list[str] = []
    write = record.write

    def noted(made: dict[str, Any]) -> None:
        locks.append(f"{len(synced)} {list(made['locks'].values())}")
        write(made)

    monkeypatch.setattr(record, "write", noted)
    monkeypatch.setattr(worker_environment, "_unpack_uv", lambda: None)
    monkeypatch.setattr(worker_environment, "_uv", lambda *_: [])
    record.note(record.folder())
    Path(pieces.place("requirements.txt")).write_text("")
    request = {"environment": "~/env", "python": "/usr/bin/python3", "version": "3.11", "lock": "x", "is_closed": True}
    ask_node("setup-make", {**request, "workdir": "~/homelab"})
    assert locks[-2:] == ["0 ['']", "1 ['x']"]
