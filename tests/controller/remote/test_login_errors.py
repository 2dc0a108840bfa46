"""What stands in the way of a login, in words: one row per error that paramiko or the kernel raises."""

from __future__ import annotations

import errno
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import paramiko
import pytest

from homelab.controller.base.errors import SilentError, UnreachableError
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.remote import hostkeys, ssh_login
from homelab.controller.remote.login_errors import EXPLAINED, Login, explain

MINI = Node(name="mini", host="192.0.2.7", port=2222, identity_file="~/.ssh/mini")
LOGIN = Login(Cluster(nodes=(MINI,)), MINI, "192.0.2.7", 2222, "me", ("/home/me/.ssh/mini",), "node mini (me@192.0.2.7:2222)")
KEY = paramiko.ECDSAKey.generate()


def of_kernel(number: int) -> OSError:
    return OSError(number, "what the kernel says")


ROWS = [
    (paramiko.PasswordRequiredException("encrypted"), "the key has a passphrase", "ssh-add /home/me/.ssh/mini", False),
    (
        paramiko.AuthenticationException("Authentication failed."),
        "the login was refused (Authentication failed.)",
        "ssh-copy-id -i /home/me/.ssh/mini -p 2222 me@192.0.2.7",
        False,
    ),
    (paramiko.SSHException("Server '192.0.2.7' not found in known_hosts"), "is not known yet", "homelab trust mini", False),
    (paramiko.SSHException("Error reading SSH protocol banner"), "port 2222 is open, but no SSH server answered", "ssh -v", False),
    (
        paramiko.SSHException("not a valid OPENSSH private key file"),
        "the identity file cannot be used",
        "ssh-keygen -l -f /home/me/.ssh/mini",
        False,
    ),
    (ValueError("q must be exactly 160 bits"), "the identity file cannot be used", "ssh-keygen -l -f /home/me/.ssh/mini", False),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"), "the identity file cannot be used", "must print the key", False),
    (paramiko.SSHException("Incompatible ssh peer"), "no SSH session: Incompatible ssh peer", "ssh -v", False),
    (socket.gaierror(socket.EAI_AGAIN, "try again"), "could not be looked up from this machine: try again", "getent hosts 192.0.2.7", True),
    (socket.gaierror(socket.EAI_NONAME, "not known"), 'there is no machine with the name "192.0.2.7"', "edit host = ...", False),
    (UnicodeError("label empty or too long"), 'there is no machine with the name "192.0.2.7"', "edit host = ...", False),
    (TimeoutError(), "no answer within 5 s: it is off", "wake it", True),
    (of_kernel(errno.EHOSTUNREACH), "no answer (what the kernel says): it is off", "wake it", True),
    (of_kernel(errno.ENETUNREACH), "this machine has no route to 192.0.2.7", "ip route get 192.0.2.7", True),
    (of_kernel(errno.ECONNREFUSED), "nothing answers on port 2222: what the kernel says", "sudo systemctl enable --now ssh", False),
    (EOFError(), "nothing answers on port 2222: the connection was closed", "ssh -v", False),
    (paramiko.BadHostKeyException("192.0.2.7", KEY, KEY), "the host key CHANGED", "-R '[192.0.2.7]:2222' && homelab trust mini", False),
]


@pytest.mark.parametrize(("error", "message", "hint", "is_silent"), ROWS, ids=[f"{type(row[0]).__name__}: {row[1][:30]}" for row in ROWS])
def test_an_error_of_the_login_has_its_three_parts(error: Exception, message: str, hint: str, is_silent: bool) -> None:
    assert isinstance(error, EXPLAINED)
    explained = explain(LOGIN, error)
    assert type(explained) is (SilentError if is_silent else UnreachableError)
    assert message in explained.message
    assert explained.where.startswith(LOGIN.where)
    assert hint in explained.hint


def test_a_name_of_ssh_config_that_is_none_is_said_by_its_host_key_too() -> None:
    """`homelab trust` and `homelab init` ask for it, and init asks others beside it."""
    address = ssh_login.Address("gpu..lan", 22, None, (), None, "gpu..lan")
    with pytest.raises(UnreachableError, match="no SSH server answers: its host is no name of a machine"):
        ssh_login._offered(MINI, address, "node mini", set())


def test_a_changed_key_is_taken_out_of_the_file_that_has_it(tmp_path: Path) -> None:
    """UserKnownHostsFile of ssh_config may name several."""
    files = (str(tmp_path / "own hosts"), str(tmp_path / "work"))
    hostkeys.remember(LOGIN.cluster, LOGIN.host, LOGIN.port, KEY, own=files[1:])
    changed = explain(replace(LOGIN, known_hosts=files), paramiko.BadHostKeyException("192.0.2.7", KEY, KEY))
    subprocess.run(changed.hint.partition(": ")[2].partition(" && ")[0], shell=True, check=True, capture_output=True)
    assert not hostkeys.keys_in(tmp_path / "work")
    empty = explain(replace(LOGIN, known_hosts=files), paramiko.BadHostKeyException("192.0.2.7", KEY, KEY))
    assert f"ssh-keygen -f '{files[0]}' -R" in empty.hint
