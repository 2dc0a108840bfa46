"""What a node says of its compiler: of this machine's, of none, and of one without headers."""

from __future__ import annotations

import stat
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from homelab.node.probes import python
from homelab.node.system import c_compiler, programs

pytestmark = [pytest.mark.timeout(60), pytest.mark.skipif(programs.path_of("gcc") is None, reason="there is no gcc here")]


def test_this_machine_compiles_and_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    seen = c_compiler.read()
    assert seen["error"] is None and Path(seen["compiler"]).name == "gcc" and Path(seen["headers"], "Python.h").is_file()
    assert list(tmp_path.iterdir()) == []


def test_without_headers_the_compiler_s_own_words_are_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    assert c_compiler.read()["error"] == "answer.c:2:10: fatal error: Python.h: No such file or directory"


def test_it_is_triton_s_choice_of_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CC before gcc before clang; `cc` alone is none."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(programs, "_ELSEWHERE", [])
    monkeypatch.setenv("PATH", str(tmp_path))

    def program(name: str, text: str = "exit 0") -> str:
        file = tmp_path / name
        file.write_text(f"#!/bin/sh\n{text}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
        return str(file)

    program("cc")
    assert c_compiler.read() == {"compiler": None, "headers": sysconfig.get_paths(scheme="posix_prefix")["include"], "error": None}
    clang = program("clang", "echo 'ld: cannot find crti.o' >&2; exit 1")
    assert (c_compiler.read()["compiler"], c_compiler.read()["error"]) == (clang, "ld: cannot find crti.o")
    gcc, mine = program("gcc"), program("mine", "exit 3")
    assert (c_compiler.read()["compiler"], c_compiler.read()["error"]) == (gcc, None)
    monkeypatch.setenv("CC", "mine")
    assert (c_compiler.read()["compiler"], c_compiler.read()["error"]) == (mine, "exit code 3")
    monkeypatch.setenv("CC", "away")
    assert c_compiler.read()["compiler"] is None


@pytest.mark.parametrize("request_", [{}, {"compiles": False}, {"compiles": True}])
def test_only_a_recipe_that_compiles_costs_a_compilation(request_: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c_compiler, "_error", lambda compiler, headers: "asked")
    seen = python.read(request_)["compiler"]
    assert (seen is not None) is request_.get("compiles", False)
