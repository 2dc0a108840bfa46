"""Ctrl-C, `kill` and a closed terminal end a command in one way; during work that must be done whole they wait until it is over.

`kill` and the end of a terminal have a limit (`limit_end`): who sends them sends SIGKILL next, and a node that never comes to an end must not
keep this process alive.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from homelab.shared.protocol.errors import EXIT_INTERRUPTED

# Ctrl-C, kill, and the end of the terminal or of the SSH session.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HURRY_S, _END_S = 3.0, 4.5
_AGAIN_S = 0.01
_is_limited = False
_at_limit: list[Callable[[], object]] = []


def count_alike() -> None:
    """From now on all of `SIGNALS` raise KeyboardInterrupt: what was begun is undone or told, whichever of them comes.

    A signal that is ignored stays ignored: the program that started us wants that (nohup). One that comes while native code or a finaliser calls Python
    is not lost: what is raised there goes nowhere, so it is raised once more.
    """
    sys.unraisablehook = _raise_again
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _interrupt)


def limit_end() -> None:
    """From now on this process is gone `_END_S` after a SIGTERM or SIGHUP, whatever it waits for: a node, a parser, a thread. For a whole program."""
    global _is_limited
    _is_limited = True


@contextmanager
def hurried(work: Callable[[], object]) -> Iterator[None]:
    """When the limit comes inside the block, `work` is begun before the process is gone: what must be asked of the nodes then."""
    _at_limit.append(work)
    try:
        yield
    finally:
        _at_limit.remove(work)


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
        _count_down(number)
        if number == signal.SIGHUP:
            _leave_terminal()
        if not came and sys.stderr.isatty():
            sys.stderr.write("\ninterrupted: homelab finishes the current step and ends\n")
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


def _raise_again(ignored: sys.UnraisableHookArgs) -> None:
    """Of a KeyboardInterrupt that nobody can catch. By a thread, because here it would be lost, too."""
    if not issubclass(ignored.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(ignored)
        return
    # Of those that count: SIGINT may be ignored where SIGTERM is not.
    number = next((number for number in SIGNALS if callable(signal.getsignal(number))), signal.SIGINT)
    threading.Timer(_AGAIN_S, os.kill, [os.getpid(), number]).start()


def _interrupt(number: int, frame: FrameType | None) -> None:
    _count_down(number)
    if number == signal.SIGHUP:
        _leave_terminal()
    raise KeyboardInterrupt


def _count_down(number: int) -> None:
    """Once: the first signal counts."""
    global _is_limited
    if _is_limited and number != signal.SIGINT:
        _is_limited = False
        threading.Thread(target=_end, name="end", daemon=True).start()


def _end() -> None:
    time.sleep(_HURRY_S)
    for work in [*_at_limit]:
        threading.Thread(target=work, daemon=True).start()
    time.sleep(_END_S - _HURRY_S)
    own_programs = sys.modules.get("homelab.controller.remote.own_programs")  # not imported, nothing started
    if own_programs is not None:
        own_programs.kill_all()
    with contextlib.suppress(OSError, ValueError):
        if _at_limit:
            os.write(
                2, b"it took too long to be undone, and the nodes were asked to end it: homelab status and homelab stop show what runs\n"
            )
        os.write(2, b"interrupted\n")
    os._exit(EXIT_INTERRUPTED)


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
