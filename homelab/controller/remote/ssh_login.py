"""The login to a node with paramiko, and the host key that a node shows.

Measured on fabric 3.2: it sets AutoAddPolicy and loads no known_hosts; paramiko ignores `Include`. So OpenSSH itself is asked
(`homelab.controller.remote.ssh_settings`) and the policy is set by us. fabric opens direct connections and does no more: its `run` has no time-out for
a silent node and no stream, its `put` and `get` are SFTP, which a small sshd may lack, and `homelab.controller.remote.ssh` sends bytes over a channel.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fabric
import paramiko

from homelab.controller.base.errors import GREETING_LIMIT_S, UnreachableError
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.remote import hostkeys, login_errors, openssh_login
from homelab.controller.remote.ssh_address import Address, as_login, existing_keys, refuse_missing_key, resolve

__all__ = ("CONNECT_TIMEOUT_S", "Address", "HostKey", "login", "offered_key", "resolve")

# paramiko's threads log a traceback for every connection that fails; the error itself comes to us as an exception.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

CONNECT_TIMEOUT_S = GREETING_LIMIT_S
_UNACKNOWLEDGED_MS = 20_000


def login(cluster: Cluster, node: Node, address: Address, where: str) -> tuple[fabric.Connection, float]:
    """An open connection of paramiko to a node, its host key verified, and the seconds until its server greeted.

    Raises UnreachableError with the cause in words and what fixes it; SilentError where nothing came back at all.
    """
    config = fabric.Config(overrides={"load_ssh_configs": False, "timeouts": {"connect": CONNECT_TIMEOUT_S}})
    refuse_missing_key(node, where)
    keys = existing_keys(address)
    arguments: dict[str, Any] = {"banner_timeout": CONNECT_TIMEOUT_S, "auth_timeout": CONNECT_TIMEOUT_S}
    if keys:
        arguments["key_filename"] = list(keys)
    if address.settings:
        arguments["look_for_keys"] = False  # `ssh -G` has named all of them
    if node.identity_file or address.settings.get("identitiesonly") == ["yes"]:
        # The named keys and no other: a full agent runs into the server's limit of tries.
        arguments |= {"allow_agent": False, "look_for_keys": False}
    connection = fabric.Connection(
        address.host, user=address.user, port=address.port, config=config, connect_kwargs=arguments,
        connect_timeout=int(CONNECT_TIMEOUT_S), inline_ssh_env=True,
    )  # fmt: skip
    hostkeys.load(connection.client, cluster)
    try:
        wire = socket.create_connection((address.host, address.port), timeout=login_errors.TCP_TIMEOUT_S)
        connection.connect_kwargs["sock"] = wire
        greeting_s = _greeting_s(wire)
        connection.open()
    except login_errors.EXPLAINED as error:
        raise login_errors.explain(as_login(cluster, node, address, where), error) from error
    if connection.transport is not None:
        connection.transport.set_keepalive(5)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux alone
            with contextlib.suppress(AttributeError, OSError):
                # A node that lost its power acknowledges nothing: the kernel would try for a quarter of an hour.
                connection.transport.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MS)
    return connection, greeting_s


def _greeting_s(wire: socket.socket) -> float:
    """Seconds until the server's first byte. Raises SSHException, as paramiko would, where it says nothing for too long."""
    started = time.monotonic()
    wire.settimeout(GREETING_LIMIT_S)
    try:
        wire.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        wire.close()
        raise paramiko.SSHException(login_errors.NO_GREETING[0]) from None
    except OSError:
        pass  # paramiko meets it again, and has words for it
    wire.settimeout(login_errors.TCP_TIMEOUT_S)
    return time.monotonic() - started


@dataclass(frozen=True)
class HostKey:
    """The key that the SSH server at an address shows. `is_known`: it was accepted before; `address`: as ssh_config has it."""

    host: str
    port: int
    key: paramiko.PKey
    is_known: bool
    address: Address

    def remember(self, cluster: Cluster) -> Path:
        """Accept it: the file that now holds it."""
        return hostkeys.remember(
            cluster, self.host, self.port, self.key, name=self.address.name_in_known_hosts, own=self.address.known_hosts
        )


def offered_key(cluster: Cluster, node: Node) -> HostKey:
    """The host key that a node shows. No login is tried.

    Raises UnreachableError when nothing answers, and when the key differs from the known one.
    """
    address = resolve(node)
    where = f"node {node.name} ({address.host}:{address.port})"
    recorded = address.recorded(cluster)
    # Servers have several keys: asked for the kind that is known already, an honest one shows that.
    kinds = _key_types(recorded)
    key = openssh_login.offered_key(cluster, node, address, kinds) if address.beyond_paramiko else _offered(node, address, where, kinds)
    if not recorded or recorded.get(key.get_name()) == key:
        return HostKey(address.host, address.port, key, bool(recorded), address)
    raise login_errors.changed_key(as_login(cluster, node, address, where), key, recorded.get(key.get_name()))


def _offered(node: Node, address: Address, where: str, known_kinds: set[str]) -> paramiko.PKey:
    try:
        with socket.create_connection((address.host, address.port), timeout=CONNECT_TIMEOUT_S) as connection:
            transport = paramiko.Transport(connection)
            options = transport.get_security_options()
            options.key_types = sorted(options.key_types, key=lambda kind: kind not in known_kinds)
            try:
                transport.start_client(timeout=CONNECT_TIMEOUT_S)
                return transport.get_remote_server_key()
            finally:
                transport.close()
    except (OSError, EOFError, UnicodeError, paramiko.SSHException) as error:
        why = str(error) if isinstance(error, paramiko.SSHException) else login_errors.reason(error)
        raise UnreachableError(f"no SSH server answers: {why}", where=where, hint=login_errors.by_hand(node)) from error


def _key_types(recorded: Mapping[str, paramiko.PKey]) -> set[str]:
    """The names under which a server may offer the recorded keys: an RSA key has three (RFC 8332)."""
    kinds = set(recorded)
    return kinds | {"rsa-sha2-512", "rsa-sha2-256"} if "ssh-rsa" in kinds else kinds
