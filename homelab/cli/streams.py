"""Standard input, output and error made safe to use: they may be closed, on a full disk, or a terminal with few characters."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO

from homelab.controller.base import secrets


class _Told(io.FileIO):
    """Whatever the system refuses to write is dropped."""

    def write(self, data: Any) -> int:
        size = len(memoryview(data))
        try:
            return super().write(data) or size
        except OSError:
            return size


class _Masked(io.TextIOWrapper):
    """Secrets that are known here do not leave by it."""

    @property
    def buffer(self) -> Any:
        """None: where the encoding is ASCII, click (`_compat.py`, `_force_correct_text_stream`) would write past this stream."""
        raise AttributeError("buffer")

    def write(self, text: str) -> int:
        super().write(secrets.hide(text))
        return len(text)


def prepare() -> None:
    """Once, before anything is said: afterwards all three are open, and nothing that is said on stderr raises anything.

    A descriptor below 3 that is closed would be given to the next file or connection, which then took our words for its own.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = told(2, sys.stderr)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names may hold bytes, and models may say letters, that this terminal's encoding does not know.
        sys.stdout.reconfigure(errors="backslashreplace")
        if secrets.are_known():
            sys.stdout = _masked(sys.stdout)


def _masked(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same stream, by which no secret leaves."""
    encoding, errors, line_buffering, write_through = stream.encoding, stream.errors, stream.line_buffering, stream.write_through
    return _Masked(stream.detach(), encoding=encoding, errors=errors, line_buffering=line_buffering, write_through=write_through)


def told(descriptor: int, before: TextIO | None) -> TextIO:
    """A stream for what is only told, in place of `before`: a full disk or a reader that is gone ends nobody's work."""
    encoding = before.encoding if before is not None else "utf-8"
    raw = _Told(descriptor, "w", closefd=False)
    return _Masked(io.BufferedWriter(raw), encoding=encoding, errors="backslashreplace", line_buffering=True)


def refusal(stream: TextIO, word: str = "") -> OSError | None:
    """Why this stream does not take all that was said and this `word`; None where it does. It is asked nothing more afterwards."""
    try:
        stream.write(word)
        stream.flush()
    except OSError as error:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return error
    return None
