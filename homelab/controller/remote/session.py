"""What a way to a node must be able to do: run a command with bytes in and out, or keep one open and read its lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import BinaryIO, Protocol

from homelab.controller.base.errors import UnreachableError


@dataclass(frozen=True)
class Completed:
    """How a command ended; a negative `returncode`: by a signal. `stdout` is empty when it went to a file instead."""

    returncode: int
    stdout: bytes
    stderr: bytes


class CrowdedError(UnreachableError):
    """The node takes no further command beside those that run over this connection (MaxSessions of sshd_config(5))."""


MOST_LINE_BYTES = 4 << 20  # the longest line of a stream, a look at the collective test, has some ten kilobytes


class Lines:
    """Bytes as they come, lines as they are asked for."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, block: bytes) -> None:
        """Add what came. Raises OSError where no line ends."""
        self._bytes += block
        if b"\n" not in self._bytes and len(self._bytes) > MOST_LINE_BYTES:
            raise OSError(f"it sends more than {MOST_LINE_BYTES >> 20} MiB instead of a line")

    def has_line(self) -> bool:
        """Whether a whole line is there."""
        return b"\n" in self._bytes

    def take(self) -> bytes:
        """The next line without its end; all that is left where there is none."""
        line, _, rest = bytes(self._bytes).partition(b"\n")
        self._bytes = bytearray(rest)
        return line


class Stream(Protocol):
    """A command that is still running; closing it closes its stdin, which our verbs take as the end."""

    def readline(self, timeout_s: float) -> bytes:
        """Its next line of stdout; b"" at the end. Raises TimeoutError, and OSError where no line ends, or the connection does."""
        ...

    def write(self, line: bytes) -> None:
        """Bytes for its stdin. Raises OSError when it has ended."""
        ...

    def close(self) -> None:
        """End it. Idempotent."""
        ...


class Session(Protocol):
    """One node's connection. Raises UnreachableError when the node does not answer or stops answering."""

    node: str

    def run(
        self, command: str, *, stdin: bytes | BinaryIO = b"", timeout_s: float, stdout: BinaryIO | None = None, head: bytes = b""
    ) -> Completed:
        """Run shell text to its end. `head` is sent before `stdin`; `stdout` receives the output instead of memory."""
        ...

    def open(self, command: str, *, stdin: bytes = b"") -> Stream:
        """Start shell text and leave its stdin open after the given bytes."""
        ...

    def close(self) -> None:
        """Close the connection. Idempotent."""
        ...
