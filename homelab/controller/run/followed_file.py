"""A file of lines that grows: each read gives the lines that came since the one before, and costs no more than these."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

MOST_LINE_BYTES = 1 << 20
"""A longer line is none of ours, and is passed over."""
_CHUNK_BYTES = 1 << 20
_KNOWN_BYTES = 4096  # at the beginning and in front of what is new: the file is known by them


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
        self._known = (b"", b"")
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
                state, descriptor = os.fstat(stream.fileno()), stream.fileno()
                identity = (state.st_dev, state.st_ino)
                if identity != self._identity or state.st_size < self._end or self._ends(descriptor) != self._known:
                    had_one = self._identity is not None
                    self.forget()
                    self._identity = identity
                    if had_one:
                        begin_anew()
                if state.st_size > self._end:
                    stream.seek(self._end)
                    yield from self._lines(stream.read, state.st_size)
                    self._known = self._ends(descriptor)
        except OSError:
            return

    def _ends(self, descriptor: int) -> tuple[bytes, bytes]:
        """The first bytes of what was given, and the last."""
        count = min(_KNOWN_BYTES, self._end)
        self.bytes_read += 2 * count
        return os.pread(descriptor, count, 0), os.pread(descriptor, count, self._end - count)

    def _lines(self, read: Callable[[int], bytes], size: int) -> Iterator[bytes]:
        """Up to `size`, the file's own at the beginning of this read."""
        rest, left = b"", size - self._end
        while left > 0 and (chunk := read(min(_CHUNK_BYTES, left))):
            left -= len(chunk)
            self.bytes_read += len(chunk)
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                if len(line) <= MOST_LINE_BYTES and not self._is_passing:
                    yield line
                self._is_passing = False
                self._end += len(line) + 1
            if len(rest) > MOST_LINE_BYTES or self._is_passing:
                self._end += len(rest)
                self._is_passing, rest = True, b""
