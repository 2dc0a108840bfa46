"""One lab of two nodes for the whole folder: real sshd, host keys of their own."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from homelab.controller.config.cluster import Cluster
from homelab.controller.config.load import load_cluster
from homelab.lab import Lab


@pytest.fixture(scope="session")
def remote_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab.up(tmp_path_factory.mktemp("remote") / "lab", nodes=2) as started:
        yield started


@pytest.fixture
def cluster(remote_lab: Lab) -> Cluster:
    return load_cluster(remote_lab.cluster_file)


@pytest.fixture
def own_hosts(cluster: Cluster, tmp_path: Path) -> Cluster:
    """The cluster with a known_hosts file that the test may change."""
    assert cluster.known_hosts
    copy = tmp_path / "known hosts"
    shutil.copy(cluster.known_hosts, copy)
    return cluster.model_copy(update={"known_hosts": str(copy)})


@pytest.fixture
def shell_of(remote_lab: Lab) -> Callable[[str, str], object]:
    """`with shell_of(node, shell):` another login shell. Needs a node with its own /etc/passwd."""

    @contextmanager
    def change(node: str, shell: str) -> Iterator[None]:
        if remote_lab.state.backend != "namespaces":
            pytest.skip("the nodes share this machine's accounts")
        if shutil.which(shell) is None:
            pytest.skip(f"not installed: {shell}")
        target = remote_lab.state.node(node)
        file = remote_lab.state.node_folder(target) / "etc" / "passwd"
        before = file.read_text()
        lines = [line.split(":") for line in before.splitlines()]
        for fields in lines:
            if fields[0] == target.user:
                fields[6] = str(shutil.which(shell))
        file.write_text("".join(":".join(fields) + "\n" for fields in lines))  # in place: it is bound into the node
        try:
            yield
        finally:
            file.write_text(before)

    return change
