"""The list of runs: names that can be copied, and times that are true."""

from __future__ import annotations

import pytest

from homelab.controller.dashboard import run_list
from homelab.controller.dashboard.run_list import RunRow

NOW = 1_795_268_700.0
NAME = "2026-11-21-1405-a-recipe-with-a-rather-long-name-of-its-own"


def row(name: str) -> RunRow:
    return RunRow(name, "running", 3, NOW - 7200.0, ("tower", "laptop", "old"))


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_name_is_neither_cut_nor_broken(width: int) -> None:
    lines = [line.plain for line in run_list.lines([row(NAME), row("2026-11-21-1404-short")], NOW, width)]
    assert len(lines) == 3 and lines[1].split()[:2] == [NAME, "running"] and lines[2].split()[:2] == ["2026-11-21-1404-short", "running"]
    assert max(map(len, lines)) <= max(width, len(f"{NAME}  running"))


def test_the_least_important_columns_go_first() -> None:
    def headings(width: int) -> list[str]:
        return run_list.lines([row("2026-11-21-1405-llama7b-lora")], NOW, width)[0].plain.split()

    assert headings(80) == ["run", "state", "attempt", "started", "nodes"]
    assert headings(60) == ["run", "state", "started"]
    assert headings(40) == ["run", "state"]


@pytest.mark.parametrize(
    ("ago_s", "said"),
    [
        (0.0, "now"),
        (-0.5, "now"),
        (1.0, "1 second ago"),
        (59.9, "59 seconds ago"),
        (60.0, "1 minute ago"),
        (7200.0, "2 hours ago"),
        (86400.0, "1 day ago"),
        (40 * 86400.0, "1 month ago"),
        (800 * 86400.0, "2 years ago"),
        (-7200.0, "ahead of this clock"),
        (None, ""),
    ],
)
def test_what_lies_ahead_is_not_said_to_be_past(ago_s: float | None, said: str) -> None:
    seen = run_list.ago(None if ago_s is None else NOW - ago_s, NOW)
    assert seen.endswith(said) and ("ago" in seen) == ("ago" in said)
