"""A run that is well is no fault of a node: every check beside it says what it does, and nothing offers to end it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.units import local_moment
from homelab.controller.checks import presentation, registry
from homelab.controller.checks.evidence import Evidence, Finding
from homelab.controller.features.launch import prepare
from homelab.controller.features.preflight import gather, preflight
from homelab.controller.run import process_owner
from tests.controller.checks import healthy
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(20)
RUN = "2026-11-20-2210-demo"
NOW = 1_800_000_000.0
TRAINS = {"phase": "training", "step": 120, "total_steps": 800, "step_s": 10.0, "still_s": 1.0}
PORT = {"free": False, "holder": "python -m torch.distributed.run", "holder_pid": 4711, "holder_run": RUN}
HOLDS = {
    "memory_used_bytes": 7 * healthy.GIB,
    "holders": [{"pid": 4711, "program": "pt_main_thread", "run": RUN, "type": "C", "ours": True}],
}
WELL: dict[str, dict[str, Any]] = {
    "trains": TRAINS, "loads": {"phase": "loading", "still_s": 300.0}, "has just begun": {}, "a program of one's own": {"has_ended": False},
    "is recovered": {**TRAINS, "still_s": 4000.0, "owner": "its supervisor watches it"},
}  # fmt: skip
STALE: dict[str, dict[str, Any]] = {
    "its attempt has ended": {**TRAINS, "has_ended": True}, "stands still, alone": {**TRAINS, "still_s": 4000.0}, "loads for ever, alone": {"phase": "loading", "still_s": 4000.0},
}  # fmt: skip


def beside(at_work: dict[str, Any], *, with_cards: bool = True) -> Evidence:
    """The head has this run: its process holds the card and the rendezvous port."""
    evidence = healthy.gpu() if with_cards else healthy.cpu()
    evidence = healthy.card(evidence, evidence.head, **HOLDS) if with_cards else evidence
    runs = {"alive": [RUN], "at_work": {RUN: at_work}}
    return healthy.with_facts(evidence, evidence.head, runs=runs, network={"port": PORT}, system={"time": NOW})


def found(evidence: Evidence) -> list[Finding]:
    return [finding for finding in registry.judge_all(evidence) if finding.level != "ok"]


@pytest.mark.parametrize("state", WELL)
@pytest.mark.parametrize("with_cards", [True, False])
def test_nothing_offers_to_end_a_run_that_is_well(state: str, with_cards: bool) -> None:
    findings = found(beside(WELL[state], with_cards=with_cards))
    assert {"runs.alive", "network.port"} <= {finding.check for finding in findings}
    assert presentation.offered_fixes(findings) == [] and not any(
        "homelab stop" in finding.hint or "kill" in finding.hint for finding in findings
    )
    assert all(
        f"homelab status --wait {RUN}" in finding.hint
        for finding in findings
        if finding.check in ("runs.alive", "network.port", "gpu.memory")
    )


@pytest.mark.parametrize("state", STALE)
def test_what_is_left_over_is_stopped(state: str) -> None:
    (offer,) = presentation.offered_fixes(found(beside(STALE[state])))
    assert offer.command == f"homelab stop {RUN}" and {finding.check for finding in offer.fixes} >= {"runs.alive", "network.port"}


def test_a_preflight_is_no_failure_and_takes_another_port() -> None:
    fleet = FakeFleet.__new__(FakeFleet)
    fleet.agent = lambda name: type("Agent", (), {"ask": staticmethod(lambda verb, request: {"port": request.low})})  # type: ignore[return-value]
    evidence = preflight._with_free_port(fleet, beside(TRAINS))
    assert evidence.master_port == healthy.PORT + 1
    findings = found(evidence)
    assert [finding.level for finding in findings] == ["warn"] * len(findings) and "network.port" not in {
        finding.check for finding in findings
    }
    stale = beside(STALE["its attempt has ended"])
    assert preflight._with_free_port(fleet, stale) is stale


def test_what_it_does_and_when_it_is_done_is_said() -> None:
    (finding,) = [finding for finding in found(beside(TRAINS)) if finding.check == "runs.alive"]
    assert finding.message == f"run {RUN} is training here, step 120 of 800, done at {local_moment(NOW + 6800, NOW)}"
    assert re.fullmatch(r"\d\d:\d\d", local_moment(NOW + 6800, NOW)) and re.fullmatch(
        r"\w{3} \d\d \w{3} \d\d:\d\d", local_moment(NOW + 90_000, NOW)
    )


def test_two_trainings_on_the_same_cards_are_refused_by_name() -> None:
    with pytest.raises(HomelabError, match=f"run {RUN} is training on tower, step 120 of 800") as caught:
        prepare._refuse_busy(found(beside(TRAINS)))
    assert f"homelab status --wait {RUN}, then the same command again" in caught.value.hint and "--skip runs.alive" in caught.value.hint
    prepare._refuse_busy([finding for finding in found(beside(TRAINS, with_cards=False)) if finding.level == "warn"])


BETWEEN = {"recovered": {RUN: {"by": "me on tower, process 7", "process": {"pid": 7, "born": 1, "boot_id": "another", "namespace": "n"}}}}


@pytest.mark.parametrize("with_cards", [True, False])
def test_a_run_between_two_attempts_is_said_and_a_launch_does_not_take_its_place(with_cards: bool) -> None:
    """Nothing of it is alive: cards and memory look free."""
    evidence = healthy.gpu() if with_cards else healthy.cpu()
    evidence = healthy.with_facts(evidence, evidence.head, runs=BETWEEN)
    findings = found(evidence)
    assert [(finding.check, finding.level, finding.keeps_out) for finding in findings] == [("runs.alive", "warn", False)], (
        "two that recover do not wait for each other"
    )
    assert (
        findings[0].message.startswith(f"run {RUN} is being recovered here: its supervisor (me on tower, process 7)")
        and presentation.offered_fixes(findings) == []
    )
    assert f"homelab status --wait {RUN}" in findings[0].hint
    prepared = prepare.Prepared(healthy.recipe(), Path("r.toml"), [], evidence, findings, (), None, None)
    with pytest.raises(HomelabError, match=f"run {RUN} is being recovered on tower") as caught:
        prepare.refuse_on_failure(prepared)
    assert f"homelab stop {RUN}" in str(caught.value.hint) and "--skip runs.alive" in str(caught.value.hint)
    prepare.refuse_on_failure(replace(prepared, skipped=("runs.alive",)))


@pytest.mark.parametrize(
    ("recovered", "expected"),
    [(BETWEEN["recovered"], [RUN]), ({RUN: {"by": "me", "process": {**process_owner.mark(), "pid": 2**22 - 1}}}, [])],
)
def test_a_supervisor_of_this_machine_that_is_gone_recovers_nothing(tmp_path: Path, recovered: Any, expected: list[str]) -> None:
    facts = healthy.with_facts(healthy.cpu(), "tower", runs={"recovered": recovered}).facts["tower"]
    fleet = FakeFleet(tmp_path, ["tower"]).answer("facts", facts.model_dump(mode="json"))
    seen = gather.facts(fleet, recipe=None, material=[], port=0).facts["tower"]
    assert list(seen.runs.recovered) == expected


def test_to_skip_is_offered_only_where_it_helps() -> None:
    certain = {check.id for check in registry.CHECKS if check.is_certain}
    assert {"network.port", "network.place", "data.there", "disk.writable", "ssh.login"} <= certain
    assert not certain & {"runs.alive", "gpu.memory", "fit.memory", "disk.room", "clock.skew", "model.same"}
