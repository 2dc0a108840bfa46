"""What comes after what was printed already, and the shape of what is printed."""

from __future__ import annotations

import pytest

from homelab.controller.features.status.logs import RankLog, RunLogs, new_lines


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ([], ["a"], ["a"]),
        (["a", "b"], ["b", "c"], ["c"]),
        (["a"], ["x", "a", "b"], ["b"]),
        (["a"], ["b"], ["b"]),
        (["a"], ["a"], []),
        (["a"], [], []),
    ],
)
def test_a_line_is_printed_once(old: list[str], new: list[str], expected: list[str]) -> None:
    assert new_lines(old, new) == expected


def test_the_json_is_what_was_read() -> None:
    logs = RunLogs("r", 1, 2, {0: RankLog("a", ["x"], [])}, {"a": ["t"]}, {"b": "off"}, is_final=True)
    assert logs.as_dict() == {
        "run": "r", "attempt": 1, "newest_attempt": 2, "ranks": {0: {"node": "a", "stdout": ["x"], "stderr": []}}, "torchrun": {"a": ["t"]},
        "unreachable": {"b": "off"},
    }  # fmt: skip
