"""The cost of each test, one JSON line in `.pytest_cache/costs.jsonl`, and a budget of CPU seconds for each file (budgets.toml).

CPU seconds, because a busy machine makes a test longer and not dearer. Where the kernel keeps an account of a group of processes (cgroup v1,
cpuacct), they are those of all that this process has started, the nodes of its labs among them, which are nobody's children. Elsewhere they
are those of this process, of the children that it waited for, and of what they started for it elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = Path(__file__).with_name("budgets.toml")
OVER = 2.5  # a file that costs more than its budget times this has changed; less is what machines and days differ by
USUAL = 0.4  # of its budget, in the median: budgets are about twice of what was measured
SKIPPED = 0.1  # of its budget: a file that costs less has not played its tests, and says nothing of the machine
ENOUGH = 20  # files that tell how fast this machine is
# Modules with processes that serve many tests: `spent_s` is what those have cost so far.
ELSEWHERE = ("scripts/practice/prepared_commands", "tests/worker/harness")


def own_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime + sum(getattr(sys.modules.get(name.replace("/", ".")), "spent_s", 0.0) for name in ELSEWHERE)


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Account:
    """The kernel's account of this process and of all that it starts from now on, also of what leaves it. `spent_s` is None without one."""

    tree = Path("/sys/fs/cgroup/cpuacct")

    def __init__(self, owner: int) -> None:
        self.pid, self._folder = os.getpid(), self.tree / f"homelab-tests-{owner}-{os.getpid()}"
        try:
            self._folder.mkdir()
            (self._folder / "cgroup.procs").write_text(str(self.pid))
        except OSError:  # cgroup v2 alone, or somebody else's machine
            self._folder = Path(os.devnull)

    def spent_s(self) -> float | None:
        try:
            return int((self._folder / "cpuacct.usage").read_text()) / 1e9
        except OSError:
            return None

    @classmethod
    def close_all(cls) -> None:
        """Remove the accounts that have no process any more: those of this run, and of earlier ones whose servants ended after them."""
        with contextlib.suppress(OSError):
            (cls.tree / "cgroup.procs").write_text(str(os.getpid()))
        for folder in cls.tree.glob("homelab-tests-*"):
            with contextlib.suppress(OSError):
                folder.rmdir()


class Costs:
    """Writes a line for each test; several processes may write at once."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._owner = os.getpid()
        self._account: Account | None = None

    def pytest_sessionstart(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text("")

    def pytest_unconfigure(self) -> None:
        if os.getpid() == self._owner:
            Account.close_all()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        if self._account is None or self._account.pid != os.getpid():  # a lane was forked
            self._account = Account(self._owner)
        began, own, children, all_s = time.monotonic(), own_s(), children_s(), self._account.spent_s()
        result = yield
        cpu_s = own_s() - own
        if nextitem is not None:  # at the end of a process its servants end, whose work is counted already
            cpu_s += children_s() - children
        now_s = self._account.spent_s()
        if all_s is not None and now_s is not None:
            cpu_s = now_s - all_s
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


def slowness(sums: Counter[str], budgets: dict[str, float]) -> float:
    """How many times slower this machine is than those that the budgets were made on, by the median of all files; never less than 1.

    One machine takes twice the CPU seconds of another, and of itself on another day (measured): a budget alone would fail what nobody changed.
    """
    shares = [share for name, budget in budgets.items() if (share := sums[name] / budget) >= SKIPPED]
    return max(1.0, statistics.median(shares) / USUAL) if len(shares) >= ENOUGH else 1.0


def over_budget(sums: Counter[str], budgets: dict[str, float], default: float) -> list[str]:
    over = OVER * slowness(sums, budgets)
    return [
        f"{name}: {spent:.0f} s of CPU, its budget is {allowed:g} (tests/budgets.toml)"
        for name, spent in sums.most_common()
        if spent > over * (allowed := budgets.get(name, default))
    ]


def told() -> tuple[dict[str, float], float]:
    """(budgets of files, budget of each other file)"""
    table = tomllib.loads(BUDGETS.read_text(encoding="utf-8"))
    return table["files"], table["default"]
