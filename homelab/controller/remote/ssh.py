"""SSH sessions: commands with bytes in and out over one connection (how it comes about: `homelab.controller.remote.ssh_login`)."""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import paramiko

from homelab.controller.base.errors import UnreachableError
from homelab.controller.base.hint import homelab
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.remote import login_errors, ssh_login, ssh_transport
from homelab.controller.remote.session import Completed, CrowdedError, Lines, Stream

_BLOCK = 1 << 16
# A node that says nothing for so long is asked for a sign of life, which it may give late: a slow wire may be full of what is sent.
_SILENT_S = 10.0
_SIGN_OF_LIFE_S = 30.0
_ERRORS_KEPT_BYTES = 1 << 20  # the end of stderr: the last lines of a command say why it ended


class SshSession:
    """One node over one SSH connection. See `homelab.controller.remote.session.Session`."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        """Connect. Raises UnreachableError with the cause in words and the command that fixes it."""
        self.node = node.name
        self._address = ssh_login.resolve(node)
        self.without_effect = self._address.without_effect
        self._where = self._address.where(node)
        self._connection, self.greeting_s = ssh_transport.connect(cluster, node, self._address, self._where)
        self._asking = threading.Lock()  # paramiko waits for one answer at a time

    def run(
        self, command: str, *, stdin: bytes | BinaryIO = b"", timeout_s: float, stdout: BinaryIO | None = None, head: bytes = b""
    ) -> Completed:
        """See `Session.run`. The remote command is told its own limit by the caller: closing a channel does not end it."""
        deadline = time.monotonic() + timeout_s
        channel = self._channel(timeout_s)
        out, err = bytearray(), bytearray()
        errors = threading.Thread(target=_drain, args=(channel.recv_stderr, err), daemon=True)
        sender = threading.Thread(target=_feed, args=(channel, head, stdin), daemon=True)
        try:
            with login_errors.within(timeout_s, channel.close):
                channel.exec_command(command)
            errors.start()
            sender.start()
            while block := self._receive(channel, deadline):
                if stdout is None:
                    out += block
                else:
                    stdout.write(block)
            errors.join(max(0.1, deadline - time.monotonic()))
            if not channel.status_event.wait(max(0.1, deadline - time.monotonic())):
                raise TimeoutError
            returncode = channel.recv_exit_status()
        except TimeoutError as error:
            raise self._lost(f"no answer within {timeout_s:.0f} s") from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise self._lost(str(error) or type(error).__name__) from error
        finally:
            channel.close()
            if sender.ident is not None:
                sender.join(5.0)  # it must not go on reading a body that the caller closes now, or sends again
        if returncode == -1 and not self._connection.is_active():
            raise self._lost("the connection broke while a command ran")
        # -1 over a connection that is well: a signal ended the command (RFC 4254, exit-signal).
        return Completed(returncode, bytes(out), bytes(err))

    def open(self, command: str, *, stdin: bytes = b"") -> Stream:
        """See `Session.open`."""
        channel = self._channel(ssh_login.CONNECT_TIMEOUT_S)
        has_begun = False
        try:
            with login_errors.within(ssh_login.CONNECT_TIMEOUT_S, channel.close):
                channel.exec_command(command)
                has_begun = True
                channel.sendall(stdin)
        except TimeoutError as error:
            raise self._lost(f"no answer within {ssh_login.CONNECT_TIMEOUT_S:.0f} s") from error
        except (OSError, EOFError, paramiko.SSHException) as error:
            # A command that ends without reading its input is none the less a good connection; who reads finds its end.
            if not has_begun or not self._connection.is_active():
                raise self._lost(str(error)) from error
        return _ChannelStream(channel)

    def round_trip_ms(self) -> float:
        """One question and answer of the SSH protocol itself: no shell in it.

        Raises UnreachableError, and gives the connection up, when no answer comes.
        """
        with self._asking:
            try:
                return self._connection.round_trip_s(_SIGN_OF_LIFE_S) * 1000
            except (OSError, EOFError, paramiko.SSHException) as error:
                raise self._lost("it stopped answering") from error

    def _receive(self, channel: Any, deadline: float) -> bytes:
        """The next bytes; of a node that is silent for long, a sign of life is asked. Raises TimeoutError, UnreachableError."""
        while True:
            left_s = deadline - time.monotonic()
            channel.settimeout(max(0.1, min(_SILENT_S, left_s)))
            try:
                block: bytes = channel.recv(_BLOCK)
                return block
            except TimeoutError:
                if left_s <= _SILENT_S:
                    raise
            self.round_trip_ms()

    def close(self) -> None:
        """See `Session.close`."""
        self._connection.close()

    def _channel(self, timeout_s: float) -> Any:
        """A paramiko.Channel, or what has its methods."""
        try:
            return self._connection.open_session(timeout_s)
        except paramiko.ChannelException as error:
            raise CrowdedError(str(error), where=self._where, hint=homelab("preflight --only ssh")) from error
        except (OSError, EOFError, paramiko.SSHException, AttributeError) as error:
            raise self._lost(str(error) or type(error).__name__) from error

    def _lost(self, reason: str) -> UnreachableError:
        return UnreachableError(f"the connection to this node was lost: {reason}", where=self._where, hint=homelab("preflight --only ssh"))


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """paramiko raises these, too, where a connection ends (paramiko/packet.py, transport.py)."""
    try:
        yield
    except (EOFError, paramiko.SSHException) as error:
        raise ConnectionError(str(error) or type(error).__name__) from error


class _ChannelStream:
    def __init__(self, channel: Any) -> None:
        self._channel = channel
        self._lines = Lines()

    def readline(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while not self._lines.has_line():
            left_s = deadline - time.monotonic()
            if left_s <= 0:  # bytes that trickle in must not put off the end for ever
                raise TimeoutError
            self._channel.settimeout(left_s)
            with _as_os_error():
                block: bytes = self._channel.recv(_BLOCK)
            if not block:
                break
            self._lines.feed(block)
        return self._lines.take()

    def write(self, line: bytes) -> None:
        with _as_os_error():
            self._channel.sendall(line)

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.shutdown_write()
            self._channel.close()


def _feed(channel: Any, head: bytes, stdin: bytes | BinaryIO) -> None:
    # A command may end without reading its input; that is its right, and its exit code tells.
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        if head:
            channel.sendall(head)
        body = io.BytesIO(stdin) if isinstance(stdin, bytes) else stdin
        # In blocks: sendall copies all that is left after every packet (paramiko/channel.py), which is quadratic in the length.
        while block := body.read(_BLOCK):
            channel.sendall(block)
        channel.shutdown_write()


def _drain(receive: Any, into: bytearray) -> None:
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        while block := receive(_BLOCK):
            into += block
            if len(into) > 2 * _ERRORS_KEPT_BYTES:
                del into[:-_ERRORS_KEPT_BYTES]
