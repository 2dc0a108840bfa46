"""The cost of each test, one JSON line in `.pytest_cache/costs.jsonl`, and a budget of CPU seconds for each file (budgets.toml).

CPU seconds, because a busy machine makes a test longer and not dearer: those of this process, of the children that it waited for, and of
what they started for it elsewhere. What a lab leaves running is not in them.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = Path(__file__).with_name("budgets.toml")
OVER = 1.5  # a file that costs more than its budget times this has changed
# Modules with processes that serve many tests: `spent_s` is what those have cost so far.
ELSEWHERE = ("scripts/practice/prepared_commands", "tests/worker/harness")


def own_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime + sum(getattr(sys.modules.get(name.replace("/", ".")), "spent_s", 0.0) for name in ELSEWHERE)


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Costs:
    """Writes a line for each test; several processes may write at once."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def pytest_sessionstart(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text("")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        began, own, children = time.monotonic(), own_s(), children_s()
        result = yield
        cpu_s = own_s() - own
        if nextitem is not None:  # at the end of a process its servants end, whose work is counted already
            cpu_s += children_s() - children
        row = {"test": item.nodeid, "seconds": round(time.monotonic() - began, 3), "cpu_seconds": round(cpu_s, 3)}
        into = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(into, (json.dumps(row) + "\n").encode())
        os.close(into)
        return result


def by_file(file: Path) -> Counter[str]:
    """CPU seconds of each test file, as they were written."""
    sums: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        row = json.loads(line)
        sums[row["test"].partition("::")[0]] += row["cpu_seconds"]
    return sums


def over_budget(sums: Counter[str], budgets: dict[str, float], default: float) -> list[str]:
    return [
        f"{name}: {spent:.0f} s of CPU, its budget is {allowed:g} (tests/budgets.toml)"
        for name, spent in sums.most_common()
        if spent > OVER * (allowed := budgets.get(name, default))
    ]


def told() -> tuple[dict[str, float], float]:
    """(budgets of files, budget of each other file)"""
    table = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    return table["files"], table["default"]
