"""Before a supervisor is left on a head: what it lacks is found and mended by the command that is named, and nothing is left behind."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import homelab
from homelab.controller.attempt import remote_supervisor
from homelab.controller.attempt.remote_supervisor import SupervisorRequest
from homelab.controller.base.errors import HomelabError
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.config.load import cluster_text, load_cluster
from homelab.controller.remote import hostkeys
from homelab.controller.remote.fanout import Fleet
from homelab.lab import Lab

pytestmark = pytest.mark.timeout(90)
RUN = "2026-01-01-0000-away"


def quiet(text: str) -> None:
    """Nobody listens."""


def refusal(cluster: Cluster) -> HomelabError:
    """Of a launch with the supervisor on node1."""
    with Fleet(cluster) as fleet, pytest.raises(HomelabError) as caught:
        remote_supervisor.prepare(fleet, SupervisorRequest(RUN, "node1", ["node1", "node2"], {}), quiet)
    return caught.value


def with_python(cluster: Cluster, python: str) -> Cluster:
    nodes = tuple(node.model_copy(update={"python": python}) if node.name == "node1" else node for node in cluster.nodes)
    return cluster.model_copy(update={"nodes": nodes})


def test_a_head_without_our_packages(cluster: Cluster, remote_lab: Lab) -> None:
    bare = remote_lab.folder / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    try:
        error = refusal(with_python(cluster, f"{bare}/bin/python"))
    finally:
        shutil.rmtree(bare)
    assert "fabric" in error.message and "pydantic" in error.message and "node1" in error.where
    assert f"{bare}/bin/python -m pip install" in error.hint and "fabric>=3.2" in error.hint and error.hint.startswith("ssh ")


def test_a_head_without_a_key_to_the_others(cluster: Cluster, remote_lab: Lab) -> None:
    error = refusal(cluster)
    assert "node1 does not reach node2" in error.message and "from node node1 to node2" in error.where
    make, add = error.hint.split("; or keep it")[0].split(" && ", 1)
    assert "ssh-keygen" in make and f"@{cluster.node('node1').host}" in make
    assert f"@{cluster.node('node2').host}" in add and "authorized_keys" in add
    assert not (Path(remote_lab.state.node("node1").workdir) / "supervised" / RUN).exists()
    # The half of the command that the practice nodes can obey (their sshd reads another file for what it lets in) does what it says.
    folder = Path(remote_lab.state.node("node1").home) / ".ssh"
    if remote_lab.state.backend == "namespaces":
        folder.mkdir(exist_ok=True)
        try:
            subprocess.run(make, shell=True, check=True, timeout=30)
            assert (folder / "id_ed25519.pub").read_text().startswith("ssh-ed25519 ")
        finally:
            shutil.rmtree(folder)


def test_what_the_head_is_told_of_the_others(own_hosts: Cluster, tmp_path: Path) -> None:
    here = Node(name="desk", host="local", lan_address="10.9.8.7", gpus=({"model": 'a "card"', "vram_gb": 8.5},))  # type: ignore[arg-type]
    cluster = own_hosts.model_copy(update={"nodes": (*own_hosts.nodes, here)})
    there = remote_supervisor.seen_from(cluster, "node1", {"node2": "127.0.0.9"})
    (tmp_path / "cluster.toml").write_text(cluster_text(there))
    read = load_cluster(tmp_path / "cluster.toml")
    node2 = cluster.node("node2")
    assert [node.model_dump() for node in read.nodes] == [node.model_dump() for node in there.nodes]
    assert read.known_hosts == str(tmp_path / "known_hosts")
    assert not [node.identity_file for node in read.nodes if node.identity_file]
    assert (read.node("node1").host, read.node("node2").host, read.node("desk").host) == (
        "local",
        node2.lan_address or "127.0.0.9",
        "10.9.8.7",
    )
    assert read.node("node2").user == node2.user and read.node("node2").port == node2.port and read.node("desk").user

    alone = remote_supervisor.seen_from(own_hosts, "node1", {})
    (tmp_path / "known_hosts").write_text(remote_supervisor.host_keys(own_hosts, alone))
    told = hostkeys.known(alone.model_copy(update={"known_hosts": str(tmp_path / "known_hosts")}))
    name = hostkeys.name_in_file(node2.host, node2.port)
    assert list(told) == [name] and dict(told[name]) == dict(hostkeys.known(own_hosts)[name])
    Path(str(own_hosts.known_hosts)).write_text("")
    with pytest.raises(HomelabError) as caught:
        remote_supervisor.host_keys(own_hosts, alone)
    assert caught.value.hint == "homelab trust node2"


def test_the_head_needs_what_the_controller_needs() -> None:
    project = tomllib.loads((Path(homelab.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert [*remote_supervisor.PACKAGES, "tomlkit>=0.13,<0.16", "pyyaml>=6.0"] == project["dependencies"], (
        "a supervisor writes no TOML and no YAML"
    )
    assert ">=" + ".".join(map(str, remote_supervisor.OLDEST_PYTHON)) == project["requires-python"]


@pytest.mark.parametrize(
    ("version", "lacks"),
    [
        ("2.14.3", ""),
        ("2.14", ""),
        ("3.0", ""),
        ("2.9.1", "pydantic is 2.9.1"),
        ("2.13.4", "pydantic is 2.13.4"),
        (None, "pydantic is not installed"),
    ],
)
def test_a_package_of_the_head_that_is_too_old(version: str | None, lacks: str) -> None:
    assert remote_supervisor._what_lacks("pydantic>=2.14", {"pydantic": version} if version else {}) == lacks
