"""The keys of a terminal, one by one, while a picture is on it. Its settings are given back at the end, after an error, and while the program is suspended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import threading
import tty
from collections.abc import Iterator
from types import FrameType
from typing import Any

_NAMES = {
    "[A": "up", "[B": "down", "[C": "right", "[D": "left", "OA": "up", "OB": "down", "OC": "right", "OD": "left",
    "[5~": "page up", "[6~": "page down", "[H": "home", "[F": "end", "OH": "home", "OF": "end", "[1~": "home", "[4~": "end",
    "[7~": "home", "[8~": "end",
}  # fmt: skip
_LONGEST = 16  # characters of a sequence; a longer one is none
SUSPEND, RESUME = "suspend", "resume"
"""Among the keys: Ctrl-Z was pressed (call `stop_here`), or the program goes on after it."""
_SIGNALS = {signal.SIGTSTP: SUSPEND, signal.SIGCONT: RESUME}
_ESCAPE_S = 0.05  # a key's sequence comes within this time; an escape alone is the key


class Keyboard:
    """Keys of the terminal `descriptor`, in cbreak mode: Ctrl-C and Ctrl-Z stay signals, and newlines stay newlines. Made by `opened`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._before: list[Any] = termios.tcgetattr(descriptor)
        self._rest = ""
        self._is_closed = False  # the terminal is gone
        self._wake_lock = threading.RLock()  # its descriptors may belong to something else once they are closed
        self._can_wake = True
        self._signalled: list[str] = []
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        """End a `read` that waits, from another thread or a signal's handler."""
        with self._wake_lock, contextlib.suppress(BlockingIOError):  # full: it wakes anyway
            if self._can_wake:
                os.write(self._wake_write, b".")

    def read(self, timeout_s: float) -> list[str]:
        """The keys that were pressed, at once where there are some, else within `timeout_s`; [] where there are none."""
        listening = [self._wake_read] + ([self._descriptor] if self.is_foreground() and not self._is_closed else [])
        ready = select.select(listening, [], [], _ESCAPE_S if self._rest else max(0.0, timeout_s))[0]
        if self._wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        text = self._pressed() if self._descriptor in ready else ""
        keys, self._rest = decoded_keys(self._rest + text, is_all=not text)
        signalled, self._signalled = self._signalled, []
        return signalled + keys

    def _pressed(self) -> str:
        try:
            pressed = os.read(self._descriptor, 1024)
        except OSError:  # the terminal is gone
            pressed = b""
        self._is_closed = not pressed
        return pressed.decode("utf-8", "replace")

    def cbreak(self) -> None:
        """Have keys come one by one, without an echo. Not from the background: that would stop the program."""
        if self.is_foreground():
            with contextlib.suppress(termios.error):
                tty.setcbreak(self._descriptor, termios.TCSADRAIN)

    def give_back(self) -> None:
        """The terminal's settings as they were."""
        if self.is_foreground():
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._descriptor, termios.TCSADRAIN, self._before)

    def stop_here(self) -> None:
        """Stop the program as Ctrl-Z does without a handler; returns when it goes on. The settings are the caller's (`give_back`, `cbreak`)."""
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)

    def close(self) -> None:
        """Give everything back."""
        self.give_back()
        with self._wake_lock:
            self._can_wake = False
            os.close(self._wake_read)
            os.close(self._wake_write)

    def heard(self, number: int, frame: FrameType | None) -> None:
        """The handler of the two signals: `read` tells them."""
        self._signalled.append(_SIGNALS[signal.Signals(number)])
        self.wake()

    def is_foreground(self) -> bool:
        """Whether the terminal is this program's to read, set and draw on."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:
            return False


def can_open(descriptor: int) -> bool:
    """Whether keys can be read here: a terminal of which this process has the foreground, in the main thread (signals come there)."""
    try:
        return os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp() and threading.current_thread() is threading.main_thread()
    except OSError:
        return False


@contextlib.contextmanager
def opened(descriptor: int) -> Iterator[Keyboard]:
    """The keyboard of a terminal (`can_open`) inside the block."""
    keyboard = Keyboard(descriptor)
    handlers = {number: signal.signal(number, keyboard.heard) for number in _SIGNALS}
    try:
        keyboard.cbreak()
        yield keyboard
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        keyboard.close()


def decoded_keys(text: str, *, is_all: bool = False) -> tuple[list[str], str]:
    """(keys, what is left): a printable character is its own name; "up", "page down", "escape", ... have one. Unknown sequences are left out.

    An escape sequence may come in two parts, over SSH: its beginning is left for the next call, unless `is_all` says that nothing follows.
    """
    keys: list[str] = []
    place = 0
    while place < len(text):
        if text[place] != "\x1b":
            if text[place].isprintable():
                keys.append(text[place])
            place += 1
            continue
        end = _end(text, place)
        if end is None and not is_all:
            return keys, text[place:]
        if end is None or end == place + 1:
            keys.append("escape")
            place += 1
            continue
        name = _NAMES.get(text[place + 1 : end])
        keys += [name] if name else []
        place = end
    return keys, ""


def _end(text: str, start: int) -> int | None:
    """Where the sequence that begins at `start` ends; `start` + 1 for an escape alone; None where more may come."""
    rest = text[start + 1 : start + 1 + _LONGEST]
    if not rest:
        return None
    if rest[0] not in "[O":
        return start + 1
    if rest[0] == "O":
        return start + 3 if len(rest) > 1 else None
    for number, character in enumerate(rest[1:], 1):
        if "@" <= character <= "~":
            return start + 2 + number
    return None if len(rest) < _LONGEST else start + 1 + len(rest)
