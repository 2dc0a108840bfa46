"""The way to a node: its address as `ssh HOST` would use it, the login, and in words what stands in the way.

Measured on fabric 3.2: it sets AutoAddPolicy and loads no known_hosts; paramiko ignores `Include`. So OpenSSH itself is asked
(`ssh -G`) and the policy is set by us.
"""

from __future__ import annotations

import contextlib
import errno
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
from paramiko.ssh_exception import NoValidConnectionsError

from homelab.checks.commands import known_hosts_option, on_node
from homelab.checks.ssh import GREETING_LIMIT_S
from homelab.config.cluster import Cluster, Node
from homelab.errors import SilentError, UnreachableError
from homelab.planning.command import quote_words
from homelab.remote import hostkeys

# paramiko's threads log a traceback for every connection that fails; the error itself comes to us as an exception.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

CONNECT_TIMEOUT_S = GREETING_LIMIT_S
# Until the node's kernel has answered, which is never busy; the first packet is sent again after 1 and 3 s (tcp(7), tcp_syn_retries).
_TCP_TIMEOUT_S = 5.0
_UNACKNOWLEDGED_MS = 20_000
# How paramiko says that nothing came after the connection, before or after the server's greeting.
_NO_WORDS = ("protocol banner", "No existing session")
# The kernel's words for a machine that is not there (it asked the LAN for three seconds), and for a network that this machine is not on.
_NOT_THERE = (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)
_NO_NETWORK_HERE = (errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)
# How paramiko says that a key file is none (pkey.py): SSHException without a class of its own.
_KEY_FILE_ERRORS = ("not a valid", "private key file", "Invalid key", "unpack", "encountered", "Not a valid")


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
    return Address(
        host=host,
        port=port,
        user=node.user or options.get("user", [None])[0],
        identity_files=tuple(str(Path(name).expanduser()) for name in identities),
        proxy_jump=None if jump in ("none", "") else jump,
        known_as=options.get("hostkeyalias", [host])[0] or host,
    )


def login(cluster: Cluster, node: Node, address: Address, where: str) -> tuple[fabric.Connection, float]:
    """An open connection to a node, its host key verified, and the seconds until its server greeted (0 through a jump host).

    Raises UnreachableError with the cause in words and what mends it; SilentError where nothing came back at all.
    """
    gateway, greeting_s = None, 0.0
    if address.proxy_jump:
        gateway = _gateway(cluster, address.proxy_jump, where)
    config = fabric.Config(overrides={"load_ssh_configs": False, "timeouts": {"connect": CONNECT_TIMEOUT_S}})
    keys = [name for name in address.identity_files if Path(name).exists()]
    if node.identity_file and not keys:
        raise UnreachableError(
            f"the identity file {node.identity_file} is not there",
            where=f"{where}, key identity_file",
            hint=f"edit cluster.toml, node {node.name}: identity_file = ...; or make a key: ssh-keygen -t ed25519 -f {shlex.quote(node.identity_file)}",
        )
    arguments: dict[str, Any] = {"banner_timeout": CONNECT_TIMEOUT_S, "auth_timeout": CONNECT_TIMEOUT_S}
    if keys:
        arguments["key_filename"] = keys
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
            wire = socket.create_connection((address.host, address.port), timeout=_TCP_TIMEOUT_S)
            connection.connect_kwargs["sock"] = wire
            greeting_s = _greeting_s(wire)
        connection.open()
    except paramiko.BadHostKeyException as error:
        raise _changed(cluster, node, address, where, error.key, error.expected_key) from error
    except paramiko.PasswordRequiredException as error:
        raise UnreachableError(
            "the key has a passphrase, and no ssh-agent that holds it was asked",
            where=f"{where}, {', '.join(keys)}",
            hint=f"{quote_words(['ssh-add', *keys])}, and leave identity_file out of cluster.toml; or use a key without a passphrase",
        ) from error
    except paramiko.AuthenticationException as error:
        options = ["-i", keys[0]] if node.identity_file else []
        options += known_hosts_option(node.known_hosts) if node.known_hosts else []
        options += ["-p", str(address.port)] if address.port != 22 else []
        raise UnreachableError(
            f"the login was refused ({error})",
            where=where,
            hint=f"{quote_words(['ssh-copy-id', *options, _target(address)])}; or edit cluster.toml, node {node.name}: user, identity_file",
        ) from error
    except (ValueError, UnicodeDecodeError) as error:  # from the parsers of key files
        raise UnreachableError(
            f"the identity file cannot be used: {error}",
            where=f"{where}, {', '.join(keys)}",
            hint=f"{quote_words(['ssh-keygen', '-l', '-f', *keys[:1]])} must print the key; or name another identity_file",
        ) from error
    except paramiko.SSHException as error:
        if "not found in known_hosts" in str(error):
            raise UnreachableError(
                "the host key of this node is not known yet", where=where, hint=f"homelab trust {node.name}"
            ) from error
        if any(words in str(error) for words in _NO_WORDS):
            raise UnreachableError(
                f"no SSH session: port {address.port} is open, and no SSH server has greeted there within {GREETING_LIMIT_S:.0f} s: the machine "
                "hangs, starts or is under heavy load, its server answers late, or something else listens",
                where=where,
                hint=f"does it answer if you wait? {_by_hand(node)}; else look at its screen, or start it anew",
            ) from error
        if any(words in str(error) for words in _KEY_FILE_ERRORS):
            raise UnreachableError(
                f"the identity file cannot be used: {error}",
                where=f"{where}, {', '.join(keys)}",
                hint=f"{quote_words(['ssh-keygen', '-l', '-f', *keys[:1]])} must print the key; or name another identity_file",
            ) from error
        raise UnreachableError(f"no SSH session: {error}", where=where, hint=_by_hand(node)) from error
    except socket.gaierror as error:
        if error.errno == socket.EAI_AGAIN:  # no name server was asked successfully: nothing is known of the name
            raise SilentError(
                f'the name "{address.host}" could not be looked up from this machine: {error.strerror}',
                where=where,
                hint=f"is this machine on the network? {quote_words(['getent', 'hosts', address.host])}; or edit host = ... in cluster.toml (an address always works)",
            ) from error
        raise UnreachableError(
            f'no machine is known by the name "{address.host}"',
            where=where,
            hint="edit host = ... in cluster.toml (an address always works)",
        ) from error
    except (OSError, EOFError) as error:
        number = getattr(error, "errno", None)
        if isinstance(error, TimeoutError) or number in _NOT_THERE:
            seen = f" ({_reason(error)})" if number in _NOT_THERE else f" within {_TCP_TIMEOUT_S:.0f} s"
            raise SilentError(
                f"no answer{seen}: it is off, asleep, unplugged, or its firewall drops port {address.port}",
                where=where,
                hint=f"wake it, then: {_by_hand(node)}",
            ) from error
        if number in _NO_NETWORK_HERE:
            raise SilentError(
                f"this machine has no way to {address.host}: {_reason(error)}",
                where=where,
                hint=f"is the cable of this machine in, is its Wi-Fi or VPN on? {quote_words(['ip', 'route', 'get', address.host])}; then: {_by_hand(node)}",
            ) from error
        raise UnreachableError(
            f"nothing answers on port {address.port}: {_reason(error)}",
            where=where,
            hint=f"on the node: sudo systemctl enable --now ssh; then: {_by_hand(node)}",
        ) from error
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
        raise paramiko.SSHException(_NO_WORDS[0]) from None
    except OSError:
        pass  # paramiko meets it again, and has words for it
    wire.settimeout(_TCP_TIMEOUT_S)
    return time.monotonic() - started


def _gateway(cluster: Cluster, jump: str, where: str) -> fabric.Connection:
    """The first hop of a ProxyJump chain, itself resolved and verified like any node."""
    first = jump.split(",")[-1].removeprefix("ssh://")
    user, _, rest = first.rpartition("@")
    host, _, port = rest.partition(":")
    node = Node(name="jump", host=host, user=user or None, port=int(port or 22))
    return login(cluster, node, resolve(node), f"{where}, by way of {host}")[0]


def _reason(error: OSError | EOFError) -> str:
    if isinstance(error, NoValidConnectionsError):  # one error per address of the host
        return ", ".join(sorted({one.strerror or str(one) for one in error.errors.values()}))
    return getattr(error, "strerror", None) or str(error) or "the connection was closed"


def _target(address: Address) -> str:
    return f"{address.user}@{address.host}" if address.user else address.host


def _by_hand(node: Node) -> str:
    """The same login with OpenSSH, which says more."""
    return on_node(node, "true").replace("ssh ", "ssh -v ", 1)


def _changed(
    cluster: Cluster, node: Node, address: Address, where: str, shown: paramiko.PKey, known: paramiko.PKey | None
) -> UnreachableError:
    """Refused everywhere, by `homelab trust` too: only the person's own ssh-keygen -R takes the old key away."""
    file, name = str(hostkeys.files_of(cluster)[0]), hostkeys.name_in_file(address.host, address.port)
    expected = f"expected {hostkeys.fingerprint(known)}, " if known else ""
    return UnreachableError(
        f"the host key CHANGED: {expected}got {hostkeys.fingerprint(shown)}. "
        "Either this machine was set up anew, or another machine answers in its place",
        where=where,
        hint=f"if you know why: {quote_words(['ssh-keygen', '-f', file, '-R', name])} && homelab trust {node.name}",
    )


def offered_key(cluster: Cluster, node: Node) -> tuple[str, int, paramiko.PKey] | None:
    """(host, port, key) that a node shows and nobody has accepted yet; None when it is known already.

    No login is tried. Raises UnreachableError when nothing answers, and when the key differs from the known one.
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
        why = _reason(error) if isinstance(error, OSError | EOFError) else str(error)
        raise UnreachableError(f"no SSH server answers: {why}", where=where, hint=_by_hand(node)) from error
    if recorded is None:
        return address.host, address.port, key
    if recorded.get(key.get_name()) == key:
        return None
    raise _changed(cluster, node, address, where, key, recorded.get(key.get_name()))


def _key_types(recorded: Mapping[str, paramiko.PKey] | None) -> set[str]:
    """The names under which a server may offer the recorded keys: an RSA key has three (RFC 8332)."""
    kinds = set(recorded or ())
    return kinds | {"rsa-sha2-512", "rsa-sha2-256"} if "ssh-rsa" in kinds else kinds
