"""Leaving the dashboard on a real terminal: a sentence says that the run goes on, and the terminal is as it was."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(60)
_PROGRAM = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from pathlib import Path
from homelab.cli import main
from homelab.cli.clean_console import CleanConsole
from homelab.controller.features.status import monitor
from homelab.controller.run.paths import RunPaths
from tests.controller.dashboard import sample

class Watcher:
    def __init__(self, *_): ...
    def look(self): return sample.snapshot()
    def leave(self): ...

monitor.Watcher = Watcher
main.run = lambda arguments: monitor.until_end(None, RunPaths(Path("runs") / sample.RUN), console=CleanConsole(), options=lambda name: "")
main.main()
"""


@pytest.mark.parametrize(("key", "code"), [(b"q", 0), (b"\x03", 130)], ids=["q", "ctrl-c"])
def test_who_leaves_reads_that_the_run_goes_on(key: bytes, code: int) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (30, 100))
    before = termios.tcgetattr(theirs)
    environment = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONPATH": str(Path(__file__).parents[3])}
    environment.pop("NO_COLOR", None)
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, env=environment
    ) as program:
        said = _until(ours, "q leave", program)
        os.write(ours, key)
        said += _until(ours, "to end it:     homelab stop", program)
        said += _rest(ours, program)
    assert program.returncode == code, said
    assert termios.tcgetattr(theirs) == before, "echo and lines are back"
    left = said.rpartition("\x1b[?1049l")[2]
    assert "\x1b[?25h" in said[said.rindex("\x1b[?25l") :], "the cursor is back"
    plain = re.sub(r"\x1b\[[\d;?]*\w", "", left)
    assert "The run continues without the dashboard.\r\n  to look again: homelab status --wait" in plain and "interrupted" not in plain
    os.close(ours)
    os.close(theirs)


def _until(descriptor: int, words: str, program: subprocess.Popen[bytes]) -> str:
    said, end_s = "", time.monotonic() + 40
    while words not in said and time.monotonic() < end_s and (program.poll() is None or select.select([descriptor], [], [], 0)[0]):
        if select.select([descriptor], [], [], 0.2)[0]:
            said += os.read(descriptor, 1 << 16).decode("utf-8", "replace")
    assert words in said, said
    return said


def _rest(descriptor: int, program: subprocess.Popen[bytes]) -> str:
    program.wait(30)
    said = ""
    while select.select([descriptor], [], [], 0)[0]:
        said += os.read(descriptor, 1 << 16).decode("utf-8", "replace")
    return said
