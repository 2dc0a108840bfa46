"""Why a run is not recovered now, decided without any node: movement, too few nodes, no checkpoint; and one at a time."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.attempt import preconditions
from homelab.controller.attempt.progress import ProgressTracker
from homelab.controller.attempt.watchdog import AttemptVerdict
from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.config.recipe import parse_recipe
from homelab.controller.facts.reading import read
from homelab.controller.features.supervise import restart_policy
from homelab.controller.features.supervise.restart_policy import Failure
from homelab.controller.run import run_folder, store, supervisor_lock, supervisor_record
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.restart import Restart
from homelab.shared.protocol.run_messages import Reply
from homelab.shared.recipe import Recovery

pytestmark = pytest.mark.timeout(20)


def reply(step: int, phase: str = "training", *, age_s: float = 0.0, now_s: float = 1000.0) -> Reply:
    beat = {"time": now_s - age_s, "phase": phase, "step": step}
    run = {"name": "r", "attempt": 1, "agent_alive": True, "ranks": {"0": {"heartbeat": beat}}}
    return read(Reply, {"node": "tower", "time": now_s, "run": run})


def test_steps_that_go_on_are_seen() -> None:
    watch = ProgressTracker(step_s=1.0)
    for second, step in enumerate((7, 8, 9)):
        watch.see([reply(step)], float(second))
        assert not watch.moves, "a step or two may have been on their way"
    watch.see([reply(10)], 3.0)
    assert watch.moves and watch.step == 10


def test_ranks_that_stand_still_are_waited_for_only_as_long_as_a_step_may_take() -> None:
    watch = ProgressTracker(step_s=1.0)
    watch.see([reply(7)], 0.0)
    assert watch.wait_s == pytest.approx(5.0)
    watch.see([reply(7)], 4.0)
    assert watch.wait_s == pytest.approx(1.0) and not watch.moves
    watch.see([reply(7)], 5.5)
    assert watch.wait_s <= 0 and not watch.moves
    late = ProgressTracker(step_s=1.0)
    late.see([reply(7, age_s=30.0)], 0.0)
    assert late.wait_s <= 0, "it has stood still before anybody looked"


def test_a_clock_that_jumps_makes_nobody_wait_for_ever() -> None:
    watch = ProgressTracker(step_s=1.0)
    watch.see([reply(7, age_s=-3600.0)], 0.0)
    assert watch.wait_s == pytest.approx(5.0)
    watch.see([reply(7, age_s=-7200.0)], 6.0)
    assert watch.wait_s <= 0


def test_before_the_first_step_the_plan_says_how_long_to_look() -> None:
    watch = ProgressTracker(step_s=None, planned_s=100.0)
    watch.see([reply(0)], 0.0)
    assert watch.wait_s == pytest.approx(400.0)


def test_nobody_that_lives_is_nobody_that_moves() -> None:
    watch = ProgressTracker(step_s=None)
    watch.see([read(Reply, {"node": "tower", "time": 1.0})], 0.0)
    assert watch.wait_s == 0 and not watch.moves


def answer(good: tuple[int, ...] = (), bad: dict[str, str] | None = None, *, known: bool = True) -> dict[str, Any]:
    return {"good": good, "bad": bad or {}, "run_known": known}


def test_no_checkpoint_says_why() -> None:
    error = preconditions.no_checkpoint("r", {"a": answer(bad={"20": "optimizer.pt is missing"}), "b": answer()}, {"c": "its disk fails"})
    assert (
        "(c did not: its disk fails); none of the 1 that are there is complete" in error.message
        and "step 20 on a: optimizer.pt is missing" in error.where
    )
    assert error.hint.startswith("fix these nodes") and error.hint.endswith("homelab recover r --from-scratch")
    assert "no node knows this run" in preconditions.no_checkpoint("r", {"a": answer(known=False)}, {}).message
    assert "no node knows" not in preconditions.no_checkpoint("r", {"a": answer(known=False)}, {"b": "timed out"}).message
    many = preconditions.no_checkpoint("r", {"a": answer(bad={str(step): "x" for step in range(9)})}, {})
    assert "and 3 more" in many.where


def test_too_few_nodes_says_who_is_missing_and_where_the_number_is() -> None:
    recipe = parse_recipe({"script": {"path": "a.py"}, "recovery": {"min_nodes": 2}}, strict=False)
    preconditions.refuse_too_few(RunPaths(Path("runs/r")), recipe, ["a", "b"], {})
    with pytest.raises(HomelabError) as caught:
        preconditions.refuse_too_few(RunPaths(Path("runs/r")), recipe, ["a"], {"b": "it does not answer"})
    assert caught.value.message.startswith("1 node is left (a)") and "min_nodes is 2" in caught.value.message
    assert "runs/r/run.json" in caught.value.where and "b: it does not answer" in caught.value.where


def test_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_record, "_LOCK_S", 0.1)
    paths = RunPaths(tmp_path)
    with supervisor_record.exclusive(paths):
        assert supervisor_lock.is_held(paths)
        with pytest.raises(InputError, match="already working on this run"), supervisor_record.exclusive(paths):
            raise AssertionError
    assert not supervisor_lock.is_held(paths)
    paths.supervisor_json.write_text('{"pid": 7, "doing": "watching", "why": "attempt 1"}')
    with supervisor_lock.held(paths), pytest.raises(InputError, match="has a supervisor") as caught, supervisor_record.exclusive(paths):
        raise AssertionError
    assert "process 7" in caught.value.where and "kill 7" in caught.value.hint


@pytest.mark.parametrize(
    "text",
    [
        "[1",
        "[]",
        '{"restarts": 5, "step_s": "x", "attempt": []}',
        '{"restarts": [{"at": 1}]}',
        '{"restarts": [{"at": "x", "cause": "killed", "node": "b", "resume_step": 0}], "step_s": 1e999}',
    ],
)
def test_what_a_supervisor_left_half_written_is_not_passed_on(tmp_path: Path, text: str) -> None:
    paths = RunPaths(tmp_path)
    paths.supervisor_json.write_text(text)
    with supervisor_record.exclusive(paths):
        said = json.loads(paths.supervisor_json.read_text())
    assert (said["restarts"], said["step_s"], said["attempt"], said["doing"]) == ([], None, None, supervisor_record.DOING)


@pytest.mark.parametrize(("text", "names"), [('{"skipped": 5}', ()), ("[", ()), ('{"skipped": ["network.wifi", 5]}', ("network.wifi",))])
def test_what_was_skipped_is_read_as_far_as_it_is_whole(tmp_path: Path, text: str, names: tuple[str, ...]) -> None:
    paths = RunPaths(tmp_path)
    paths.checks_json.write_text(text)
    assert supervisor_record.skipped(paths) == names


def test_a_lock_that_cannot_be_had(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    store.write_json(paths.run_json, {})
    paths.supervisor_lock.mkdir()
    with pytest.raises(HomelabError, match="the lock of this run cannot be taken") as caught, supervisor_lock.held(paths):
        raise AssertionError
    assert f"mv {paths.supervisor_lock}" in caught.value.hint
    paths.supervisor_lock.rmdir()
    os.mkfifo(paths.supervisor_lock)
    assert not supervisor_lock.is_held(paths)
    with supervisor_lock.held(paths) as ours:
        assert ours and supervisor_lock.is_held(paths)


def test_restarts_that_were_made_are_remembered(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    made: dict[str, Any] = {"at": 1.0, "cause": "killed", "node": "a", "resume_step": 10}
    paths.supervisor_json.write_text(json.dumps({"restarts": [made], "step_s": 0.5, "attempt": 2}))
    with supervisor_record.exclusive(paths):
        pass
    known = supervisor_record.valid_history(json.loads(paths.supervisor_json.read_text()))["restarts"]
    assert [(entry["cause"], entry["node"]) for entry in known] == [("killed", "a")], "what halves a batch stays"
    settings = Recovery(max_restarts=1)
    failed = AttemptVerdict("exit", ("a",), because="killed")
    assert restart_policy.decide(Failure(failed), [Restart(**made)], settings, now=2.0, step=10, nodes=["a"]).kind == "give-up"
    assert (
        restart_policy.decide(Failure(failed), [Restart(**entry) for entry in known], settings, now=2.0e9, step=10, nodes=["a"]).kind
        == "go-on"
    )


def test_a_plan_of_another_run_or_attempt_is_none(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "r")
    plan = {
        "run": "r", "attempt": 1, "world_size": 1, "backend": "gloo", "device": "cpu", "precision": "fp32", "strategy": "ddp", "head": "a",
        "master_address": "10.0.0.1", "master_port": 29500, "resume_step": 0, "ranks": [], "nodes": [],
    }  # fmt: skip
    for number, value in ((1, plan), (2, plan), (3, plan | {"run": "copied", "attempt": 3})):
        paths.attempt(number).mkdir(parents=True)
        paths.plan_json(number).write_text(json.dumps(value))
    assert run_folder.plan_of(paths).attempt == 1 and run_folder.attempts(paths) == [3, 2, 1]
    paths.plan_json(1).unlink()
    with pytest.raises(HomelabError, match="it has no readable plan"):
        run_folder.plan_of(paths)


def test_a_model_that_scores_is_not_asked_for_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = {
        kind: parse_recipe(
            {
                "model": {"name": "/models/tiny"}, "data": {"train": "pairs.jsonl"}, "method": {"kind": "lora"}, "objective": {"kind": kind},
                "train": {"global_batch": 2, "epochs": 1, "learning_rate": 1e-4, "seq_len": 64},
            }
        )
        for kind in ("dpo", "reward")
    }  # fmt: skip
    paths = RunPaths(tmp_path / "r")
    for kind in recipes:
        monkeypatch.setattr(run_folder, "description_of", lambda _paths, kind=kind: run_folder.Description({}, recipes[kind]))
        if kind == "dpo":
            run_folder.refuse_scores(paths)
            continue
        with pytest.raises(InputError) as error:
            run_folder.refuse_scores(paths)
        assert "homelab fetch r" in str(error.value.hint) and "AutoModelForSequenceClassification" in str(error.value.hint)
