"""Why a login failed, in words, and what fixes it: a table of what paramiko and the kernel raise."""

from __future__ import annotations

import contextlib
import errno
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import paramiko
from paramiko.ssh_exception import NoValidConnectionsError

from homelab.controller.base import own_machine
from homelab.controller.base.errors import GREETING_LIMIT_S, SilentError, UnreachableError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.shell import quote_words
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.facts.node_commands import known_hosts_option, on_node
from homelab.controller.remote import hostkeys

# Until the node's kernel has answered, which is never busy; the first packet is sent again after 1 and 3 s (tcp(7), tcp_syn_retries).
TCP_TIMEOUT_S = 5.0
# How paramiko says that nothing came after the connection, before or after the server's greeting.
NO_GREETING = ("protocol banner", "No existing session")
# Our own words for OpenSSH's silence.
HANGING = "no SSH session was made in time"
# How paramiko says that a key file is none (pkey.py): SSHException without a class of its own.
_KEY_FILE = ("not a valid", "private key file", "Invalid key", "unpack", "encountered", "Not a valid")
# The kernel's words for a machine that is not there (it asked the LAN for three seconds), and for a network that this machine is not on.
_NOT_THERE = (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)
_NO_NETWORK_HERE = (errno.ENETUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL)


@dataclass(frozen=True)
class Login:
    """A login that was tried. `where`: as the errors name the node; `keys`: the identity files that exist."""

    cluster: Cluster
    node: Node
    host: str
    port: int
    user: str | None
    keys: tuple[str, ...]
    where: str
    known_as: str = ""
    """Its name in known_hosts, where that is not its address."""
    known_hosts: tuple[str, ...] = ()
    """The person's own known_hosts files, where ssh_config names some."""

    @property
    def by_hand(self) -> str:
        """The same login with OpenSSH, which says more."""
        return by_hand(self.node)


@dataclass(frozen=True)
class _Cause:
    """`applies` to an error of the login; the first cause of the table that does explains it."""

    applies: Callable[[BaseException], bool]
    message: Callable[[Login, BaseException], str]
    hint: Callable[[Login], str]
    is_silent: bool = False  # nothing came back at all
    names_keys: bool = False


def _is(*kinds: type[BaseException]) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, kinds)


def _says(*words: str) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, paramiko.SSHException) and any(word in str(error) for word in words)


def _has_number(*numbers: int) -> Callable[[BaseException], bool]:
    return lambda error: isinstance(error, OSError) and error.errno in numbers


def _is_no_name(error: BaseException) -> bool:
    """Whether Python could not write a host as a name of the network: "gpu..lan". A key file of other bytes is a UnicodeDecodeError."""
    return isinstance(error, UnicodeError) and not isinstance(error, UnicodeDecodeError)


def _copy_id(login: Login) -> str:
    options = ["-i", login.keys[0]] if login.node.identity_file else []
    options += known_hosts_option(login.node.known_hosts) if login.node.known_hosts else []
    options += ["-p", str(login.port)] if login.port != 22 else []
    target = f"{login.user}@{login.host}" if login.user else login.host
    return f"{quote_words(['ssh-copy-id', *options, target])}; or edit cluster.toml, node {login.node.name}: user, identity_file"


def _no_answer(login: Login, error: BaseException) -> str:
    detail = f" ({reason(error)})" if _has_number(*_NOT_THERE)(error) else f" within {TCP_TIMEOUT_S:.0f} s"
    return f"no answer{detail}: it is off, asleep, unplugged, or its firewall drops port {login.port}"


_TABLE = (
    _Cause(
        _is(paramiko.PasswordRequiredException),
        lambda login, error: "the key has a passphrase, and no ssh-agent with that key was asked",
        lambda login: (
            f"{quote_words(['ssh-add', *login.keys])}, and leave identity_file out of cluster.toml; or use a key without a passphrase"
        ),
        names_keys=True,
    ),
    _Cause(_is(paramiko.AuthenticationException), lambda login, error: f"the login was refused ({error})", _copy_id),
    _Cause(
        _says("not found in known_hosts"),
        lambda login, error: "the host key of this node is not known yet",
        lambda login: homelab("trust", login.node.name),
    ),
    _Cause(
        _says(*NO_GREETING),
        lambda login, error: (
            f"no SSH session: port {login.port} is open, but no SSH server answered there within {GREETING_LIMIT_S:.0f} s: the machine "
            "hangs, starts or is under heavy load, its server answers late, or another program listens there"
        ),
        lambda login: f"does it answer if you wait? {login.by_hand}; if not, look at its screen, or restart it",
    ),
    _Cause(
        lambda error: (
            (isinstance(error, ValueError) and not _is_no_name(error)) or _says(*_KEY_FILE)(error)
        ),  # from the parsers of key files
        lambda login, error: f"the identity file cannot be used: {error}",
        lambda login: f"{quote_words(['ssh-keygen', '-l', '-f', *login.keys[:1]])} must print the key; or name another identity_file",
        names_keys=True,
    ),
    _Cause(
        _says(HANGING),
        lambda login, error: (
            "the way to this node (ProxyCommand, ProxyJump, or an agent that asks you) gave no SSH session in time, so homelab ended it"
        ),
        lambda login: f"to see where it stops: {login.by_hand}; for a slow way, raise ConnectTimeout in ~/.ssh/config",
    ),
    _Cause(_is(paramiko.SSHException), lambda login, error: f"no SSH session: {error}", lambda login: login.by_hand),
    _Cause(
        # no name server answered: nothing is known of the name
        lambda error: isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN,
        lambda login, error: f'the name "{login.host}" could not be looked up from this machine: {getattr(error, "strerror", error)}',
        lambda login: (
            f"is this machine on the network? {own_machine.look_up(login.host)}; or edit host = ... in cluster.toml (an address always works)"
        ),
        is_silent=True,
    ),
    _Cause(
        lambda error: isinstance(error, socket.gaierror) or _is_no_name(error),
        lambda login, error: (
            f'there is no machine with the name "{login.host}"'
            + ("" if shutil.which("ssh") else ", and homelab reads no ~/.ssh/config, because no `ssh` is installed here")
        ),
        lambda login: (
            "edit host = ... in cluster.toml (an address always works)" + ("" if shutil.which("ssh") else "; or install OpenSSH's client")
        ),
    ),
    _Cause(
        lambda error: isinstance(error, TimeoutError) or _has_number(*_NOT_THERE)(error),
        _no_answer,
        lambda login: f"wake it, then: {login.by_hand}",
        is_silent=True,
    ),
    _Cause(
        _has_number(*_NO_NETWORK_HERE),
        lambda login, error: f"this machine has no route to {login.host}: {reason(error)}",
        lambda login: (
            f"is the cable of this machine plugged in, and is its Wi-Fi or VPN on? {own_machine.route_to(login.host)}; then: {login.by_hand}"
        ),
        is_silent=True,
    ),
    _Cause(
        _is(OSError, EOFError),
        lambda login, error: f"nothing answers on port {login.port}: {reason(error)}",
        lambda login: f"on the node: sudo systemctl enable --now ssh; then: {login.by_hand}",
    ),
)
EXPLAINED = (paramiko.SSHException, OSError, EOFError, ValueError)
"""What `explain` has words for."""


def explain(login: Login, error: BaseException) -> UnreachableError:
    """The error with all three parts; SilentError where nothing came back at all. `error` is one of `EXPLAINED`."""
    if isinstance(error, paramiko.BadHostKeyException):
        return changed_key(login, error.key, error.expected_key)
    cause = next(cause for cause in _TABLE if cause.applies(error))
    where = f"{login.where}, {', '.join(login.keys)}" if cause.names_keys else login.where
    return (SilentError if cause.is_silent else UnreachableError)(cause.message(login, error), where=where, hint=cause.hint(login))


def changed_key(login: Login, shown: paramiko.PKey, known_key: paramiko.PKey | None) -> UnreachableError:
    """Refused everywhere, by `homelab trust` too: only the person's own ssh-keygen -R takes the old key away."""
    expected = f"expected {hostkeys.fingerprint(known_key)}, " if known_key else ""
    return changed(login, f"{expected}got {hostkeys.fingerprint(shown)}")


def changed(login: Login, which: str) -> UnreachableError:
    """The same, with `which` keys in words."""
    name = login.known_as or hostkeys.name_in_file(login.host, login.port)
    file = str(hostkeys.file_with(name, login.cluster, login.known_hosts))
    return UnreachableError(
        f"the host key CHANGED: {which}. Either this machine was installed again, or another machine answers at its address",
        where=login.where,
        hint=Hint("if you know why: {} && {}", quote_words(["ssh-keygen", "-f", file, "-R", name]), homelab("trust", login.node.name)),
    )


def by_hand(node: Node) -> str:
    """The login with OpenSSH, which says more."""
    return on_node(node, "true", options=["-v"])


def reason(error: BaseException) -> str:
    """What the kernel said."""
    if isinstance(error, NoValidConnectionsError):  # one error per address of the host
        return ", ".join(sorted({one.strerror or str(one) for one in error.errors.values()}))
    if _is_no_name(error):
        return "its host is no name of a machine"
    return getattr(error, "strerror", None) or str(error) or "the connection was closed"


@contextlib.contextmanager
def within(limit_s: float, give_up: Callable[[], object]) -> Iterator[None]:
    """Paramiko waits for ever for some answers: after so long `give_up` closes what it waits on. Raises TimeoutError then."""
    over = threading.Event()

    def end() -> None:
        over.set()
        give_up()

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, EOFError, paramiko.SSHException) as error:
        if over.is_set():
            raise TimeoutError from error
        raise
    finally:
        timer.cancel()
