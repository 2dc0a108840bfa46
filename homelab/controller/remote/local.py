"""`host = "local"` in cluster.toml: this machine is a node, reached by a subprocess instead of SSH."""

from __future__ import annotations

import contextlib
import io
import os
import selectors
import signal
import subprocess
import threading
import time
from typing import IO, BinaryIO

from homelab.controller.base import own_machine
from homelab.controller.base.errors import UnreachableError
from homelab.controller.base.hint import homelab
from homelab.controller.config.cluster import Node
from homelab.controller.remote import own_programs
from homelab.controller.remote.session import Completed, Lines, Stream

_BLOCK = 1 << 16
_ERRORS_KEPT_BYTES = 1 << 20  # the end of stderr: the last lines of a command say why it ended


def _begun(command: str, stderr: int) -> subprocess.Popen[bytes]:
    """In a session of its own: Ctrl-C and the end of the terminal are ours, and may have to wait (`homelab.controller.run.signals`)."""
    as_over_ssh = command.encode("utf-8", "surrogateescape")  # whatever this locale's letters are
    return own_programs.start(
        ["/bin/sh", "-c", as_over_ssh], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True
    )


def refuse_as_node(where: str, asked_by: str) -> None:
    """Raises UnreachableError on a machine that can be the controller only: what homelab runs on a node (torchrun, its agent) needs Linux."""
    if not own_machine.is_linux():
        raise UnreachableError(
            f"this machine runs {own_machine.system()}, and a node needs Linux: this machine can start and watch trainings, but cannot be a node",
            where=f"{where}, {asked_by}",
            hint='take this node out of cluster.toml, or give it the address of a Linux machine: host = "192.168.1.100" (on Windows: run homelab in WSL2)',
        )


class LocalSession:
    """See `homelab.controller.remote.session.Session`."""

    def __init__(self, node: Node) -> None:
        """Raises UnreachableError on a machine that cannot be a node."""
        refuse_as_node(f"node {node.name}", 'host = "local" in cluster.toml')
        self.node = node.name

    def run(
        self, command: str, *, stdin: bytes | BinaryIO = b"", timeout_s: float, stdout: BinaryIO | None = None, head: bytes = b""
    ) -> Completed:
        """See `Session.run`."""
        kept, errors = io.BytesIO(), bytearray()
        process = _begun(command, subprocess.PIPE)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        beside = [
            threading.Thread(target=_feed, args=(process.stdin, head, stdin), daemon=True), threading.Thread(target=_drain, args=(process.stderr, errors), daemon=True),
        ]  # fmt: skip
        timer = threading.Timer(timeout_s, process.kill)
        timer.daemon = True
        began_s = time.monotonic()
        try:
            for thread in (*beside, timer):
                thread.start()
            _pass_on(process.stdout, stdout if stdout is not None else kept, began_s + timeout_s)
            returncode = process.wait(max(0.1, began_s + timeout_s - time.monotonic()))
            if time.monotonic() - began_s >= timeout_s:
                raise TimeoutError
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            raise UnreachableError(
                f"no answer within {timeout_s:.0f} s", where=f"node {self.node} (local)", hint=homelab("preflight")
            ) from error
        finally:
            timer.cancel()
            if process.poll() is None:
                own_programs.end_group(process, signal.SIGINT)
            beside[1].join(1.0)
            beside[0].join(1.0)
            process.stdout.close()
        return Completed(returncode, kept.getvalue(), bytes(errors))

    def open(self, command: str, *, stdin: bytes = b"") -> Stream:
        """See `Session.open`."""
        process = _begun(command, subprocess.DEVNULL)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it ended without reading its input: who reads finds its end
            process.stdin.write(stdin)
            process.stdin.flush()
        return _ProcessStream(process)

    def close(self) -> None:
        """See `Session.close`."""


def _pass_on(source: IO[bytes], into: BinaryIO, ends_s: float) -> None:
    """All that comes, block by block: who keeps it says how much that may be. Raises TimeoutError; a program left behind may hold the pipe open."""
    with selectors.DefaultSelector() as selector:
        selector.register(source, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, ends_s - time.monotonic())):
                raise TimeoutError
            block = os.read(source.fileno(), _BLOCK)
            if not block:
                return
            into.write(block)


def _feed(target: IO[bytes], head: bytes, stdin: bytes | BinaryIO) -> None:
    # A command may end without reading its input.
    with contextlib.suppress(OSError, ValueError):
        target.write(head)
        body = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
        while block := body.read(_BLOCK):
            target.write(block)
    with contextlib.suppress(OSError, ValueError):
        target.close()


def _drain(source: IO[bytes], into: bytearray) -> None:
    with contextlib.suppress(OSError, ValueError):
        while block := os.read(source.fileno(), _BLOCK):
            into += block
            if len(into) > 2 * _ERRORS_KEPT_BYTES:
                del into[:-_ERRORS_KEPT_BYTES]


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
