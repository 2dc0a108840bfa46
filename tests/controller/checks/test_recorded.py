"""Every check against recorded answers: one file per check, at least one case that it finds and one that it leaves alone.

A case starts from a healthy cluster (tests/controller/checks/healthy.py) and replaces what one node said; see `Case` for the keys.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, TypeAdapter

from homelab.controller.base.errors import UnreachableError
from homelab.controller.checks import registry
from homelab.controller.checks.check import Check
from homelab.controller.checks.evidence import Evidence, Finding, Link
from homelab.controller.facts.collective_check import CollectiveResult
from homelab.controller.facts.reading import read
from homelab.node.probes import amd, nvidia, xid
from homelab.node.system import firewall
from homelab.shared.protocol.worker_messages import BuildResult, SampleResult
from tests.controller.checks import healthy

pytestmark = pytest.mark.timeout(20)

FOLDER = Path(__file__).parent / "recorded"
REPLIES = FOLDER / "replies"
# What a probe makes of a program's recorded output: fields of Facts.
PARSERS: dict[str, Callable[[str], dict[str, Any]]] = {
    "nvidia_smi_xml": lambda text: {"gpu": nvidia.parse(text)},
    "nvidia_smi_error": lambda text: {"gpu": {**nvidia.silent(text.strip()), "torch": None}},
    "dmesg": lambda text: {"xid": xid.parse(text, uptime_s=100_000.0)},
    "nft": lambda text: {
        "network": {"firewall": "nftables" if firewall.parse_nft(text) else None, "firewall_chains": firewall.parse_nft(text)}
    },
    "rocm_smi": lambda text: {"amd": amd.parse_rocm_smi(text)},
}


class Finds(BaseModel):
    """What must be found: words of the message and of the hint."""

    model_config = ConfigDict(extra="forbid")
    level: str
    message: str
    hint: str = ""
    node: str | None = None  # default: the node of the case; "" is the cluster


class Case(BaseModel):
    """One recorded answer and what the check makes of it."""

    model_config = ConfigDict(extra="forbid")
    name: str
    base: str = "cpu"
    nodes: tuple[str, ...] = healthy.NAMES
    node: str = "tower"
    recipe: dict[str, Any] | None = None
    """Sections that differ from those of healthy.recipe."""
    script: bool = False
    """The recipe brings its own program."""
    facts: dict[str, Any] = {}
    also: dict[str, dict[str, Any]] = {}
    """Facts of other nodes."""
    torch: dict[str, Any] = {}
    """What torch on the node says of its build and cards."""
    device: dict[str, Any] = {}
    """What it says of the first of them."""
    card: dict[str, Any] = {}
    cluster: dict[str, Any] = {}
    """What cluster.toml says of the node instead."""
    replies: dict[str, str] = {}
    evidence: dict[str, Any] = {}
    unreachable: dict[str, str] = {}
    """The error of asking this node: message and hint."""
    links: list[dict[str, Any]] = []
    whole: dict[str, Any] = {}
    """Fields of Evidence itself, for the files of BUILDERS."""
    finds: Finds | None = None
    alone: bool = False
    """All other checks of all nodes may only speak of the same node, and none of the same subject does."""


def load(path: Path) -> list[Case]:
    """The cases of one file."""
    return [Case.model_validate(entry) for entry in tomllib.loads(path.read_text(encoding="utf-8"))["case"]]


FILES = sorted(FOLDER.glob("*.toml"))
CASES = [(path.stem, case) for path in FILES for case in load(path)]


def built(case: Case) -> Evidence:
    """The evidence of a case."""
    of = healthy.script() if case.script else healthy.recipe(**case.recipe) if case.recipe is not None else None
    evidence = {"cpu": healthy.cpu, "gpu": healthy.gpu}[case.base](of, names=case.nodes)
    if case.cluster:
        evidence = healthy.with_node(evidence, case.node, **case.cluster)
    for parser, file in case.replies.items():
        facts = PARSERS[parser]((REPLIES / file).read_text(encoding="utf-8"))
        evidence = healthy.with_facts(evidence, case.node, **facts)
    evidence = healthy.with_facts(evidence, case.node, **_with_null(case.facts))
    for other, changes in case.also.items():
        evidence = healthy.with_facts(evidence, other, **_with_null(changes))
    if case.torch or case.device:
        evidence = healthy.probe(evidence, case.node, device=_with_null(case.device), **_with_null(case.torch))
    if case.card:
        evidence = healthy.card(evidence, case.node, **_with_null(case.card))
    for field, value in case.evidence.items():
        changed: dict[str, Any] = {field: {**getattr(evidence, field), case.node: value}}
        evidence = replace(evidence, **changed)
    if case.unreachable:
        evidence = healthy.unreachable(evidence, case.node, UnreachableError(**case.unreachable))
    for change in case.links:
        evidence = replace(evidence, links=tuple(_changed(link, change) for link in evidence.links))
    for field, value in case.whole.items():
        evidence = replace(evidence, **{field: BUILDERS[field](value)})
    return evidence


# Fields of Evidence that are no mapping by node: how a table becomes one.
BUILDERS: dict[str, Callable[[Any], Any]] = {
    "sample": lambda table: read(SampleResult, table),
    "build": lambda table: read(BuildResult, table),
    "plan": healthy.plan,
    "collective": TypeAdapter(CollectiveResult).validate_python,
    "lan": lambda table: {name: tuple(place) for name, place in table.items()},
    "clock_offsets_s": dict,
}


def _with_null(value: Any) -> Any:
    """The same with None where it says "N/A": TOML has no null."""
    if isinstance(value, dict):
        return {key: _with_null(entry) for key, entry in value.items()}
    return None if value == "N/A" else value


def _changed(link: Link, change: Mapping[str, Any]) -> Link:
    fields = {key: value for key, value in change.items() if key not in ("from", "to", "ports")}
    ports = change.get("ports", "all")
    meant = ports == "all" or link.is_rendezvous == (ports == "rendezvous")
    if not meant or change.get("from", link.source) != link.source or change.get("to", link.target) != link.target:
        return link
    if fields.get("error"):
        fields.setdefault("latency_ms", None)
    return replace(link, **fields)


def judged(check_id: str, evidence: Evidence) -> list[Finding]:
    """What this one check finds."""
    (check,) = [check for check in registry.CHECKS if check.id == check_id]
    found = registry.judge_one(check, evidence)
    assert not any("this check itself failed" in finding.message for finding in found), found
    return found


@pytest.mark.parametrize(("check_id", "case"), CASES, ids=[f"{name}: {case.name}" for name, case in CASES])
def test_a_recorded_answer_is_judged_as_it_should(check_id: str, case: Case) -> None:
    found = judged(check_id, built(case))
    if case.finds is None:
        assert found == []
        return
    node = case.node if case.finds.node is None else case.finds.node
    matching = [finding for finding in found if finding.node == node and case.finds.message in finding.message]
    assert matching, found
    assert matching[0].level == case.finds.level, found
    assert case.finds.hint in matching[0].hint, matching[0].hint
    assert {finding.node for finding in found} == {node}, found


REBOOT = re.compile(r"(?<!-)\breboot\b")  # and no file of that name
BY_RESTART = {name for name in registry.IDS if name.startswith("gpu.")} | {"power.reboot"}
IN_WSL = [(name, case) for name, case in CASES if name in BY_RESTART and case.finds is not None]


@pytest.mark.parametrize(("check_id", "case"), IN_WSL, ids=[f"{name}: {case.name}" for name, case in IN_WSL])
def test_inside_of_wsl_nobody_is_told_to_reboot(check_id: str, case: Case) -> None:
    """There `reboot` restarts neither Windows nor its driver."""
    elsewhere = {finding.message: finding.hint for finding in judged(check_id, built(case))}
    for finding in judged(check_id, healthy.with_facts(built(case), case.node, network={"wsl": "mirrored"})):
        assert not REBOOT.search(finding.hint), finding.hint
        if REBOOT.search(elsewhere.get(finding.message, "")):
            assert "wsl --shutdown" in finding.hint, finding.hint


ALONE = [(name, case) for name, case in CASES if case.alone]


@pytest.mark.parametrize(("check_id", "case"), ALONE, ids=[f"{name}: {case.name}" for name, case in ALONE])
def test_one_broken_thing_is_found_once_on_its_node_and_disturbs_no_other_check(check_id: str, case: Case) -> None:
    evidence = built(case)
    findings = registry.judge_all(evidence)
    assert case.finds is not None
    node = case.node if case.finds.node is None else case.finds.node
    faults = healthy.bad(findings)
    assert not any("this check itself failed" in finding.message for finding in faults)
    assert all(finding.hint for finding in faults)
    assert {finding.node for finding in faults} == {node}
    of_subject = [finding for finding in findings if finding.subject == check_id.partition(".")[0]]
    assert [finding.check for finding in healthy.bad(of_subject)] == [check_id]
    assert {finding.node for finding in of_subject if finding.level == "ok"} - {""} == set(evidence.facts) - {node}


@pytest.mark.parametrize("check", registry.CHECKS, ids=lambda check: check.id)
def test_every_check_has_recorded_cases_that_it_finds_and_that_it_leaves_alone(check: Check) -> None:
    path = FOLDER / f"{check.id}.toml"
    assert path.exists(), f"write {path}"
    cases = load(path)
    assert any(case.finds is not None for case in cases)
    assert any(case.finds is None for case in cases)
    levels = {case.finds.level for case in cases if case.finds is not None}
    order = ["warn", "fail"]
    assert max(levels, key=order.index) == check.worst, "`worst` is the highest level that its cases show"


def test_no_file_is_left_of_a_check_that_is_gone() -> None:
    assert {path.stem for path in FILES} <= set(registry.IDS)


@pytest.mark.parametrize("build", [healthy.cpu, healthy.gpu])
@pytest.mark.parametrize("of", [None, healthy.recipe(), healthy.recipe(method={"kind": "qlora"}), healthy.script()])
@pytest.mark.parametrize("check", registry.CHECKS, ids=lambda check: check.id)
def test_a_healthy_cluster_has_none_of_it(check: Check, build: Callable[..., Evidence], of: Any) -> None:
    (subject,) = [subject for subject in registry.SUBJECTS if subject.id == check.subject]
    if subject.needs(build(of)) is None:
        assert judged(check.id, build(of)) == []
