"""The next attempt: of the training that began, on the nodes that are well, with what memory allows."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from homelab.controller.base.errors import BusyError, HomelabError
from homelab.controller.base.hint import Hint
from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Finding
from homelab.controller.config.recipe import Recipe
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.features.preflight import gather
from homelab.controller.features.recover import examine, halt, recover_run, resume
from homelab.controller.features.recover.examine import Examination
from homelab.controller.features.recover.halt import Halted
from homelab.controller.features.recover.replicas import ResumePoint
from homelab.controller.features.recover.resume import NextAttempt
from homelab.controller.run import claims, run_lookup, supervisor_record
from homelab.controller.run.claims import Claim, ClaimedRun
from homelab.controller.run.restart import Restart, halvings
from tests import builders
from tests.controller.features.recover.test_strategy_change import NAMES, resuming
from tests.fakes import FakeFleet

HALTED = Halted(
    ["tower", "laptop"], {"oldtower": "no route to host"}, ResumePoint(40, ["tower"], "ab12", notes=("checkpoint 50 is not used",))
)


class Asked(Exception):
    """The nodes were asked; what follows is of no interest."""


@pytest.mark.parametrize(("begun", "precision"), [("auto", "bf16"), ("fp32", "fp32")])
def test_it_goes_on_as_the_training_that_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: str, precision: str) -> None:
    """What "auto" came to in the first attempt stays, whatever the nodes of this one could do."""
    recipe = builders.recipe(train={**builders.SECTIONS["train"], "precision": begun})
    paths = builders.run_folder(tmp_path, recipe=recipe, plan=builders.plan(precision="bf16"))
    fleet = FakeFleet(tmp_path / "nodes")
    asked: list[Recipe] = []

    def evidence(*_: Any, recipe: Recipe, **__: Any) -> Any:
        asked.append(recipe)
        raise Asked

    monkeypatch.setattr(gather, "evidence", evidence)
    run = ClaimedRun(fleet, Claim(fleet, paths.name, "recovered", lambda: 0.0), paths, lambda text: None)
    with pytest.raises(Asked):
        resume.resume(run, Examination(1, "failed", None, {}), HALTED, NextAttempt(["tower", "laptop"], ()))
    assert asked[0].train is not None and asked[0].train.precision == precision


@pytest.mark.parametrize(("is_busy", "raised"), [(True, BusyError), (False, HomelabError)])
def test_where_all_nodes_have_other_work_that_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_busy: bool, raised: type[HomelabError]
) -> None:
    """A game on the only card, at the hour at which a job of the queue goes on: nothing is wrong with it."""
    paths = builders.run_folder(tmp_path, plan=builders.plan())
    fleet = FakeFleet(tmp_path / "nodes")
    findings = [
        Finding("cards.memory", name, "warn" if is_busy else "fail", "4 GB are free", is_busy=is_busy) for name in ("tower", "laptop")
    ]
    monkeypatch.setattr(registry, "judge_all", lambda *_, **__: findings)
    monkeypatch.setattr(gather, "evidence", lambda *_, **__: SimpleNamespace(facts={"tower": None, "laptop": None}))
    run = ClaimedRun(fleet, Claim(fleet, paths.name, "recovered", lambda: 0.0), paths, lambda text: None)
    with pytest.raises(HomelabError, match="no node is healthy enough") as error:
        resume.resume(run, Examination(1, "failed", None, {}), HALTED, NextAttempt(["tower", "laptop"], ()))
    assert type(error.value) is raised


def test_a_node_whose_memory_ran_out_takes_fewer_rows_at_a_time() -> None:
    ranks = [builders.rank_plan(0, "tower", micro_batch=8, token_cap=1000), builders.rank_plan(1, "laptop", micro_batch=8, token_cap=1000)]
    adjusted = resume.adjusted(builders.plan(ranks), builders.plan(), HALTED, {}, {"laptop": 2})
    assert [(rank.micro_batch, rank.token_cap) for rank in adjusted.ranks] == [(8, 1000), (2, 250)]
    assert [rank.share for rank in adjusted.ranks] == [rank.share for rank in ranks], "the gradient is the same"


def test_the_plan_says_who_is_left_out_and_why() -> None:
    absent = {"oldtower": "no route to host", "stranger": "--nodes does not name it"}
    adjusted = resume.adjusted(builders.plan(), builders.plan(), HALTED, absent, {})
    assert adjusted.left_out == ("oldtower",), "the stranger took no part before"
    assert adjusted.left_out_because == absent
    assert adjusted.resume_digest == "ab12"
    assert adjusted.warnings[-2:] == ("checkpoint 50 is not used", "oldtower is left out: no route to host")


def test_a_recovery_by_hand_halves_the_micro_batch_where_memory_ran_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor had halved it once, and gave up when memory ran out again; the next supervisor goes on from there."""
    run = resuming(tmp_path, monkeypatch)
    asked: list[NextAttempt] = []
    laptop, tower = NAMES[-1], NAMES[0]
    ends = [Restart(7.0, "oom-killer", laptop, 40), Restart(8.0, "killed", tower, 40)]
    run.paths.supervisor_json.write_text(json.dumps({"restarts": [asdict(end) for end in ends], "attempt": 1}))
    diagnosis = Diagnosis(cause="cuda-out-of-memory", title="full", first_node=laptop, first_rank=1, hint=Hint("look"), retryable=True)
    real = resume.resume

    def resume_(*arguments: Any, **options: Any) -> Any:
        asked.append(arguments[3])
        return real(*arguments, **options)

    monkeypatch.setattr(run_lookup, "run", lambda *_: run.paths)
    monkeypatch.setattr(recover_run, "_refuse_supervised", lambda *_: None)
    monkeypatch.setattr(claims, "claimed", lambda *_, **__: nullcontext(Claim(run.fleet, run.paths.name, "recovered", lambda: 0.0)))
    monkeypatch.setattr(examine, "examine", lambda *_: Examination(1, "failed", diagnosis, {}))
    monkeypatch.setattr(halt, "halt", lambda *_, **__: Halted(NAMES, {}, ResumePoint(0, [])))
    monkeypatch.setattr(resume, "resume", resume_)
    request = recover_run.RecoverRequest(None, NAMES, tmp_path / "cluster.toml", run.paths.root.parent, (), "no")
    recover_run.recover_run(run.fleet, request, MagicMock())
    assert [next_attempt.halvings for next_attempt in asked] == [{laptop: 2}]
    kept = supervisor_record.valid_history(json.loads(run.paths.supervisor_json.read_text()), 2)["restarts"]
    assert halvings(Restart(**entry) for entry in kept) == {laptop: 2} and {entry["at"] for entry in kept} == {0.0}
