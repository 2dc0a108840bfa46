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

from homelab.controller.attempt import run_owner
from homelab.controller.attempt.watchdog import AttemptVerdict
from homelab.controller.base.errors import HomelabError
from homelab.controller.config.recipe import parse_recipe
from homelab.controller.features.recover import examine
from homelab.controller.features.recover.examine import Examination
from homelab.controller.features.supervise import recovery_try
from homelab.controller.features.supervise.acts import Incident
from homelab.controller.features.supervise.recovery_try import RecoveryTry, Supervised
from homelab.controller.run import run_folder, store, supervisor_lock
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.run_record import plan_in
from tests import builders
from tests.controller.run.test_damage import PLAN

pytestmark = pytest.mark.timeout(60)
RECIPE = {
    "model": {"name": "m"},
    "data": {"train": "d.jsonl"},
    "method": {"kind": "lora"},
    "train": {"global_batch": 4, "steps": 3, "learning_rate": 1e-4, "seq_len": 8},
}
RUN_JSON = {"schema": 1, "moment": builders.MOMENT, "rows": 2, "recipe": RECIPE, "data": {"train": None, "eval": None}}
HOLD = """
import sys; from pathlib import Path; from homelab.controller.run import supervisor_lock; from homelab.controller.run.paths import RunPaths
with supervisor_lock.held(RunPaths(Path(sys.argv[1]))) as ours:
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
        assert supervisor_lock.is_held(paths), "where nothing is there yet"
        paths.root.mkdir()
        with supervisor_lock.held(paths) as ours:
            assert not ours, "the new file is another lock"
        assert supervisor_lock.is_held(paths), "beside the new file, too"
        other = RunPaths(paths.root.parent / "other")
        other.root.mkdir()
        assert not supervisor_lock.is_held(other)
    with supervisor_lock.held(paths) as ours:
        assert ours


def test_status_does_not_say_that_it_is_gone(paths: RunPaths) -> None:
    with holder(paths):
        shutil.rmtree(paths.root)
        assert run_owner.of_run(paths, 1, {}, {}).doing == "watching"
        store.write_json(paths.supervisor_json, {"doing": "recovering", "why": "rank 1 is gone"})
        assert run_owner.of_run(paths, 1, {}, {}).doing == "recovering: rank 1 is gone"
    assert run_owner.of_run(paths, 1, {}, {}).doing == ""


def test_the_folder_is_made_whole_from_the_nodes(paths: RunPaths) -> None:
    run_folder.repair(Fleet(), paths, lambda text: None)  # type: ignore[arg-type]
    assert run_folder.is_whole(paths) and json.loads(paths.run_json.read_text()) == RUN_JSON
    shutil.rmtree(paths.root)
    with pytest.raises(HomelabError, match="no node that answers has it"):
        run_folder.repair(Fleet(knows=False), paths, lambda text: None)  # type: ignore[arg-type]


def test_a_recovery_begins_with_that(paths: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_in(PLAN, "r", 1)
    assert plan is not None
    whole_when_asked: list[bool] = []

    class Streams:
        def letting_go(self, fleet: Any) -> Any:
            return contextlib.nullcontext()

    def examined(*_: Any) -> Examination:
        whole_when_asked.append(run_folder.is_whole(paths))
        return Examination(1, "a rank is gone", None, {})

    run = Supervised(None, paths, parse_recipe(RECIPE), [], ())  # type: ignore[arg-type]
    ours = RecoveryTry(run, plan, Streams(), lambda text: None, 0.0)  # type: ignore[arg-type]
    monkeypatch.setattr(recovery_try, "Fleet", Fleet)
    monkeypatch.setattr(examine, "examine_failure", examined)
    shutil.rmtree(paths.root)
    ours.examine(Incident(AttemptVerdict("exit", because="a rank is gone"), 0.0, frozenset()))
    assert whole_when_asked == [True], "all nodes have it: it is no reason to wait"
