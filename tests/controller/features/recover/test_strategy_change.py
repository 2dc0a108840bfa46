"""A run that began with one strategy goes on with another that a person names; the recipe in run.json, and so the training, is as it was."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from homelab.cli.recover import command
from homelab.controller.attempt import inputs, start
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import HomelabError, InputError, UnreachableError
from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.recipe import Recipe
from homelab.controller.features.preflight import gather
from homelab.controller.features.recover import examine, halt, recover_run, resume, resume_guards, strategy_change
from homelab.controller.features.recover.examine import Examination
from homelab.controller.features.recover.halt import Halted
from homelab.controller.features.recover.recover_run import RecoverRequest
from homelab.controller.features.recover.replicas import ResumePoint
from homelab.controller.features.recover.resume import NextAttempt
from homelab.controller.planning.memory import freed
from homelab.controller.planning.types import Plan
from homelab.controller.run import claims, event_log, run_lookup, run_record
from homelab.controller.run.claims import Claim, ClaimedRun
from homelab.shared.recipe.parallel import STRATEGY_NAMES
from tests import builders
from tests.controller.checks import healthy
from tests.fakes import FakeFleet

NAMES = list(builders.NAMES)
TRAIN = builders.SECTIONS["train"]


class Resuming:
    """The attempts of one run, made by the real planner from healthy nodes; what would be started is kept in `plans`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe, seen: Evidence) -> None:
        self.fleet = FakeFleet(folder / "nodes")
        self.paths = builders.run_folder(folder / "runs", recipe=recipe, plan=builders.plan(strategy="zero2"), recipe_hash=None)
        self.plans: list[Plan] = []
        self.sent: list[str] = []
        self.refuses = False
        items: list[RecipeInput] = []
        monkeypatch.setattr(inputs, "of_run", lambda *_: items)
        monkeypatch.setattr(gather, "evidence", lambda *_, **__: seen)
        monkeypatch.setattr(gather, "facts", lambda *_, **__: seen)
        monkeypatch.setattr(registry, "judge_all", lambda *_, **__: [])
        monkeypatch.setattr(resume_guards, "refuse_other_model", lambda *_: None)
        monkeypatch.setattr(start, "start", self._start)

    def _start(self, fleet: Any, claim: Any, plan: Plan, recipe: Any, run_json: Any, *_: Any) -> None:
        if self.refuses:
            raise UnreachableError("no route to host", where="node laptop", hint="wake it")
        self.plans.append(plan)
        self.sent.append(run_record.digest(run_json))

    def resume(self, strategy: str | None = None) -> Plan:
        run = ClaimedRun(self.fleet, Claim(self.fleet, self.paths.name, "recovered", lambda: 0.0), self.paths, lambda text: None)
        halted = Halted(NAMES, {}, ResumePoint(0, []))
        return resume.resume(run, Examination(1, "failed", None, {}), halted, NextAttempt(NAMES, (), strategy=strategy))

    def notes(self) -> list[str]:
        return [line["text"] for line in event_log.lines(self.paths) if line["event"] == "note"]


def resuming(folder: Path, monkeypatch: pytest.MonkeyPatch, **sections: Any) -> Resuming:
    recipe = healthy.recipe(**{"parallel": {"strategy": "zero2"}, **sections})
    return Resuming(folder, monkeypatch, recipe, healthy.cpu(recipe))


@pytest.mark.parametrize("strategy", ["ddp", "zero3", "pipeline"])
def test_this_attempt_and_all_later_ones_have_the_strategy_and_no_record_is_edited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    run = resuming(tmp_path, monkeypatch)
    before = run.paths.run_json.read_bytes()
    assert run.resume().strategy == "zero2" and run.notes() == []
    assert run.resume(strategy).strategy == strategy
    assert run.notes() == [f"strategy zero2 -> {strategy}, by hand"]
    assert run.resume().strategy == strategy, "a supervisor's recovery names none"
    assert run.notes() == [f"strategy zero2 -> {strategy}, by hand"]
    assert [plan.strategy_by_hand for plan in run.plans] == [None, strategy, strategy], "the nodes have it, for another controller"
    assert run.paths.run_json.read_bytes() == before and len(set(run.sent)) == 1
    assert run.resume("auto").strategy == "ddp"
    assert run.notes()[1:] == [
        "strategy ddp as before, by hand (auto)" if strategy == "ddp" else f"strategy {strategy} -> ddp, by hand (auto)"
    ]


def test_a_start_that_failed_leaves_the_strategy_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = resuming(tmp_path, monkeypatch)
    run.refuses = True
    with pytest.raises(UnreachableError):
        run.resume("pipeline")
    assert run.notes() == []
    run.refuses = False
    assert run.resume().strategy == "zero2"


REFUSED = {
    "a pipeline and adapters on the ends alone": (
        "pipeline",
        {"method": {"kind": "lora", "targets": ["embed_tokens", "lm_head"]}},
        "pipeline",
    ),
    "8-bit states": ("zero2", {"train": {**TRAIN, "optimizer": "adamw_8bit"}, "parallel": {"strategy": "ddp"}}, "zero2"),
    "compressed gradients": ("zero2", {"parallel": {"strategy": "ddp", "compress": "bf16"}}, "compress"),
    "machines of one card each": ("hsdp", {}, "hsdp"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_that_cannot_train_this_is_refused_before_anything_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    strategy, sections, said = REFUSED[case]
    run = resuming(tmp_path, monkeypatch, **sections)
    files = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError) as caught:
        strategy_change.refuse_impossible(run.fleet, run.paths, strategy, (), lambda text: None)
    error = caught.value
    assert said in error.message and f"--strategy {strategy}" in error.where
    assert run.fleet.asked == [] and sorted(tmp_path.rglob("*")) == files and run.plans == []
    other = str(error.hint).rsplit(" ", 1)[1]
    assert other in STRATEGY_NAMES and other != strategy
    strategy_change.refuse_impossible(run.fleet, run.paths, other, (), lambda text: None)
    assert run.resume(other).strategy_by_hand == other


def with_room(run: Resuming, monkeypatch: pytest.MonkeyPatch, gib: float, *, alive: tuple[str, ...] = (), micro_batch: int = 64) -> None:
    """Every node has this much memory free; these runs are alive there."""
    recipe = healthy.recipe(parallel={"strategy": "ddp", "micro_batch": micro_batch})
    run.paths = builders.run_folder(run.paths.root.parent, recipe=recipe, plan=builders.plan(strategy="ddp"), recipe_hash=None)
    seen = healthy.cpu(recipe)
    for name in NAMES:
        seen = healthy.with_facts(seen, name, system={"memory_available_bytes": int(gib * healthy.GIB)}, runs={"alive": list(alive)})
    monkeypatch.setattr(gather, "facts", lambda *_, **__: seen)


@pytest.mark.parametrize(("gib", "said"), [(1.45, "so: homelab recover"), (0.1, "no other strategy has room")])
def test_no_room_with_it_is_said_before_anything_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: float, said: str) -> None:
    run = resuming(tmp_path, monkeypatch)
    with_room(run, monkeypatch, gib)
    with pytest.raises(InputError, match="cannot continue with this strategy") as caught:
        strategy_change.refuse_impossible(run.fleet, run.paths, "pipeline", (), lambda text: None)
    assert said in str(caught.value.hint) and "nothing was stopped" in caught.value.where and run.fleet.asked == []
    with_room(run, monkeypatch, gib, alive=("another",))
    with pytest.raises(InputError, match="cannot continue with this strategy"):
        strategy_change.refuse_impossible(run.fleet, run.paths, "pipeline", (), lambda text: None)
    with_room(run, monkeypatch, gib, alive=(run.paths.name,))  # what it holds itself is free when it is ended
    strategy_change.refuse_impossible(run.fleet, run.paths, "pipeline", (), lambda text: None)


def test_a_batch_that_fits_nowhere_is_no_room_unless_the_person_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan can be made, and its ranks would run out of memory."""
    run = resuming(tmp_path, monkeypatch)
    with_room(run, monkeypatch, 1.3)
    with pytest.raises(HomelabError, match=r"rank 0 on .* lacks 0\.\d GB"):
        strategy_change.refuse_impossible(run.fleet, run.paths, "ddp", (), lambda text: None)
    strategy_change.refuse_impossible(run.fleet, run.paths, "ddp", ("fit.memory",), lambda text: None)


def test_what_a_run_holds_of_a_card_counts_as_free(tmp_path: Path) -> None:
    own, other = {"pid": 7, "run": "r", "memory_bytes": 5 * healthy.GIB}, {"pid": 8, "run": "s", "memory_bytes": 2 * healthy.GIB}
    total = healthy.gpu().facts["tower"].gpu.cards[0].memory_total_bytes
    assert total is not None

    def free(*holders: dict[str, Any], alive: tuple[str, ...] = ("r",)) -> int | None:
        used = 8 * healthy.GIB
        seen = healthy.card(healthy.gpu(), "tower", memory_used_bytes=used, memory_free_bytes=total - used, holders=list(holders))
        facts = freed.without_run(healthy.with_facts(seen, "tower", runs={"alive": list(alive)}).facts["tower"], "r")
        return facts.gpu.cards[0].free_bytes

    assert free(own, other) == total - 3 * healthy.GIB and free(other) == total - 8 * healthy.GIB
    assert free({**own, "memory_bytes": None}, other) == free() == total
    assert free(alive=()) == total - 8 * healthy.GIB


@pytest.mark.parametrize("strategy", ["zero2", "pipeline"])
def test_a_program_of_ones_own_divides_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    run = Resuming(tmp_path, monkeypatch, healthy.script(), healthy.cpu(healthy.script()))
    with pytest.raises(HomelabError, match="brings its own way"):
        strategy_change.refuse_impossible(run.fleet, run.paths, strategy, (), lambda text: None)


@pytest.mark.parametrize(("typed", "meant"), [("zero", "zero"), ("pipelin", "pipeline"), ("DDP", ""), ("", "")])
def test_a_name_that_no_strategy_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, meant: str) -> None:
    """Before the cluster file is looked at."""
    with pytest.raises(InputError) as caught:
        strategy_change.refuse_unknown(typed, "r")
    assert all(name in caught.value.where for name in STRATEGY_NAMES) and str(caught.value.hint) == "homelab recover r --strategy auto"
    assert f'Did you mean "{meant}' in caught.value.message if meant else "Did you mean" not in caught.value.message


def test_a_plan_from_a_node_names_no_other_strategy(tmp_path: Path) -> None:
    plan = builders.plan().model_dump(mode="json")
    assert run_record.plan_in(plan | {"strategy_by_hand": "zero3"}, plan["run"], 1) is not None
    assert run_record.plan_in(plan | {"strategy_by_hand": "; rm"}, plan["run"], 1) is None


@pytest.mark.parametrize("is_possible", [False, True])
def test_the_command_asks_for_the_plan_before_it_halts_and_starts_with_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_possible: bool
) -> None:
    run = resuming(tmp_path, monkeypatch, parallel={"strategy": "ddp", **({} if is_possible else {"compress": "bf16"})})
    halted: list[str] = []

    def halt_(*_: Any, **__: Any) -> Halted:
        halted.append("halted")
        return Halted(NAMES, {}, ResumePoint(0, []))

    claim = Claim(run.fleet, run.paths.name, "recovered", lambda: 0.0)
    monkeypatch.setattr(run_lookup, "run", lambda *_: run.paths)
    monkeypatch.setattr(recover_run, "_refuse_supervised", lambda *_: None)
    monkeypatch.setattr(claims, "claimed", lambda *_, **__: nullcontext(claim))
    monkeypatch.setattr(examine, "examine", lambda *_: Examination(1, "failed", None, {}))
    monkeypatch.setattr(halt, "halt", halt_)
    view = MagicMock()
    request = RecoverRequest(None, NAMES, tmp_path / "cluster.toml", run.paths.root.parent, (), "no", strategy="zero2")
    if is_possible:
        recover_run.recover_run(run.fleet, request, view)
        assert halted and [plan.strategy for plan in run.plans] == ["zero2"]
        assert view.resumed.call_args.args[0].strategy == "strategy zero2 as before, by hand"
    else:
        with pytest.raises(InputError, match="cannot continue with this strategy"):
            recover_run.recover_run(run.fleet, request, view)
        assert not halted and not run.plans


def test_what_is_typed_is_what_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[RecoverRequest] = []
    monkeypatch.setattr(recover_run, "recover_run", lambda fleet, request, view: asked.append(request))
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('[[nodes]]\nname = "a"\nhost = "127.0.0.1"\nport = 1\n')
    assert command("r", cluster, strategy="zero3", runs_dir=tmp_path) == 0 and asked[0].strategy == "zero3"
    with pytest.raises(InputError, match="zero3"):
        command("r", cluster, strategy="zero33", runs_dir=tmp_path)
    assert len(asked) == 1
