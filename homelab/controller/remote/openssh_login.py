"""A login by OpenSSH itself: the connection, the host key that it is shown, and its refusals in our words."""

from __future__ import annotations

import errno
import re
import shlex
import socket
import subprocess
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import paramiko

from homelab.controller.base.errors import UnreachableError
from homelab.controller.base.hint import Command, Hint
from homelab.controller.base.units import listed
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.facts.node_commands import known_hosts_option
from homelab.controller.remote import hostkeys, login_errors, openssh, own_programs, ssh_route, ssh_settings
from homelab.controller.remote.ssh_address import Address, address_of, as_login, refuse_missing_key

UNKNOWN_KEY = re.compile(r"No (?:\S+ )+host key is known for (?P<name>\S+) and you have requested strict checking")
CHANGED_KEY = re.compile(r"Host key for (?P<name>\S+) has changed and you have requested strict checking")
FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]+")


class _Row(NamedTuple):
    words: re.Pattern[str]
    error: Callable[[str], BaseException]


def _of_kernel(number: int) -> Callable[[str], BaseException]:
    return lambda line: OSError(number, line.rpartition(": ")[2])


# The first row that is found anywhere counts: what a hop says comes before what follows from it ("Connection closed by UNKNOWN port 65535").
_TABLE = (
    _Row(UNKNOWN_KEY, lambda line: paramiko.SSHException(f"not found in known_hosts: {line}")),
    _Row(re.compile(r"Permission denied \(|Too many authentication failures|No more authentication methods"), paramiko.AuthenticationException),
    _Row(re.compile(r"Could not resolve hostname .*: (?:Temporary failure|Try again)"), lambda line: socket.gaierror(socket.EAI_AGAIN, line)),
    _Row(re.compile(r"Could not resolve hostname"), lambda line: socket.gaierror(socket.EAI_NONAME, line)),
    _Row(re.compile(r"Connection timed out during banner exchange"), lambda line: paramiko.SSHException(login_errors.HANGING)),
    _Row(re.compile(r"[Cc]onnect(?:ion)?\b.*: Connection refused"), _of_kernel(errno.ECONNREFUSED)),
    _Row(re.compile(r"[Cc]onnect\b.*: (?:Connection|Operation) timed out"), lambda line: TimeoutError(line)),
    _Row(re.compile(r"[Cc]onnect\b.*: No route to host"), _of_kernel(errno.EHOSTUNREACH)),
    _Row(re.compile(r"[Cc]onnect\b.*: Network is unreachable"), _of_kernel(errno.ENETUNREACH)),
)  # fmt: skip
_AFTERWARDS = ("Connection closed by UNKNOWN port", "kex_exchange_identification: Connection closed", "Warning: Permanently added")


def connect(cluster: Cluster, node: Node, address: Address, where: str) -> openssh.OpenSshTransport:
    """A connection that OpenSSH opens. Raises UnreachableError."""
    refuse_missing_key(node, where)
    words = ssh_route.words(cluster, node, address.settings, where)
    try:
        return openssh.OpenSshTransport(words, node.host, ssh_route.limit_s(address.settings))
    except openssh.LoginRefusedError as error:
        raise explain(cluster, node, address, where, error) from error.__cause__


def offered_key(cluster: Cluster, node: Node, address: Address, known_kinds: Collection[str]) -> paramiko.PKey:
    """The host key at the end of the way; the machines on the way are verified. No login is tried. Raises UnreachableError."""
    where = address.where(node)
    with tempfile.TemporaryDirectory(prefix="homelab-") as folder:
        file = Path(folder) / "shown"
        words = ssh_route.words(cluster, node, address.settings, where, before=_showing(file, address.settings, known_kinds))
        command = [word.encode("utf-8", "surrogateescape") for word in (*words, "-T", "--", node.host, "true")]
        process = own_programs.start(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        try:
            errors = process.communicate(timeout=ssh_route.limit_s(address.settings) + ssh_route.HOP_LIMIT_S)[1]
            refused = openssh.LoginRefusedError(errors.decode("utf-8", "replace"))
        except subprocess.TimeoutExpired:
            refused = openssh.LoginRefusedError("", is_hanging=True)
        finally:
            own_programs.end_group(process)
        keys = hostkeys.keys_in(file)
    if not keys:
        raise explain(cluster, node, address, where, refused)
    return keys[0]


def _showing(file: Path, settings: ssh_settings.Settings, known_kinds: Collection[str]) -> list[str]:
    """Options with which OpenSSH writes down the host key that it is shown, into a file of ours alone, and tries no login."""
    options = {
        "StrictHostKeyChecking": "accept-new", "UserKnownHostsFile": str(file), "GlobalKnownHostsFile": "/dev/null", "VerifyHostKeyDNS": "no", "HashKnownHosts": "no",
        "PreferredAuthentications": "none", "ControlMaster": "no", "ControlPath": "none",
    }  # fmt: skip
    if "knownhostscommand" in settings:
        options["KnownHostsCommand"] = "none"
    if known_kinds:
        options["HostKeyAlgorithms"] = "^" + ",".join(sorted(known_kinds))
    return [word for name, value in options.items() for word in ("-o", f"{name}={value}")]


def explain(cluster: Cluster, node: Node, address: Address, where: str, refused: openssh.LoginRefusedError) -> UnreachableError:
    """The words of OpenSSH as an error with its three parts."""
    login = as_login(cluster, node, address, where)
    if refused.is_hanging:
        cause: BaseException = paramiko.SSHException(login_errors.HANGING)
        line = ""
    else:
        cause, line = error_of(refused.words)
    found = UNKNOWN_KEY.search(line) or CHANGED_KEY.search(refused.words)
    if found and found["name"] != address.name_in_known_hosts:
        error = _of_hop(cluster, address, where, found["name"], is_changed=found.re is CHANGED_KEY)
    elif found and found.re is CHANGED_KEY:
        shown = FINGERPRINT.search(refused.words)
        error = login_errors.changed(login, f"got {shown[0] if shown else 'another one'}")
    else:
        error = login_errors.explain(login, cause)
        if address.hops and isinstance(cause, paramiko.AuthenticationException):  # a hop names itself
            error = UnreachableError(f"the login was refused ({line})", where=where, hint=Hint("see who refuses it: {}", login.by_hand))
    if kept_out := address.not_supported:
        error = type(error)(
            f"{error.message} (of the SSH configuration, homelab does not support {listed(kept_out)})", where=error.where, hint=error.hint
        )
    error.__cause__ = cause
    return error


def _of_hop(cluster: Cluster, address: Address, where: str, name: str, *, is_changed: bool) -> UnreachableError:
    """A host key of a machine on the way; it is no node, so the person's own ssh accepts it."""
    file = known_hosts_option(cluster.known_hosts) if cluster.known_hosts else []
    hops = {_address(hop).name_in_known_hosts: hop for hop in address.hops}
    hop = hops.get(name)
    if is_changed:
        own = _address(hop).known_hosts if hop else address.known_hosts
        names = ["ssh-keygen", "-f", str(hostkeys.file_with(name, cluster, own)), "-R", name]
        return UnreachableError(
            f"the host key of {name}, a machine on the way, CHANGED. Either it was installed again, or another machine answers at its address",
            where=where, hint=Hint("if you know why: {}", Command(shlex.join(names))),
        )  # fmt: skip
    before = address.hops[: address.hops.index(hop)] if hop else ()
    jump = ["-J", ",".join(one.spelled for one in before)] if before else []
    target = [*ssh_settings.words_of(hop.as_node()), hop.host] if hop else [name]
    login = Command(shlex.join(["ssh", *file, *jump, *target, "true"]))
    return UnreachableError(
        f"the host key of {name}, a machine on the way, is not known yet",
        where=where,
        hint=Hint("compare the fingerprint, and answer yes to: {}", login),
    )


def _address(hop: ssh_route.Hop) -> Address:
    node = hop.as_node()
    return address_of(node, ssh_settings.of(node))


def error_of(words: str) -> tuple[BaseException, str]:
    """(the error, the line that it was read from) of everything that OpenSSH printed."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    for row in _TABLE:
        for line in lines:
            if row.words.search(line):
                return row.error(line), line
    told = [line for line in lines if not line.startswith(_AFTERWARDS)] or lines or ["OpenSSH ended and printed nothing"]
    return paramiko.SSHException(told[-1]), told[-1]
