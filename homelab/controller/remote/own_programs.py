"""The programs that the ways to nodes run on this machine. Who ends without waiting for them ends them, too."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Sequence
from typing import Any

_started: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()
_adding = threading.Lock()


def start(command: Sequence[str | bytes], **options: Any) -> subprocess.Popen[bytes]:
    """As `subprocess.Popen`."""
    process = subprocess.Popen(command, **options)
    with _adding:
        _started.add(process)
    return process


def end_group(process: subprocess.Popen[bytes], first: signal.Signals = signal.SIGTERM) -> None:
    """End a program that was started in a session of its own, and all that it has started there (a proxy, a `Match exec`).

    `first`: SIGINT for one of Python, which tidies up then.
    """
    for number in (first, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says EPERM of a group whose members are all gone
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def kill_all() -> None:
    """End those that still run, at once: this process is about to end, and its threads with it."""
    with _adding:
        running = [process for process in _started if process.poll() is None]
    for process in running:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            leads = os.getpgid(process.pid) == process.pid
            (os.killpg if leads else os.kill)(process.pid, signal.SIGKILL)
