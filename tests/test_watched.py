"""What is watched is seen, in the part alone; and no other test leaves a hook in the process of those after it."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import pytest

from tests import watched

HOOKS = ("addaudithook", "settrace", "setprofile")
MAY = {"watched.py": "in a child"}


def test_what_a_part_opens_is_seen_there_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("content")
    imported = b"x" * 500_000_000  # as much as the tests before it have imported: KiB taken for kB would be 12 MB less
    left = [b"x" * 200_000_000]  # and what they have left to the collector
    left.append(left)  # type: ignore[arg-type]
    del left
    large = b"x" * 31_000_000
    del large  # from now on the allocator keeps blocks up to this size
    blocks = [b"x" * 20_000_000 for _ in range(8)]
    behind = [bytes(5_000) for _ in range(100)]  # so it cannot give back the blocks before them by itself
    del blocks

    def part() -> str:
        content = (tmp_path / "a").read_text()
        gc.collect()
        held = b"x" * 60_000_000
        assert len(held) and str(tmp_path / "a") in watched.opened
        return content

    found = watched.apart(part)
    del imported, behind
    assert found.result == "content" and 55 < found.peak_mb < 200, "its own, not what this process has imported"
    (tmp_path / "a").read_text()
    assert watched.opened == []


def test_a_part_that_fails_or_dies_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        watched.apart(lambda: 1 / 0)
    with pytest.raises(AssertionError, match="ended without a word, with 3"):
        watched.apart(lambda: __import__("os")._exit(3))


def test_no_other_test_leaves_a_hook() -> None:
    here = Path(__file__).parent
    found = set()
    for file in here.rglob("*.py"):
        if any(hook in (text := file.read_text(encoding="utf-8")) for hook in HOOKS):
            names = {
                node.func.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            }
            found |= {str(file.relative_to(here))} if names & set(HOOKS) else set()
    assert found == set(MAY)
