"""`host = "local"` in cluster.toml: this machine is a node, reached by a subprocess instead of SSH."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import time
from typing import BinaryIO

from homelab.config.cluster import Node
from homelab.errors import UnreachableError
from homelab.remote.session import Completed, Lines, Stream
from homelab.text.hint import homelab


def _bytes(command: str) -> bytes:
    """As it goes over SSH, whatever this locale's letters are."""
    return command.encode("utf-8", "surrogateescape")


class LocalSession:
    """See `homelab.remote.session.Session`."""

    def __init__(self, node: Node) -> None:
        self.node = node.name

    def run(
        self, command: str, *, stdin: bytes | BinaryIO = b"", timeout_s: float, stdout: BinaryIO | None = None, head: bytes = b""
    ) -> Completed:
        """See `Session.run`."""
        body = stdin if isinstance(stdin, bytes) else stdin.read()
        try:
            completed = subprocess.run(
                ["/bin/sh", "-c", _bytes(command)], input=head + body, capture_output=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(
                f"no answer within {timeout_s:.0f} s", where=f"node {self.node} (local)", hint=homelab("preflight")
            ) from error
        if stdout is not None:
            stdout.write(completed.stdout)
        return Completed(completed.returncode, b"" if stdout is not None else completed.stdout, completed.stderr)

    def open(self, command: str, *, stdin: bytes = b"") -> Stream:
        """See `Session.open`."""
        process = subprocess.Popen(
            ["/bin/sh", "-c", _bytes(command)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended without reading its input: who reads finds its end
            process.stdin.write(stdin)
            process.stdin.flush()
        return _ProcessStream(process)

    def close(self) -> None:
        """See `Session.close`."""


class _ProcessStream:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._lines = Lines()

    def readline(self, timeout_s: float) -> bytes:
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            # Read past the file object: two lines that come at once would leave one in its buffer, where no selector sees it.
            while not self._lines.has_line():
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError
                block = os.read(self._process.stdout.fileno(), 1 << 16)
                if not block:
                    break
                self._lines.feed(block)
        return self._lines.take()

    def write(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        self._process.stdout.close()
