"""No Python that the controller starts looks for modules in the folder that it is typed in: ./pip.py and ./tensorboard.py there are strangers."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import homelab
from homelab.controller.features.setup import cache

ROOT = Path(homelab.__file__).parent
ROOMS = ("cli", "controller", "lab")
# What is only printed for a person, or is the first line of a script.
NOT_STARTED = {"controller/base/package.py"}
SAFE = ("-P", "-I", "-IS")


def started(file: Path) -> Iterator[tuple[int, str]]:
    """(line, second word) of every list or call that begins with, or has, sys.executable as a program."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.List | ast.Tuple | ast.Call):
            continue
        words = node.args if isinstance(node, ast.Call) else node.elts
        for position, word in enumerate(words):
            if ast.unparse(word) == "sys.executable" and position + 1 < len(words):
                following = words[position + 1]
                yield (
                    node.lineno,
                    following.value if isinstance(following, ast.Constant) and isinstance(following.value, str) else ast.unparse(following),
                )


@pytest.mark.parametrize(
    "file", sorted(file for room in ROOMS for file in (ROOT / room).rglob("*.py")), ids=lambda file: str(file.relative_to(ROOT))
)
def test_a_python_that_the_controller_starts_does_not_read_the_current_folder(file: Path) -> None:
    if str(file.relative_to(ROOT)) not in NOT_STARTED:
        assert [(line, word) for line, word in started(file) if word.startswith("-") and word not in SAFE] == []


def test_the_rule_sees_what_it_is_for(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    for text, words in (
        ('run([sys.executable, "-m", "pip"])', ["-m"]), ('c = [*prefix, sys.executable, "-P", "-m"]', ["-P"]), ('shell(lab, sys.executable, "-c", x)', ["-c"]),
    ):  # fmt: skip
        file.write_text(text)
        assert [word for _, word in started(file)] == words


def test_a_pip_of_the_current_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    cache.pip(["--version"], "it says its version")
    assert not (tmp_path / "ran").exists()
    subprocess.run([sys.executable, "-m", "pip"], check=False, capture_output=True)
    assert (tmp_path / "ran").exists(), "without -P it is"
