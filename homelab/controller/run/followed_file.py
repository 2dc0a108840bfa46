"""A file of lines that grows: each read gives the lines that came since the one before, and costs no more than these."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

MOST_LINE_BYTES = 1 << 20
"""A longer line is none of ours, and is passed over."""
_CHUNK_BYTES = 1 << 20
_KNOWN_BYTES = 64  # in front of the new ones, by which the file is known again


class FollowedFile:
    """Of one reader. Another process may append to the file, cut it, or put another one in its place."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.bytes_read = 0
        """By all reads together."""
        self.forget()

    def forget(self) -> None:
        """The next read begins at the beginning."""
        self._identity: tuple[int, int] | None = None  # device, inode
        self._end = 0  # of the lines that were given
        self._known = b""  # the last bytes before it
        self._is_passing = False  # in a line that is too long

    def new_lines(self, begin_anew: Callable[[], None]) -> Iterator[bytes]:
        """Every whole line once. One that is still being written is left for the next read.

        `begin_anew` is called first where what was given before is no longer what the file begins with.
        """
        if not os.path.isfile(self._path):  # a pipe would be waited for
            if self._identity is not None:
                self.forget()
                begin_anew()
            return
        try:
            with open(self._path, "rb") as stream:
                state = os.fstat(stream.fileno())
                identity = (state.st_dev, state.st_ino)
                if identity != self._identity or state.st_size < self._end or not self._is_known(stream.fileno()):
                    had_one = self._identity is not None
                    self.forget()
                    self._identity = identity
                    if had_one:
                        begin_anew()
                stream.seek(self._end)
                yield from self._lines(stream.read, state.st_size)
        except OSError:
            return

    def _is_known(self, descriptor: int) -> bool:
        self.bytes_read += len(self._known)
        return os.pread(descriptor, len(self._known), self._end - len(self._known)) == self._known

    def _lines(self, read: Callable[[int], bytes], size: int) -> Iterator[bytes]:
        """Up to `size`, the file's own at the beginning of this read."""
        rest, left = b"", size - self._end
        while left > 0 and (chunk := read(min(_CHUNK_BYTES, left))):
            left -= len(chunk)
            self.bytes_read += len(chunk)
            *whole, rest = (rest + chunk).split(b"\n")
            if whole and self._is_passing:
                self._pass(len(whole.pop(0)) + 1, b"\n")
                self._is_passing = False
            for line in whole:
                if len(line) <= MOST_LINE_BYTES:
                    yield line
                self._pass(len(line) + 1, line + b"\n")
            if len(rest) > MOST_LINE_BYTES or (rest and self._is_passing):
                self._pass(len(rest), rest)
                self._is_passing, rest = True, b""

    def _pass(self, count: int, last: bytes) -> None:
        self._end += count
        self._known = (self._known + last)[-_KNOWN_BYTES:]
