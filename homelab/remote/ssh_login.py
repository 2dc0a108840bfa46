"""The way to a node: its address as `ssh HOST` would use it, and the login.

Measured on fabric 3.2: it sets AutoAddPolicy and loads no known_hosts; paramiko ignores `Include`. So OpenSSH itself is asked
(`ssh -G`) and the policy is set by us. fabric opens connections, through jump hosts too, and does no more: its `run` has no time-out for
a silent node and no stream, its `put` and `get` are SFTP, which a small sshd may lack, and `homelab.remote.ssh` sends bytes over a channel.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fabric
import paramiko

from homelab.checks.machine.ssh import GREETING_LIMIT_S
from homelab.config.cluster import Cluster, Node
from homelab.errors import UnreachableError
from homelab.remote import hostkeys, login_errors

# paramiko's threads log a traceback for every connection that fails; the error itself comes to us as an exception.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

CONNECT_TIMEOUT_S = GREETING_LIMIT_S
_UNACKNOWLEDGED_MS = 20_000


@dataclass(frozen=True)
class Address:
    """Where and as whom to log in, after ssh_config had its say."""

    host: str
    port: int
    user: str | None
    identity_files: tuple[str, ...]
    proxy_jump: str | None
    known_as: str


def resolve(node: Node) -> Address:
    """The address of a node as `ssh HOST` would use it; cluster.toml's keys win over ssh_config's."""
    options: dict[str, list[str]] = {}
    if shutil.which("ssh"):
        command = ["ssh", "-G"]
        if node.port != 22:
            command += ["-p", str(node.port)]
        if node.user:
            command += ["-l", node.user]
        # As bytes, there and back: a name may hold letters that this locale has not (LC_ALL=C).
        words = [word.encode("utf-8", "surrogateescape") for word in (*command, "--", node.host)]
        answer = subprocess.run(
            words, capture_output=True, encoding="utf-8", errors="surrogateescape", timeout=10, stdin=subprocess.DEVNULL
        )
        for line in answer.stdout.splitlines():
            key, _, value = line.partition(" ")
            options.setdefault(key.lower(), []).append(value.strip())
    host = options.get("hostname", [node.host])[0]
    port = node.port if node.port != 22 else int(options.get("port", ["22"])[0])
    identities = (node.identity_file,) if node.identity_file else tuple(options.get("identityfile", ()))
    jump = options.get("proxyjump", ["none"])[0]
    user, known_as = node.user or options.get("user", [None])[0], options.get("hostkeyalias", [host])[0] or host
    files = tuple(str(Path(name).expanduser()) for name in identities)
    return Address(host, port, user, files, None if jump in ("none", "") else jump, known_as)


def login(cluster: Cluster, node: Node, address: Address, where: str) -> tuple[fabric.Connection, float]:
    """An open connection to a node, its host key verified, and the seconds until its server greeted (0 through a jump host).

    Raises UnreachableError with the cause in words and what fixes it; SilentError where nothing came back at all.
    """
    gateway, greeting_s = None, 0.0
    if address.proxy_jump:
        gateway = _gateway(cluster, address.proxy_jump, where)
    config = fabric.Config(overrides={"load_ssh_configs": False, "timeouts": {"connect": CONNECT_TIMEOUT_S}})
    keys = existing_keys(address)
    if node.identity_file and not keys:
        raise UnreachableError(
            f"the identity file {node.identity_file} is not there",
            where=f"{where}, key identity_file",
            hint=f"edit cluster.toml, node {node.name}: identity_file = ...; or make a key: ssh-keygen -t ed25519 -f {shlex.quote(node.identity_file)}",
        )
    arguments: dict[str, Any] = {"banner_timeout": CONNECT_TIMEOUT_S, "auth_timeout": CONNECT_TIMEOUT_S}
    if keys:
        arguments["key_filename"] = list(keys)
    if node.identity_file:
        # The named key and no other: a full agent runs into the server's limit of tries.
        arguments |= {"allow_agent": False, "look_for_keys": False}
    connection = fabric.Connection(
        address.host, user=address.user, port=address.port, config=config, gateway=gateway, connect_kwargs=arguments,
        connect_timeout=int(CONNECT_TIMEOUT_S), inline_ssh_env=True,
    )  # fmt: skip
    hostkeys.load(connection.client, cluster)
    try:
        if gateway is None:
            wire = socket.create_connection((address.host, address.port), timeout=login_errors.TCP_TIMEOUT_S)
            connection.connect_kwargs["sock"] = wire
            greeting_s = _greeting_s(wire)
        connection.open()
    except login_errors.EXPLAINED as error:
        raise login_errors.explain(_login(cluster, node, address, where), error) from error
    if connection.transport is not None:
        connection.transport.set_keepalive(5)
        with contextlib.suppress(AttributeError, OSError):  # Linux alone; through a jump host there is no socket of ours
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


def _gateway(cluster: Cluster, jump: str, where: str) -> fabric.Connection:
    """The first hop of a ProxyJump chain, itself resolved and verified like any node."""
    first = jump.split(",")[-1].removeprefix("ssh://")
    user, _, rest = first.rpartition("@")
    host, _, port = rest.partition(":")
    node = Node(name="jump", host=host, user=user or None, port=int(port or 22))
    return login(cluster, node, resolve(node), f"{where}, by way of {host}")[0]


def _login(cluster: Cluster, node: Node, address: Address, where: str) -> login_errors.Login:
    return login_errors.Login(cluster, node, address.host, address.port, address.user, existing_keys(address), where)


def existing_keys(address: Address) -> tuple[str, ...]:
    """The identity files that are there."""
    return tuple(name for name in address.identity_files if Path(name).exists())


@dataclass(frozen=True)
class HostKey:
    """The key that the SSH server at an address shows. `is_known`: it was accepted before."""

    host: str
    port: int
    key: paramiko.PKey
    is_known: bool


def offered_key(cluster: Cluster, node: Node) -> HostKey:
    """The host key that a node shows. No login is tried.

    Raises UnreachableError when nothing answers, and when the key differs from the known one.
    """
    address = resolve(node)
    where = f"node {node.name} ({address.host}:{address.port})"
    recorded = hostkeys.known(cluster).lookup(hostkeys.name_in_file(address.host, address.port))
    try:
        with socket.create_connection((address.host, address.port), timeout=CONNECT_TIMEOUT_S) as connection:
            transport = paramiko.Transport(connection)
            options = transport.get_security_options()
            # Servers have several keys: asked for the kind that is known already, an honest one shows that.
            kinds = list(options.key_types)
            options.key_types = sorted(kinds, key=lambda kind: kind not in _key_types(recorded))
            try:
                transport.start_client(timeout=CONNECT_TIMEOUT_S)
                key = transport.get_remote_server_key()
            finally:
                transport.close()
    except (OSError, EOFError, paramiko.SSHException) as error:
        why = login_errors.reason(error) if isinstance(error, OSError | EOFError) else str(error)
        raise UnreachableError(f"no SSH server answers: {why}", where=where, hint=login_errors.by_hand(node)) from error
    if recorded is None or recorded.get(key.get_name()) == key:
        return HostKey(address.host, address.port, key, is_known=recorded is not None)
    raise login_errors.changed_key(_login(cluster, node, address, where), key, recorded.get(key.get_name()))


def _key_types(recorded: Mapping[str, paramiko.PKey] | None) -> set[str]:
    """The names under which a server may offer the recorded keys: an RSA key has three (RFC 8332)."""
    kinds = set(recorded or ())
    return kinds | {"rsa-sha2-512", "rsa-sha2-256"} if "ssh-rsa" in kinds else kinds
