"""What OpenSSH says when it does not come through, as the errors that `homelab.controller.remote.login_errors` has words for."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable
from typing import NamedTuple

import paramiko

from homelab.controller.remote import login_errors

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


def error_of(words: str) -> tuple[BaseException, str]:
    """(the error, the line that it was read from) of everything that OpenSSH printed."""
    lines = [line.strip() for line in words.splitlines() if line.strip()]
    for row in _TABLE:
        for line in lines:
            if row.words.search(line):
                return row.error(line), line
    told = [line for line in lines if not line.startswith(_AFTERWARDS)] or lines or ["OpenSSH ended and said nothing"]
    return paramiko.SSHException(told[-1]), told[-1]
