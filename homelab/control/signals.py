"""Ctrl-C, `kill` and a closed terminal end a command in one way; during work that must be done whole they wait until it is over."""

from __future__ import annotations

import errno
import os
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Ctrl-C, kill, and the end of the terminal or of the SSH session.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def count_alike() -> None:
    """From now on all of `SIGNALS` raise KeyboardInterrupt: what was begun is undone or told, whichever of them comes.

    A signal that is ignored stays ignored: the program that started us wants that (nohup).
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _interrupt)


def ignore() -> None:
    """From now on none of them counts."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def held() -> Iterator[None]:
    """What comes of `SIGNALS` inside the block is raised as KeyboardInterrupt at its end, unless the block itself raises.

    For steps that leave something running on a node when they are cut short, and for the clean-up after such a cut: people
    press Ctrl-C twice. Blocks nest; outside of the main thread, where no signal arrives, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def remember(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if number == signal.SIGHUP:
            _leave_terminal()
        if not came and sys.stderr.isatty():
            sys.stderr.write("\ninterrupted: one moment, nothing is left half done\n")
        came = True

    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, remember)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGHUP:
        _leave_terminal()
    raise KeyboardInterrupt


def _leave_terminal() -> None:
    """Discard further output: a terminal that is gone raises an error for every line, which would end the clean-up."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] in (errno.ENOTTY, errno.EBADF):  # a file or a pipe: it is still read
                continue
        os.dup2(nowhere, descriptor)
    os.close(nowhere)
