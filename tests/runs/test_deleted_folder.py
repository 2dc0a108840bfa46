"""Somebody deletes the run's folder while its supervisor is at work: that supervisor is known, is the only one, and goes on."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.control import find, supervise, watch
from homelab.control.supervise import Supervisor
from homelab.errors import HomelabError
from homelab.runs import lock, store
from homelab.runs.paths import RunPaths
from homelab.runs.watchdog import Verdict
from tests.runs.test_damage import PLAN

pytestmark = pytest.mark.timeout(60)
RECIPE = {"model": {"name": "m"}, "data": {"train": "d.jsonl"}, "method": {"kind": "lora"}, "train": {"global_batch": 4, "steps": 3, "learning_rate": 1e-4, "seq_len": 8}}
RUN_JSON = {"recipe": RECIPE, "data": {"train": None, "eval": None}}
HOLD = """
import sys; from pathlib import Path; from homelab.runs import lock; from homelab.runs.paths import RunPaths
with lock.held(RunPaths(Path(sys.argv[1]))) as ours:
    print(ours, flush=True); sys.stdin.read()
"""


@contextlib.contextmanager
def holder(paths: RunPaths) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(paths.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"True\n"
        yield
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    made = RunPaths(tmp_path / "runs" / "r")
    made.root.mkdir(parents=True)
    return made


class Fleet:
    """One node that has the run, or knows nothing of it."""

    def __init__(self, *_: Any, knows: bool = True) -> None:
        self._knows = knows

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None: ...

    def ask(self, verb: str, *_: Any, **__: Any) -> Any:
        assert verb == "describe"
        return {"a": {"run_json": RUN_JSON, "plans": {1: PLAN}} if self._knows else {"run_json": None, "plans": {}}}, {}


def test_its_supervisor_is_known_and_stays_the_only_one(paths: RunPaths) -> None:
    with holder(paths):
        shutil.rmtree(paths.root)
        assert lock.is_held(paths), "where nothing is there yet"
        paths.root.mkdir()
        with lock.held(paths) as ours:
            assert not ours, "the new file is another lock"
        assert lock.is_held(paths), "beside the new file, too"
        other = RunPaths(paths.root.parent / "other")
        other.root.mkdir()
        assert not lock.is_held(other)
    with lock.held(paths) as ours:
        assert ours


def test_status_does_not_say_that_it_is_gone(paths: RunPaths) -> None:
    seen = object.__new__(watch.Watcher)
    seen._paths = paths
    with holder(paths):
        shutil.rmtree(paths.root)
        assert seen._supervisor({}) == "watching"
        store.write_json(paths.supervisor_json, {"doing": "recovering", "why": "rank 1 is gone"})
        assert seen._supervisor({}) == "recovering: rank 1 is gone"
    assert seen._supervisor({}) == ""


def test_the_folder_is_made_whole_from_the_nodes(paths: RunPaths) -> None:
    find.mend(Fleet(), paths, lambda text: None)  # type: ignore[arg-type]
    assert find.is_whole(paths) and json.loads(paths.run_json.read_text()) == RUN_JSON
    shutil.rmtree(paths.root)
    with pytest.raises(HomelabError, match="no node that answers has it"):
        find.mend(Fleet(knows=False), paths, lambda text: None)  # type: ignore[arg-type]


def test_a_recovery_begins_with_that(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = find._plan_in(PLAN, "r", 1)
    assert plan is not None
    ours = object.__new__(Supervisor)
    ours._paths, ours._say, ours._cluster = paths, lambda text: None, None  # type: ignore[assignment]
    ours._noticed_at = 1.0
    known: list[bool] = []

    class Followers:
        def letting_go(self, fleet: Any) -> Any:
            return contextlib.nullcontext()

    def once(*_: Any) -> bool:
        known.append(find.is_whole(paths))
        return True

    monkeypatch.setattr(supervise, "Fleet", Fleet)
    monkeypatch.setattr(ours, "_write", lambda *_: None)
    monkeypatch.setattr(ours, "_examine", lambda *_: object())
    monkeypatch.setattr(ours, "_once", once)
    shutil.rmtree(paths.root)
    assert ours._recover(plan, Verdict("exit", because="a rank is gone"), frozenset(), Followers())  # type: ignore[arg-type]
    assert known == [True], "all nodes have it: it is no reason to wait"
