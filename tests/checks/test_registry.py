"""Which checks are judged, and what happens when one is skipped, misspelt or broken."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from homelab.checks import registry
from homelab.checks.evidence import Evidence, Finding
from homelab.errors import InputError, UnreachableError
from tests.checks.healthy import bad, cpu, unreachable, with_facts

pytestmark = pytest.mark.timeout(20)


def test_ids_differ_and_findings_carry_the_id_of_their_check() -> None:
    assert len(set(registry.IDS)) == len(registry.IDS)
    for check in registry.CHECKS:
        assert {finding.check for finding in registry.judge_one(check, cpu())} == {check.id}


def test_a_skipped_check_is_said_and_not_judged() -> None:
    evidence = with_facts(cpu(), "laptop", power="battery")
    findings = [finding for finding in registry.judge_all(evidence, skip=["power"]) if finding.check == "power"]
    assert findings == [Finding("power", "", "ok", registry.SKIPPED)]


def test_only_skips_all_the_others() -> None:
    assert registry.skipped(only=["disk", "gpu"], skip=["gpu"]) == frozenset(registry.IDS) - {"disk"}
    assert registry.skipped(only=[], skip=[]) == frozenset()


@pytest.mark.parametrize(("only", "skip"), [(["netwrok"], []), ([], ["netwrok"])])
def test_an_unknown_id_is_refused_with_the_list(only: list[str], skip: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        registry.skipped(only=only, skip=skip)
    assert 'Did you mean "network"?' in caught.value.message
    assert all(check in caught.value.hint for check in registry.IDS)
    with pytest.raises(InputError):
        registry.judge_all(cpu(), skip=[*only, *skip])


def test_nothing_left_to_judge_is_refused() -> None:
    with pytest.raises(InputError):
        registry.skipped(only=["ssh"], skip=["ssh"])


def test_a_node_that_did_not_answer_fails_even_where_ssh_is_skipped() -> None:
    evidence = unreachable(cpu(), "laptop", UnreachableError("off", hint="wake it"))
    (found,) = bad(registry.judge_all(evidence, skip=registry.skipped(only=["disk"], skip=[])))
    assert (found.node, found.level, found.message) == ("laptop", "fail", "off")


def _breaks(evidence: Evidence) -> Iterator[Finding]:
    yield Finding("disk", "tower", "ok", "seen before it broke")
    raise KeyError("laptop")


def _without_hint(evidence: Evidence) -> Iterator[Finding]:
    yield Finding("disk", "tower", "fail", "full")


@pytest.mark.parametrize("judge", [_breaks, _without_hint])
def test_a_check_that_breaks_is_a_failure_and_no_traceback(judge: object) -> None:
    findings = registry.judge_one(registry.Check("disk", "", judge), cpu())  # type: ignore[arg-type]
    assert (findings[-1].level, findings[-1].node) == ("fail", "")
    assert findings[-1].message.startswith("this check broke")
    assert "--skip disk" in findings[-1].hint
