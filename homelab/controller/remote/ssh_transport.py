"""Which program carries a connection: paramiko, which is quick, or OpenSSH itself, which can do all that `ssh HOST` can.

OpenSSH has the last word: a login that paramiko is refused for its keys, its algorithms or its reading of known_hosts is tried once more.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Protocol

import fabric
import paramiko

from homelab.controller.base.errors import UnreachableError
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.remote import login_errors, openssh_login, ssh_login
from homelab.controller.remote.ssh_address import Address


class Transport(Protocol):
    """A connection to one node. `open_session` gives a paramiko.Channel, or what has its methods."""

    def open_session(self, timeout: float) -> Any:
        """A channel for one command. Raises OSError, EOFError, SSHException."""
        ...

    def is_active(self) -> bool:
        """Whether the connection stands."""
        ...

    def round_trip_s(self, limit_s: float) -> float:
        """Seconds of one question and answer, without a shell. Raises OSError, EOFError, SSHException; may close the connection then."""
        ...

    def close(self) -> None:
        """Close it. Idempotent."""
        ...


class ParamikoTransport:
    """A connection that fabric has opened."""

    def __init__(self, connection: fabric.Connection) -> None:
        self._connection = connection

    def open_session(self, timeout: float) -> paramiko.Channel:
        """See `Transport.open_session`."""
        return self._open().open_session(timeout=timeout)

    def is_active(self) -> bool:
        """See `Transport.is_active`."""
        return self.transport is not None and self.transport.is_active()

    def round_trip_s(self, limit_s: float) -> float:
        """A global request that the server declines. See `Transport.round_trip_s`."""
        transport = self._open()
        started = time.perf_counter()
        with login_errors.within(limit_s, transport.close):  # global_request waits for ever
            transport.global_request("keepalive@openssh.com", wait=True)
        if not transport.is_active():  # or ends without a word
            raise EOFError("it stopped answering")
        return time.perf_counter() - started

    def close(self) -> None:
        """See `Transport.close`."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._connection.close()

    @property
    def transport(self) -> paramiko.Transport | None:
        """Paramiko's own; None after the end."""
        transport: paramiko.Transport | None = self._connection.transport
        return transport

    def _open(self) -> paramiko.Transport:
        if self.transport is None:
            raise EOFError("it was closed")
        return self.transport


_BY_OPENSSH: set[tuple[str, int, str | None]] = set()
"""The nodes, as cluster.toml names them, that paramiko was refused by and OpenSSH was not: not tried twice."""


def connect(cluster: Cluster, node: Node, address: Address, where: str) -> tuple[Transport, float]:
    """An open connection whose host key is verified, and the seconds until the server greeted (0 where OpenSSH connects).

    Raises UnreachableError with the cause in words and what fixes it; SilentError where nothing came back at all.
    """
    place = (node.host, node.port, node.user)
    if address.beyond_paramiko or place in _BY_OPENSSH:
        return openssh_login.connect(cluster, node, address, where), 0.0
    try:
        connection, greeting_s = ssh_login.login(cluster, node, address, where)
        return ParamikoTransport(connection), greeting_s
    except UnreachableError as error:
        if not address.settings or not _is_of_the_login(error.__cause__):
            raise
        try:
            transport = openssh_login.connect(cluster, node, address, where)
        except UnreachableError:
            raise error from error.__cause__
        _BY_OPENSSH.add(place)
        return transport, 0.0


def _is_of_the_login(cause: BaseException | None) -> bool:
    """Whether a server answered and paramiko did not come to terms with it: OpenSSH may."""
    greeted = not any(words in str(cause) for words in login_errors.NO_GREETING)
    return isinstance(cause, paramiko.SSHException | ValueError) and greeted
