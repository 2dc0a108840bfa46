"""The code that goes to the nodes: packed only for a node that lacks it, once for all of them, and always what its name says."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from time import sleep

import pytest

from homelab.controller.config.cluster import Cluster
from homelab.controller.remote import ship
from homelab.controller.remote.agent import connect
from homelab.controller.remote.ship import Parcel
from homelab.shared.protocol.code import code_digest


def test_a_node_that_has_the_code_is_asked_without_packing_it(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing costs more than all else that a command does on this machine."""
    made: list[int] = []
    tar = ship.tar

    def counted(files: Mapping[str, bytes], *, mode: int) -> bytes:
        made.append(len(files))
        return tar(files, mode=mode)

    node = cluster.node("node1")
    node = node.model_copy(update={"workdir": f"{node.workdir} for packing"})
    monkeypatch.setattr(ship, "tar", counted)
    for packed in (1, 0):
        made.clear()
        monkeypatch.setattr(ship, "CODE", Parcel(ship.CODE.names))  # as a command that has just begun
        agent = connect(cluster, node)
        try:
            assert agent.ask("facts", {"peers": []})["node"] == "node1"
        finally:
            agent.close()
        assert len(made) == packed


def test_threads_that_ask_at_once_have_it_made_once() -> None:
    listed: list[int] = []
    together = Barrier(8)

    def names() -> list[str]:
        listed.append(1)
        sleep(0.1)
        return ["__init__.py"]

    parcel = Parcel(names)

    def ask(_: int) -> tuple[str, int]:
        together.wait(10)
        return parcel.content_hash(), id(parcel.archive())

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(ask, range(8)))) == 1
    assert len(listed) == 1


def test_a_file_that_changes_meanwhile_is_sent_as_its_name_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor names the code today and sends it to a node that comes back tomorrow, after `git pull`."""
    monkeypatch.setattr(ship, "_ROOT", tmp_path)
    (tmp_path / "module.py").write_text("old")
    parcel = Parcel(lambda: ["module.py"])
    name = parcel.content_hash()
    (tmp_path / "module.py").write_text("new")
    with tarfile.open(fileobj=io.BytesIO(parcel.archive())) as archive:
        packed = archive.extractfile("homelab/module.py")
        assert packed is not None and code_digest([("module.py", packed.read())]) == name
