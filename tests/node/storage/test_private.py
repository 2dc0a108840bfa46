"""Nobody else reads the runs and the data of a person, on a node or on the controller, whatever umask and modes were before."""

from __future__ import annotations

import hashlib
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from homelab.node import paths, verbs
from homelab.node.storage import transfer

DATA = b"rows"
DIGEST = hashlib.sha256(DATA).hexdigest()


@pytest.fixture(autouse=True, params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def is_private(path: Path) -> bool:
    return mode(path) & 0o077 == 0


def test_what_is_sent_to_a_node_is_the_persons_own(tmp_path: Path) -> None:
    workdir = tmp_path / "work" / "homelab"
    request = {"workdir": str(workdir), "node": "a", "sha256": DIGEST, "name": "rows.jsonl", "size": len(DATA)}
    verbs.call("receive-file", request, io.BytesIO(DATA), io.BytesIO())
    place = Path(transfer.data_path(str(workdir), request))
    assert place.read_bytes() == DATA and is_private(place)
    assert all(is_private(folder) for folder in (workdir, workdir / "data", workdir / "runs"))


@pytest.mark.parametrize("verb", ["runs", "checkpoints", "describe", "poll"])
def test_folders_of_older_versions_are_closed_by_whatever_is_asked(tmp_path: Path, verb: str) -> None:
    workdir = tmp_path / "homelab"
    folders = [workdir, workdir / "runs", workdir / "data"]
    for folder in (*folders, workdir / "runs" / "r"):
        folder.mkdir()
        folder.chmod(0o777)
    of_run = {} if verb == "runs" else {"run": "r"}
    verbs.call(verb, {"workdir": str(workdir), "node": "a", **of_run}, io.BytesIO(), io.BytesIO())
    assert all(is_private(folder) for folder in folders)


def test_a_home_and_a_folder_of_everybody_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, shared = tmp_path / "home", tmp_path / "tmp"
    for folder, bits in ((home, 0o755), (shared, 0o1777)):
        (folder / "runs").mkdir(parents=True)
        folder.chmod(bits)
        (folder / "runs").chmod(0o755)
    monkeypatch.setenv("HOME", str(home))
    paths.keep_private("~")
    paths.keep_private(str(shared))
    assert (mode(home), mode(shared)) == (0o755, 0o1777)
    assert is_private(home / "runs") and is_private(shared / "runs")


def test_the_folder_of_a_run_on_the_controller(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    name = store.take_name(runs, "demo", 0.0, set())
    assert is_private(runs) and is_private(runs / name)
    adopted = RunPaths(tmp_path / "other" / "r")
    store.write_json(adopted.run_json, {})
    assert is_private(adopted.root)
    adopted.root.chmod(0o755)
    assert [found.name for found in store.runs_in(adopted.root.parent)] == ["r"] and is_private(adopted.root)
