"""The desk of the tests is a terminal, wherever the tests themselves were started."""

from __future__ import annotations

import signal
from pathlib import Path

from scripts.practice.desk import Desk, kill_whole


def test_what_a_desk_starts_heeds_the_signals_that_its_caller_ignores(quiet_desk: Desk) -> None:
    """As under nohup, and behind a shell's `&`."""
    numbers = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        process = quiet_desk.spawn("--version")
        (ignored,) = [line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if line.startswith("SigIgn")]
        kill_whole(process)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert [number.name for number in numbers if int(ignored.split()[1], 16) >> (number - 1) & 1] == []
