"""The desk of the tests is a terminal, wherever the tests themselves were started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.practice.desk import REPOSITORY, Desk, kill_whole


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


END = """
import atexit, sys, threading, time
from scripts.practice.prepared_commands import _end
def late():
    time.sleep(0.1)
    print("a thread")
threading.Thread(target=late).start()
atexit.register(print, "registered")
print("said", end=" ")
"""


@pytest.mark.parametrize("out", ["a pipe", "/dev/full"])
def test_a_prepared_command_ends_as_python_ends(out: str) -> None:
    """A thread is waited for, what is registered runs, what was said is written, and what cannot be written is an exit code."""
    ended = []
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    for end in ("sys.exit(3)", "_end(3)"):
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-c", END + end], cwd=REPOSITORY, env=buffered, text=True, timeout=60, stderr=subprocess.PIPE,
                stdout=full if out == "/dev/full" else subprocess.PIPE,
            )  # fmt: skip
        ended.append((done.returncode, done.stdout))
    assert ended[0] == ended[1] == ((120, None) if out == "/dev/full" else (3, "said a thread\nregistered\n"))
