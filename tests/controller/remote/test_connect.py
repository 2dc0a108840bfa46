"""What the kernel says of a connection that did not come about, in words; and how long a server takes to greet."""

from __future__ import annotations

import errno
import os
import socket
import threading
from typing import Any

import paramiko
import pytest

from homelab.controller.base.errors import SilentError, UnreachableError
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.remote import login_errors, ssh_login

pytestmark = pytest.mark.timeout(20)
NODE = Node(name="laptop", host="192.0.2.1", user="me")
CLUSTER = Cluster.model_validate({"name": "home", "nodes": [{"name": "laptop", "host": "192.0.2.1"}]}, strict=False)
ADDRESS = ssh_login.Address("192.0.2.1", 22, "me", (), None, "192.0.2.1")


def refused(monkeypatch: pytest.MonkeyPatch, error: Exception) -> UnreachableError:
    """The error of a login whose connection ends like this."""

    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(socket, "create_connection", fail)
    with pytest.raises(UnreachableError) as caught:
        ssh_login.login(CLUSTER, NODE, ADDRESS, "node laptop")
    return caught.value


@pytest.mark.parametrize("error", [TimeoutError("timed out"), OSError(errno.EHOSTUNREACH, "No route to host")])
def test_a_node_without_power_is_off_and_needs_no_ssh(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """On a LAN the kernel asks for the address for three seconds, and then knows of no machine that has it."""
    said = refused(monkeypatch, error)
    assert isinstance(said, SilentError) and "off, asleep, unplugged" in said.message
    assert said.hint.startswith("wake it") and "systemctl" not in said.hint


def test_a_machine_without_a_network_is_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(monkeypatch, OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH)))
    assert isinstance(said, SilentError) and "this machine has no route to 192.0.2.1: Network is unreachable" in said.message
    assert "ip route get 192.0.2.1" in said.hint and "systemctl" not in said.hint


def test_a_name_that_could_not_be_asked_for_is_no_wrong_name(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(monkeypatch, socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"))
    assert isinstance(said, SilentError) and "could not be looked up from this machine" in said.message
    said = refused(monkeypatch, socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    assert not isinstance(said, SilentError) and "there is no machine with the name" in said.message


def test_a_port_on_which_nobody_listens_is_a_machine_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused(monkeypatch, ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"))
    assert not isinstance(said, SilentError) and "systemctl enable --now ssh" in said.hint


def test_a_greeting_is_waited_for_and_left_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        late = threading.Timer(0.3, theirs.sendall, (b"SSH-2.0-x",))
        late.start()
        assert ssh_login._greeting_s(ours) >= 0.25
        assert ours.recv(20) == b"SSH-2.0-x"
        late.join(5)


def test_who_never_greets_is_told_as_that_and_that_it_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(ssh_login, "GREETING_LIMIT_S", 0.05)
    monkeypatch.setattr(login_errors, "GREETING_LIMIT_S", 0.05)
    with ours, theirs:
        monkeypatch.setattr(socket, "create_connection", lambda *_, **__: ours)
        with pytest.raises(UnreachableError, match="no SSH server answered there within 0 s") as caught:
            ssh_login.login(CLUSTER, NODE, ADDRESS, "node laptop")
    assert "answers late" in caught.value.message and "does it answer if you wait?" in caught.value.hint
    assert isinstance(caught.value.__cause__, paramiko.SSHException)
