"""What a node may say that no machine says: refused as a whole, or without effect. Nothing of it reaches a shell or breaks a check."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Finding, Link
from homelab.controller.facts.node import Facts
from homelab.controller.planning.machines import lan_address
from homelab.controller.remote import answers
from tests.controller.checks import healthy

pytestmark = pytest.mark.timeout(20)

ABSURD = [
    {"system": {"time": float("nan")}}, {"system": {"time": float("inf")}}, {"resources": {"disk_free_bytes": 10**400}},
    {"system": {"memory_total_bytes": -(10**400)}}, {"gpu": {"torch": {"devices": "[N/A]"}}}, {"gpu": {"torch": {"devices": [5]}}},
    {"gpu": {"torch": {"devices": [{"capability": ["x", "$(y)"]}]}}}, {"gpu": {"torch": {"arch_list": 5}}},
    {"network": {"routes": {"192.168.1.101": {"interface": "eth0", "source": "$(reboot)"}}}},
    {"network": {"routes": {"192.168.1.101": {"interface": "eth0", "source": "fe80::1%$(reboot)"}}}},
    {"runs": {"alive": ["--all"]}}, {"network": {"port": {"free": False, "holder_run": "-x"}}}, {"network": "[N/A]"},
]  # fmt: skip


@pytest.mark.parametrize("said", ABSURD, ids=str)
def test_absurd_facts_are_refused(said: dict[str, Any]) -> None:
    assert answers.fault("facts", {"node": "tower", **said})
    with pytest.raises(ValidationError):
        Facts.model_validate({"node": "tower", **said})


def test_endless_nesting_is_refused() -> None:
    nested: Any = 1
    for _ in range(400):
        nested = {"a": nested}
    assert "nested" in (answers.fault("facts", {"node": "tower", "model": {"found": True, "config": nested}}) or "")


def test_a_model_may_have_infinity_in_its_config() -> None:
    """Mamba2's time_step_limit."""
    assert answers.fault("facts", {"node": "tower", "model": {"found": True, "config": {"limit": [0.0, float("inf")]}}}) is None


def test_what_is_no_address_is_left_out() -> None:
    there = healthy.cpu()
    said = [{"name": "eth0", "addresses": ["$(reboot)", "1.2.3.4/99", "fe80::1%;reboot/64", "192.168.1.100/24"]}]
    facts = healthy.changed(there.facts["tower"], network={"interfaces": said})
    assert facts.network.interfaces[0].addresses == ("192.168.1.100/24",)
    assert lan_address.lan_of_all(there.cluster, {**there.facts, "tower": facts})["tower"] == ("192.168.1.100", "eth0")


def test_groups_of_processes_are_not_killed() -> None:
    facts = Facts.model_validate({"node": "tower", "network": {"port": {"free": False, "holder": "x", "holder_pid": -1}}})
    assert facts.network.port is not None and facts.network.port.holder_pid is None


@pytest.mark.parametrize("hostname", ["a/;1e reboot;s/b", "x\nreboot", "$(reboot)", "-x"])
def test_a_name_that_is_none_does_not_become_a_program(hostname: str) -> None:
    there = healthy.with_facts(healthy.cpu(), "tower", system={"hostname": hostname}, network={"own_name_addresses": ["127.0.1.1"]})
    (found,) = [finding for finding in registry.judge_all(there, set()) if finding.check == "network.name"]
    assert not found.fix and "reboot" not in found.hint and found.hint


def test_versions_of_thousands_of_digits_break_no_check() -> None:
    there = healthy.with_facts(healthy.gpu(), "tower", python={"nccl": "9" * 5000, "torch_cuda": "9" * 5000, "version": "9" * 5000})
    assert not [finding for finding in registry.judge_all(there, set()) if "broke" in finding.message]


def test_an_address_is_one_word_of_a_hint() -> None:
    there = healthy.cpu()
    there = replace(there, lan={**there.lan, "laptop": ("$(reboot)", "eth0")}, links=(
        Link("tower", "laptop", "x", 1, False, latency_ms=90.0), Link("tower", "laptop", "x", 2, False, latency_ms=90.0),
    ))  # fmt: skip
    for finding in _of(there, "network.latency"):
        command = finding.hint.partition("? ")[2]
        assert shlex.split(shlex.split(command)[-1])[-1] in ("$(reboot)", *(place[0] for place in there.lan.values()))


def _of(evidence: Any, check: str) -> list[Finding]:
    return list(registry.judge_one(next(c for c in registry.CHECKS if c.id == check), evidence))
