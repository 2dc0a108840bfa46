"""Small files: no reader sees half of one, and a damaged one is no traceback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from homelab.shared.protocol import files


def refuse(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("write", [files.write_atomic, files.replace])
def test_a_refused_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")
    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="No space"):
        write(file, b"new")  # type: ignore[operator]
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_folders_are_made(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a" / "b.json", {"x": 1})
    assert files.read_object(tmp_path / "a" / "b.json") == {"x": 1}


def test_the_mode_is_that_of_the_call(tmp_path: Path) -> None:
    files.write_json(tmp_path / "secrets.json", {}, mode=0o600)
    assert (tmp_path / "secrets.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("text", ["", "[1]", "{", "5", 100_000 * "["])
def test_what_is_no_object_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert files.read_object(tmp_path / "x.json") is None


def test_broken_lines_are_left_out() -> None:
    assert files.json_objects(['{"a": 1}', "[]", '{"b":', '{"c": 2}']) == [{"a": 1}, {"c": 2}]


def test_the_tail_of_a_long_file_begins_with_a_whole_line(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("first line\n" + "second\n" + "third\n")
    assert files.tail(tmp_path / "log", 5, byte_limit=15) == ["second", "third"]


def test_a_heartbeat_brings_no_deleted_folder_back(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        files.replace(tmp_path / "run" / "heartbeat.json", b"{}")
    assert not (tmp_path / "run").exists()
    files.write_atomic(tmp_path / "run" / "exit.json", b"{}")
    assert (tmp_path / "run" / "exit.json").read_bytes() == b"{}"
