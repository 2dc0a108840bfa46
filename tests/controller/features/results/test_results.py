"""Whose copy is taken, what a node may say of its files, and what is missing here."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.facts.reading import read
from homelab.controller.features.results import best_copy
from homelab.controller.features.results.missing import check_room, left_bytes, missing, weights_fault
from homelab.shared.protocol.message import as_json
from homelab.shared.protocol.result_messages import ResultFile, ResultFiles, Results

SHA = "a" * 64


def result(**changes: Any) -> Results:
    empty = {
        "run_known": True,
        "final": False,
        "merged": "",
        "machine": "x86_64",
        "gguf": (),
        "steps": (),
        "exported": (),
        "memory_bytes": 10,
        "disk_bytes": 10,
    }
    return read(Results, {**empty, **changes})


def file(name: str = "a.safetensors", size: int = 100, sha256: str = SHA) -> ResultFile:
    return read(ResultFile, {"name": name, "size": size, "sha256": sha256})


def test_a_finished_model_goes_before_checkpoints_and_the_newest_step_before_memory() -> None:
    done = {"a": result(final=True), "b": result(steps=(2, 9), memory_bytes=99)}
    assert (best_copy.choose("r", done, {}).node, best_copy.choose("r", done, {}).folder) == ("a", "final")
    steps = {"a": result(steps=(2,), memory_bytes=99), "b": result(steps=(4,), memory_bytes=1), "c": result(steps=(4,), memory_bytes=2)}
    chosen = best_copy.choose("r", steps, {})
    assert (chosen.node, chosen.folder, chosen.is_exported) == ("c", "exports/step-00000004", False)
    assert best_copy.choose("r", {**steps, "b": result(steps=(4,), exported=(4,))}, {}).node == "b"


def test_nothing_is_trained_yet_or_the_node_that_has_it_is_away() -> None:
    away = UnreachableError("no route", where="node b", hint="wake it")
    with pytest.raises(HomelabError, match="no finished model") as refused:
        best_copy.choose("r", {"a": result()}, {"b": away})
    assert "b did not answer" in refused.value.where and "homelab preflight --nodes b" in refused.value.hint
    with pytest.raises(UnreachableError, match="no route"):
        best_copy.choose("r", {}, {"b": away})


@pytest.mark.parametrize(
    "name", ["../x.json", "/etc/x.json", "a/b.json", ".json", "..", "optimizer.pt", "pytorch_model.bin", "x.pkl", "x.py", "a.json\n", ""]
)
def test_a_name_that_is_not_fetched(name: str) -> None:
    with pytest.raises(ValidationError):
        file(name)


@pytest.mark.parametrize(
    "files",
    [
        [],
        [file("A.json"), file("a.json")],
        [{"name": "a.json", "size": 5 << 30, "sha256": SHA}],
        [{"name": "a.json", "size": -1, "sha256": SHA}],
    ],
)
def test_files_that_no_result_has(files: Any) -> None:
    with pytest.raises(ValidationError):
        read(
            ResultFiles, {"path": "/x", "files": [entry if isinstance(entry, dict) else as_json(entry) for entry in files], "left_out": []}
        )


def test_only_what_is_missing_comes() -> None:
    other = file("b.json", 50, "b" * 64)
    parts = missing([file(), other], {"b.json": "b" * 64}, {SHA: 40})
    assert [(part.file.name, part.have_bytes) for part in parts] == [("a.safetensors", 40)] and left_bytes(parts) == 60
    assert missing([file()], {"a.safetensors": "c" * 64}, {SHA: 101})[0].have_bytes == 0


def test_a_disk_without_room_is_named_with_both_numbers() -> None:
    with pytest.raises(HomelabError, match=r"1\.0 GB are missing, but 1\.0 GB are free"):
        check_room(missing([file(size=10**9)], {}, {}), 10**9, "/x")
    check_room((), 0, "/x")


def test_weights_are_what_they_are_called() -> None:
    assert weights_fault("a.safetensors", (20).to_bytes(8, "little") + b"{", 100) is None
    assert weights_fault("a.gguf", b"GGUF\x03", 100) is None and weights_fault("a.json", b"\x80\x02", 100) is None
    assert weights_fault("a.safetensors", b"\x80\x02ccopy_reg", 100) and weights_fault("a.gguf", b"PK\x03\x04", 100)
    assert weights_fault("a.safetensors", (200).to_bytes(8, "little") + b"{", 100)
