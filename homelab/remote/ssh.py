"""SSH sessions by fabric, with what fabric leaves out: host keys are verified, ssh_config is read as OpenSSH reads it.

Measured on fabric 3.2: it sets AutoAddPolicy and loads no known_hosts; paramiko ignores `Include`. So OpenSSH itself is asked
(`ssh -G`) and the policy is set by us.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import fabric
import paramiko

from homelab.config.cluster import Cluster, Node
from homelab.errors import UnreachableError
from homelab.planning.command import quote_words
from homelab.remote import hostkeys
from homelab.remote.session import Completed, Stream

# paramiko's threads log a traceback for every connection that fails; the error itself comes to us as an exception.
logging.getLogger("paramiko").addHandler(logging.NullHandler())

CONNECT_TIMEOUT_S = 10.0
_BLOCK = 1 << 16
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
        answer = subprocess.run(
            [*command, "--", node.host], capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL
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
        user=node.user or options.get("user", [None])[0],  # type: ignore[list-item]
        identity_files=tuple(str(Path(name).expanduser()) for name in identities),
        proxy_jump=None if jump in ("none", "") else jump,
        known_as=options.get("hostkeyalias", [host])[0] or host,
    )


class SshSession:
    """One node over one SSH connection. See `homelab.remote.session.Session`."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        """Connect. Raises UnreachableError with the cause in words and the command that mends it."""
        self.node = node.name
        self._address = resolve(node)
        self._where = f"node {node.name} ({self._address.user or ''}{'@' if self._address.user else ''}{self._address.host}:{self._address.port})"
        self._connection = _connect(cluster, node, self._address, self._where)

    def run(
        self,
        command: str,
        *,
        stdin: bytes | BinaryIO = b"",
        timeout_s: float,
        stdout: BinaryIO | None = None,
        head: bytes = b"",
    ) -> Completed:
        """See `Session.run`. The remote command is told its own limit by the caller: closing a channel does not end it."""
        deadline = time.monotonic() + timeout_s
        channel = self._channel(timeout_s)
        out, err = bytearray(), bytearray()
        errors = threading.Thread(target=_drain, args=(channel.recv_stderr, err), daemon=True)
        sender = threading.Thread(target=_feed, args=(channel, head, stdin), daemon=True)
        try:
            channel.settimeout(timeout_s)
            channel.exec_command(command)
            errors.start()
            sender.start()
            while block := channel.recv(_BLOCK):
                if stdout is None:
                    out += block
                else:
                    stdout.write(block)
                channel.settimeout(max(0.1, deadline - time.monotonic()))
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
        if returncode == -1 and not (channel.transport and channel.transport.is_active()):
            raise self._lost("the connection broke while a command ran")
        # -1 over a connection that is well: a signal ended the command (RFC 4254, exit-signal).
        return Completed(returncode, bytes(out), bytes(err))

    def open(self, command: str, *, stdin: bytes = b"") -> Stream:
        """See `Session.open`."""
        channel = self._channel(CONNECT_TIMEOUT_S)
        try:
            channel.exec_command(command)
            channel.sendall(stdin)
        except (OSError, EOFError, paramiko.SSHException) as error:
            raise self._lost(str(error)) from error
        return _ChannelStream(channel)

    def round_trip_ms(self) -> float:
        """One question and answer of the SSH protocol itself (a global request the server declines): no shell in it."""
        transport = self._connection.transport
        assert transport is not None
        started = time.perf_counter()
        transport.global_request("keepalive@openssh.com", wait=True)
        return (time.perf_counter() - started) * 1000

    def close(self) -> None:
        """See `Session.close`."""
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._connection.close()

    def _channel(self, timeout_s: float) -> paramiko.Channel:
        try:
            transport = self._connection.transport
            assert transport is not None
            return transport.open_session(timeout=timeout_s)
        except (OSError, EOFError, paramiko.SSHException, AttributeError) as error:
            raise self._lost(str(error)) from error

    def _lost(self, reason: str) -> UnreachableError:
        return UnreachableError(
            f"the connection to this node was lost: {reason}", where=self._where, hint="homelab preflight --only ssh"
        )


class _ChannelStream:
    def __init__(self, channel: paramiko.Channel) -> None:
        self._channel = channel
        self._buffer = bytearray()

    def readline(self, timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            self._channel.settimeout(max(0.05, deadline - time.monotonic()))
            block = self._channel.recv(_BLOCK)
            if not block:
                break
            self._buffer += block
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer = bytearray(rest)
        return line

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            self._channel.shutdown_write()
            self._channel.close()


def _feed(channel: paramiko.Channel, head: bytes, stdin: bytes | BinaryIO) -> None:
    # A command may end without reading its input; that is its right, and its exit code tells.
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        if head:
            channel.sendall(head)
        if isinstance(stdin, bytes):
            if stdin:
                channel.sendall(stdin)
        else:
            while block := stdin.read(_BLOCK):
                channel.sendall(block)
        channel.shutdown_write()


def _drain(receive: Any, into: bytearray) -> None:
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        while block := receive(_BLOCK):
            into += block


def _connect(cluster: Cluster, node: Node, address: Address, where: str) -> fabric.Connection:
    gateway = None
    if address.proxy_jump:
        gateway = _gateway(cluster, address.proxy_jump, where)
    config = fabric.Config(overrides={"load_ssh_configs": False, "timeouts": {"connect": CONNECT_TIMEOUT_S}})
    keys = [name for name in address.identity_files if Path(name).exists()]
    if node.identity_file and not keys:
        raise UnreachableError(
            f"the identity file {node.identity_file} is not there",
            where=f"{where}, key identity_file",
            hint=f"ls -l {shlex.quote(node.identity_file)}; make a key: ssh-keygen -t ed25519 -f {shlex.quote(node.identity_file)}",
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
        raise UnreachableError(
            f"the login was refused ({error})",
            where=where,
            hint=quote_words(["ssh-copy-id", *options, "-p", str(address.port), _login(address)]),
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
        if any(words in str(error) for words in _KEY_FILE_ERRORS):
            raise UnreachableError(
                f"the identity file cannot be used: {error}",
                where=f"{where}, {', '.join(keys)}",
                hint=f"{quote_words(['ssh-keygen', '-l', '-f', *keys[:1]])} must print the key; or name another identity_file",
            ) from error
        raise UnreachableError(f"no SSH session: {error}", where=where, hint=_by_hand(address)) from error
    except socket.gaierror as error:
        raise UnreachableError(
            f'no machine is known by the name "{address.host}"',
            where=where,
            hint="edit host = ... in cluster.toml (an address always works)",
        ) from error
    except TimeoutError as error:
        raise UnreachableError(
            f"no answer within {CONNECT_TIMEOUT_S:.0f} s: it is off, asleep, unplugged, or its firewall drops port {address.port}",
            where=where,
            hint=f"wake it, then: {_by_hand(address)}",
        ) from error
    except (OSError, EOFError) as error:
        raise UnreachableError(
            f"nothing answers on port {address.port}: {error}",
            where=where,
            hint=f"on the node: sudo systemctl enable --now ssh; then: {_by_hand(address)}",
        ) from error
    if connection.transport is not None:
        connection.transport.set_keepalive(5)
    return connection


def _gateway(cluster: Cluster, jump: str, where: str) -> fabric.Connection:
    """The first hop of a ProxyJump chain, itself resolved and verified like any node."""
    first = jump.split(",")[-1].removeprefix("ssh://")
    user, _, rest = first.rpartition("@")
    host, _, port = rest.partition(":")
    node = Node(name="jump", host=host, user=user or None, port=int(port or 22))
    return _connect(cluster, node, resolve(node), f"{where}, by way of {host}")


def _login(address: Address) -> str:
    return f"{address.user}@{address.host}" if address.user else address.host


def _by_hand(address: Address) -> str:
    return quote_words(["ssh", "-v", "-p", str(address.port), _login(address), "true"])


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
        raise UnreachableError(f"no SSH server answers: {error}", where=where, hint=_by_hand(address)) from error
    if recorded is None:
        return address.host, address.port, key
    if recorded.get(key.get_name()) == key:
        return None
    raise _changed(cluster, node, address, where, key, recorded.get(key.get_name()))


def _key_types(recorded: Mapping[str, paramiko.PKey] | None) -> set[str]:
    """The names under which a server may offer the recorded keys: an RSA key has three (RFC 8332)."""
    kinds = set(recorded or ())
    return kinds | {"rsa-sha2-512", "rsa-sha2-256"} if "ssh-rsa" in kinds else kinds
