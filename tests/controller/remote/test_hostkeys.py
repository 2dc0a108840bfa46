"""Host keys: unknown ones are refused until an explicit yes, changed ones always, by `homelab trust` too."""

from __future__ import annotations

import subprocess
from pathlib import Path

import paramiko
import pytest

from homelab.controller.base.errors import HomelabError, InputError, UnreachableError
from homelab.controller.config.cluster import Cluster
from homelab.controller.remote import hostkeys, ssh, ssh_login
from homelab.lab import Lab

pytestmark = pytest.mark.timeout(60)


def known_hosts(cluster: Cluster) -> Path:
    assert cluster.known_hosts
    return Path(cluster.known_hosts)


def login(cluster: Cluster, name: str = "node1") -> None:
    ssh.SshSession(cluster, cluster.node(name)).close()


def other_key(folder: Path) -> str:
    """A host key that no node has: its line without the host."""
    file = folder / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(file)], check=True, stdin=subprocess.DEVNULL)
    return " ".join(file.with_suffix(".pub").read_text().split()[:2])


def place(cluster: Cluster) -> str:
    node = cluster.node("node1")
    return hostkeys.name_in_file(node.host, node.port)


def test_an_unknown_key_is_refused_until_it_is_accepted(own_hosts: Cluster) -> None:
    known_hosts(own_hosts).write_text("")
    with pytest.raises(UnreachableError, match="host key of this node is not known yet") as caught:
        login(own_hosts)
    assert caught.value.hint == "homelab trust node1"
    assert known_hosts(own_hosts).read_text() == "", "nothing is accepted unseen"
    offer = ssh_login.offered_key(own_hosts, own_hosts.node("node1"))
    hostkeys.remember(own_hosts, offer.host, offer.port, offer.key)
    assert ssh_login.offered_key(own_hosts, own_hosts.node("node1")).is_known
    login(own_hosts)


def test_the_fingerprint_is_the_one_that_ssh_keygen_shows(own_hosts: Cluster, remote_lab: Lab) -> None:
    known_hosts(own_hosts).write_text("")
    offer = ssh_login.offered_key(own_hosts, own_hosts.node("node1"))
    hostkeys.remember(own_hosts, offer.host, offer.port, offer.key)
    shown = subprocess.run(["ssh-keygen", "-lf", str(known_hosts(own_hosts))], capture_output=True, text=True, check=True).stdout
    assert hostkeys.fingerprint(offer.key) in shown


def test_a_changed_key_is_refused_everywhere(own_hosts: Cluster, tmp_path: Path) -> None:
    changed = f"{place(own_hosts)} {other_key(tmp_path)}\n"
    known_hosts(own_hosts).write_text(changed)
    with pytest.raises(UnreachableError, match="host key CHANGED") as at_login:
        login(own_hosts)
    with pytest.raises(UnreachableError, match="host key CHANGED") as at_trust:
        ssh_login.offered_key(own_hosts, own_hosts.node("node1"))
    for error in (at_login.value, at_trust.value):
        assert f"ssh-keygen -f '{known_hosts(own_hosts)}' -R" in error.hint and "homelab trust node1" in error.hint
        assert error.message.count("SHA256:") == 2, "both keys are shown"
    assert known_hosts(own_hosts).read_text() == changed
    # The command of the hint mends it.
    subprocess.run(at_login.value.hint.partition(": ")[2].partition(" && ")[0], shell=True, check=True, capture_output=True)
    assert not ssh_login.offered_key(own_hosts, own_hosts.node("node1")).is_known


def test_a_key_of_another_kind_is_a_changed_key(own_hosts: Cluster) -> None:
    key = paramiko.ECDSAKey.generate()
    known_hosts(own_hosts).write_text(f"{place(own_hosts)} {key.get_name()} {key.get_base64()}\n")
    with pytest.raises(UnreachableError):
        login(own_hosts)
    with pytest.raises(UnreachableError, match="CHANGED"):
        ssh_login.offered_key(own_hosts, own_hosts.node("node1"))


def test_hashed_names_and_other_lines_are_understood(own_hosts: Cluster) -> None:
    file = known_hosts(own_hosts)
    file.write_text("# a comment\n@cert-authority *.example ssh-rsa AAAA\n\n" + file.read_text())
    subprocess.run(["ssh-keygen", "-H", "-f", str(file)], check=True, capture_output=True)
    assert own_hosts.node("node1").host not in file.read_text()
    login(own_hosts)
    assert ssh_login.offered_key(own_hosts, own_hosts.node("node1")).is_known


def test_a_last_line_without_an_end_is_not_damaged(own_hosts: Cluster) -> None:
    file = known_hosts(own_hosts)
    second = next(line for line in file.read_text().splitlines() if own_hosts.node("node2").host in line)
    file.write_text(second)
    offer = ssh_login.offered_key(own_hosts, own_hosts.node("node1"))
    hostkeys.remember(own_hosts, offer.host, offer.port, offer.key)
    login(own_hosts, "node1")
    login(own_hosts, "node2")


@pytest.mark.parametrize(
    "line", [b"10.0.0.1 ssh-ed25519 not*base64", b"10.0.0.1 ssh-ed25519 AAAA", b"\xff\xfe", b"x", b"@cert-authority * ssh-rsa AAAA"]
)
def test_a_line_that_cannot_be_read_hides_no_other(own_hosts: Cluster, line: bytes) -> None:
    file = known_hosts(own_hosts)
    file.write_bytes(line + b"\n" + file.read_bytes())
    login(own_hosts)
    file.write_bytes(line + b"\n")
    with pytest.raises(UnreachableError, match="not known yet"):
        login(own_hosts)


def test_a_revoked_key_is_not_known(own_hosts: Cluster) -> None:
    file = known_hosts(own_hosts)
    lines = file.read_text()
    file.write_text(lines + "".join(f"@revoked {line}\n" for line in lines.splitlines()))
    with pytest.raises(UnreachableError, match="not known yet"):
        login(own_hosts)


def test_a_folder_in_place_of_the_file(own_hosts: Cluster, tmp_path: Path) -> None:
    cluster = own_hosts.model_copy(update={"known_hosts": str(tmp_path)})
    with pytest.raises(InputError, match="known host keys cannot be read") as caught:
        login(cluster)
    assert caught.value.where == str(tmp_path)


def test_a_place_that_cannot_be_written(own_hosts: Cluster, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cluster = own_hosts.model_copy(update={"known_hosts": str(tmp_path / "file" / "known_hosts")})
    offer = ssh_login.offered_key(cluster, cluster.node("node1"))
    with pytest.raises(HomelabError, match="cannot be saved") as caught:
        hostkeys.remember(cluster, offer.host, offer.port, offer.key)
    assert "ls -ld" in caught.value.hint


def test_nothing_listens(own_hosts: Cluster) -> None:
    node = own_hosts.node("node1").model_copy(update={"port": 1})
    with pytest.raises(UnreachableError, match="no SSH server answers") as caught:
        ssh_login.offered_key(own_hosts, node)
    assert "node node1" in caught.value.where and "-p 1" in caught.value.hint
