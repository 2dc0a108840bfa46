"""Tests that are played last, and only where a run has time left: spare.toml names them.

A full run has to end in time on a slow machine too. There it leaves these out and says how many; on a usual one it plays them all.
"""

from __future__ import annotations

import time
import tomllib
from collections import Counter
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("spare.toml")
BEGAN = time.monotonic()  # of the whole run: a lane that was forked from it reads the same clock
NO_TIME = "no time was left for it (tests/spare.toml)"


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--spare-until", type=float, metavar="S", help="begin no test of tests/spare.toml later than S seconds after the start"
    )


def named() -> dict[str, list[str]]:
    """Test file -> names of its tests, or of one of their cases."""
    names: dict[str, list[str]] = tomllib.loads(FILE.read_text(encoding="utf-8"))["names"]
    return names


def thinned() -> list[str]:
    """Test files of whose tests with many cases each third case is always played."""
    files: list[str] = tomllib.loads(FILE.read_text(encoding="utf-8"))["each_third_case"]
    return files


def mark(items: list[pytest.Item], root: Path) -> None:
    """Mark what is spare, and move it behind all that is not. Raises pytest.UsageError for a name that no test of a whole file has."""
    names, few = named(), set(thinned())
    left = {file: set(of_it) for file, of_it in names.items()}
    cases: Counter[str] = Counter()
    for item in items:
        file = str(item.path.relative_to(root))
        of_many = getattr(item, "originalname", item.name)
        found = {item.name, of_many} & set(names.get(file, ()))
        if found or (file in few and cases[f"{file}::{of_many}"] % 3):
            item.add_marker(pytest.mark.spare)
        cases[f"{file}::{of_many}"] += 1
        left.get(file, set()).difference_update(found)
    # With --lf pytest collects of a file only what has failed.
    whole = {
        str(item.path.relative_to(root))
        for item in items
        if "::" not in "".join(item.config.args) and not item.config.getoption("lf", False)
    }
    gone = [f"{file}::{name}" for file in sorted(whole & left.keys()) for name in sorted(left[file])]
    if gone:
        raise pytest.UsageError(f"tests/spare.toml names what is not there: {', '.join(gone)}")
    items.sort(key=lambda item: item.get_closest_marker("spare") is not None)


class SpareTime:
    """Leaves out what is spare once its time is over, and says so at the end."""

    def __init__(self, until_s: float) -> None:
        self.until_s = until_s

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.get_closest_marker("spare") and time.monotonic() - BEGAN > self.until_s:
            pytest.skip(NO_TIME)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        left_out = [
            report
            for report in terminalreporter.getreports("skipped")
            if isinstance(report.longrepr, tuple) and NO_TIME in report.longrepr[2]
        ]
        if left_out:
            terminalreporter.write_line(
                f"{len(left_out)} tests were left out, for this machine is slow; they are played by: scripts/test spare"
            )
