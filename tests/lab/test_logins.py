"""Nodes with accounts and ports of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.config.load import load_cluster
from homelab.lab import Lab
from tests.lab.conftest import needs_namespaces, output, ssh

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@needs_namespaces
@pytest.mark.namespaces
def test_a_node_has_a_user_and_a_port_that_no_other_has(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    with Lab.up(tmp_path / "lab", nodes=2, backend="namespaces", logins={"node1": "anna:2222", "node2": "root:2022"}) as lab:
        assert output(lab, "node1", "whoami; echo $HOME; touch $HOME/mine && ls $HOME").split() == [
            "anna",
            lab.state.node("node1").home,
            "homelab",
            "mine",
        ]
        assert output(lab, "node2", "whoami") == "root"
        assert ssh(lab, "node2", f"ls {lab.state.node('node1').home}").returncode == 0, "root of the other node is this machine's"
        assert [(node.user, node.port) for node in load_cluster(lab.cluster_file).nodes] == [("anna", 2222), ("root", 2022)]


@needs_namespaces
@pytest.mark.parametrize(
    ("login", "words"),
    [
        ({"node1": "nobody"}, "has an account"),
        ({"node1": "anna:99999"}, "is no login"),
        ({"node1": "$(x)"}, "is no login"),
        ({"node9": "anna"}, "login of its own"),
        ({"node1": "anna"}, "cannot reach the lab's folder"),
    ],
)
def test_wrong_logins_leave_nothing(tmp_path: Path, login: dict[str, str], words: str) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with pytest.raises(InputError, match=words):
        Lab.up(closed / "lab", nodes=2, backend="namespaces", logins=login)
    assert not (closed / "lab").exists()
