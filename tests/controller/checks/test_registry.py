"""Which checks are judged, and what happens when one is skipped, misspelt or broken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from homelab.controller.base.errors import InputError, SilentError, UnreachableError
from homelab.controller.base.hint import Command
from homelab.controller.checks import registry
from homelab.controller.checks.check import Check, OfCluster, Problem
from homelab.controller.checks.evidence import Evidence, Finding
from homelab.controller.features.launch import prepare
from tests.controller.checks.healthy import NAMES, bad, cpu, unreachable, with_facts

pytestmark = pytest.mark.timeout(20)


def test_ids_differ_and_begin_with_their_subject() -> None:
    assert len(set(registry.IDS)) == len(registry.IDS)
    for subject in registry.SUBJECTS:
        assert all(check.subject == subject.id and check.title for check in subject.checks)
        assert all((check.of_node is None) != (check.of_cluster is None) for check in subject.checks)


def test_a_skipped_check_is_said_and_not_judged() -> None:
    evidence = with_facts(cpu(), "laptop", power={"source": "battery"})
    findings = [finding for finding in registry.judge_all(evidence, skip=["power"]) if finding.check == "power"]
    assert findings == [Finding("power", "", "ok", registry.SKIPPED)]


def test_only_skips_all_the_others() -> None:
    ids = {check.id for check in registry.CHECKS}
    assert registry.skipped(only=["disk", "gpu"], skip=["gpu"]) == {check for check in ids if not check.startswith("disk.")}
    assert registry.skipped(only=["disk"], skip=["disk.room"]) >= {"disk.room", "gpu.memory"}
    assert "disk.writable" not in registry.skipped(only=["disk"], skip=["disk.room"])
    assert registry.skipped(only=["disk.room"], skip=[]) == ids - {"disk.room"}
    assert registry.skipped(only=[], skip=[]) == frozenset()


@pytest.mark.parametrize(("only", "skip"), [(["netwrok"], []), ([], ["netwrok"])])
def test_an_unknown_id_is_refused_with_the_list(only: list[str], skip: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        registry.skipped(only=only, skip=skip)
    assert 'Did you mean "network"?' in caught.value.message
    assert all(subject.id in caught.value.hint for subject in registry.SUBJECTS)
    with pytest.raises(InputError):
        registry.judge_all(cpu(), skip=[*only, *skip])


def test_one_check_of_a_subject_can_be_skipped_and_the_others_are_judged() -> None:
    evidence = with_facts(cpu(), "laptop", resources={"disk_free_bytes": 10, "workdir_writable": False})
    found = [finding for finding in registry.judge_all(evidence, skip=["disk.room"]) if finding.subject == "disk"]
    assert [finding.check for finding in bad(found)] == ["disk.writable"]
    assert Finding("disk.room", "", "ok", registry.SKIPPED) in found


def test_the_most_pressing_thing_of_a_node_comes_first() -> None:
    evidence = with_facts(cpu(), "laptop", resources={"workdir_writable": False, "disk_free_bytes": 900_000_000})
    found = [finding for finding in registry.judge_all(evidence) if finding.subject == "disk" and finding.node == "laptop"]
    assert [finding.level for finding in found] == ["fail", "warn"]


def test_what_a_broken_probe_would_have_seen_is_not_judged_and_said() -> None:
    evidence = with_facts(cpu(), "laptop", broken={"power": "KeyError: 'x'"}, power={"source": "battery"})
    found = [finding for finding in bad(registry.judge_all(evidence)) if finding.node == "laptop"]
    assert [(finding.check, finding.level) for finding in found] == [("ssh.probes", "warn")]
    assert "KeyError" in found[0].message


def test_nothing_left_to_judge_is_refused() -> None:
    with pytest.raises(InputError):
        registry.skipped(only=["ssh"], skip=["ssh"])


def test_a_node_that_did_not_answer_fails_even_where_ssh_is_skipped() -> None:
    evidence = unreachable(cpu(), "laptop", UnreachableError("off", hint="wake it"))
    (found,) = bad(registry.judge_all(evidence, skip=registry.skipped(only=["disk"], skip=[])))
    assert (found.node, found.level, found.message) == ("laptop", "fail", "off")


def _breaks(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    yield "tower", Problem("warn", "seen before it broke", "look")
    raise KeyError("laptop")


def _without_hint(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    yield "tower", Problem("fail", "full")


@pytest.mark.parametrize(("judge", "kept"), [(_breaks, 1), (_without_hint, 0)])
def test_a_check_that_breaks_is_a_failure_and_no_traceback(judge: OfCluster, kept: int) -> None:
    findings = registry.judge_one(Check("disk.room", "", "fail", "resources", of_cluster=judge), cpu())
    assert len(findings) == kept + 1
    assert (findings[-1].level, findings[-1].node) == ("fail", "")
    assert findings[-1].message.startswith("this check itself failed")
    assert "--skip disk.room" in findings[-1].hint


def test_a_summary_that_breaks_is_no_traceback() -> None:
    evidence = with_facts(cpu(), "laptop", resources={"disk_free_bytes": None})
    assert [finding for finding in registry.judge_all(evidence) if finding.subject == "disk"]


def test_a_hint_is_the_fix_where_there_is_no_other() -> None:
    def judge(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
        yield "tower", Problem("fail", "full", fix=Command("rm x"))

    (found,) = Check("disk.room", "", "fail", "resources", of_cluster=judge).judge(cpu())
    assert (found.hint, found.fix) == ("rm x", "rm x")


def test_where_no_node_can_be_reached_this_machine_comes_first() -> None:
    away = SilentError("no answer within 5 s", hint="wake it")
    nobody = replace(cpu(), facts={}, links=(), lan={}, unreachable=dict.fromkeys(NAMES, away))
    first, *others = bad(registry.judge_all(nobody))
    assert (first.check, first.node, first.level) == ("ssh.login", "", "fail")
    assert "perhaps this machine is off the network" in first.message and "ip route" in first.hint
    assert [finding.node for finding in others] == list(NAMES)
    refused = UnreachableError("the login was refused", hint="ssh-copy-id")
    for one_is_there in (unreachable(cpu(), "laptop", away), replace(nobody, unreachable={**nobody.unreachable, "laptop": refused})):
        assert not [finding for finding in bad(registry.judge_all(one_is_there)) if not finding.node]


def test_launch_says_of_a_machine_without_a_network_that_it_may_be_this_one() -> None:
    away = SilentError("no answer within 5 s", hint="wake it")
    nobody = replace(cpu(), facts={}, links=(), lan={}, unreachable=dict.fromkeys(NAMES, away))
    prepared = cast(Any, SimpleNamespace(findings=registry.judge_all(nobody), refused=None, evidence=nobody))
    with pytest.raises(UnreachableError, match="perhaps this machine is off the network") as caught:
        prepare.refuse_on_failure(prepared)
    assert "--skip" not in caught.value.hint
