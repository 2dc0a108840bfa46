"""What takes more than one recorded answer to say of the judges: healthy clusters, votes of several nodes, quoting."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace

import pytest

from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Evidence, Finding, Link
from homelab.controller.facts.node import Facts
from tests.controller.checks import healthy
from tests.controller.checks.healthy import NAMES, bad, cpu, cut, gpu, packages, recipe, script, with_facts, with_node

pytestmark = pytest.mark.timeout(20)

SUBJECTS = {subject.id for subject in registry.SUBJECTS}


def wires(slow: dict[tuple[str, str], float]) -> Evidence:
    """Nodes without GPUs, where these pairs have so many bytes per second and all others 1 Gbit/s."""
    links = tuple(replace(link, throughput_bytes_per_s=slow.get((link.source, link.target), 117e6)) for link in cpu().links)
    return replace(cpu(), links=links)


def judged(evidence: Evidence, check: str) -> list[Finding]:
    """The findings of one check, which must not break."""
    found = [finding for finding in registry.judge_all(evidence, skip=SUBJECTS - {check}) if finding.subject == check]
    assert not any("broke" in finding.message for finding in found), found
    return found


def one(evidence: Evidence, check: str) -> Finding:
    """The only finding of this check that is not ok. All other nodes are still well."""
    findings = judged(evidence, check)
    (found,) = bad(findings)
    assert found.hint
    well = {finding.node for finding in findings if finding.level == "ok"}
    assert well - {""} == set(evidence.facts) - {found.node}
    return found


@pytest.mark.parametrize("build", [cpu, gpu])
@pytest.mark.parametrize("of", [None, recipe(), recipe(method={"kind": "qlora"}), script()])
def test_a_healthy_cluster_is_ok_once_per_check_and_node(build: Callable[..., Evidence], of: object) -> None:
    findings = registry.judge_all(build(of))
    assert bad(findings) == []
    for check in SUBJECTS:
        nodes = [finding.node for finding in findings if finding.check == check]
        assert nodes in (list(NAMES), [""]), check
    assert all(finding.message for finding in findings)


@pytest.mark.parametrize("build", [cpu, gpu])
def test_a_single_healthy_node_is_ok(build: Callable[..., Evidence]) -> None:
    assert bad(registry.judge_all(build(recipe(), names=("tower",)))) == []


def test_two_failures_at_once_are_blamed_on_two_nodes() -> None:
    four = ("tower", "laptop", "oldtower")
    evidence = cut(cpu(names=four), ("tower", "laptop"), ("oldtower", "laptop"), ("laptop", "oldtower"), ("tower", "oldtower"))
    assert {finding.node for finding in bad(judged(evidence, "network"))} == {"laptop", "oldtower"}


def test_the_newer_of_two_versions_counts_when_none_has_a_majority() -> None:
    evidence = packages(cpu(names=("tower", "laptop")), "tower", transformers="5.9.0")
    found = one(evidence, "python")
    assert (found.node, found.level) == ("tower", "fail")


def test_a_fallback_interpreter_does_not_vote_on_versions() -> None:
    evidence = cpu()
    for node in ("laptop", "oldtower"):
        evidence = with_facts(
            evidence,
            node,
            python={"is_another": True, "executable": "/usr/bin/python3.11", "packages": {"torch": "1.0", "transformers": "4.0"}},
        )
    found = bad(judged(evidence, "python"))
    assert {finding.node for finding in found} == {"laptop", "oldtower"}
    assert all(f"homelab setup {finding.node}" in finding.hint for finding in found)


def test_an_older_driver_of_the_same_major_version_is_fine_when_a_matmul_works() -> None:
    assert bad(judged(with_facts(gpu(), "oldtower", python={"torch_cuda": "13.2"}), "gpu")) == []


def test_a_card_without_memory_figures_is_judged_by_its_name() -> None:
    """DGX Spark answers [N/A] for memory."""
    evidence = with_node(gpu(), "tower", gpus=({"model": "GB10", "vram_gb": 128},))
    evidence = healthy.card(evidence, "tower", name="NVIDIA GB10", memory_total_bytes=None, memory_used_bytes=None)
    assert bad(judged(evidence, "gpu")) == []


def test_a_hub_model_absent_everywhere_and_data_absent_everywhere_have_hints() -> None:
    evidence = cpu(recipe())
    for node in NAMES:
        evidence = with_facts(evidence, node, model={"found": False, "problem": "no weights"}, data={})
    for check in ("model", "data"):
        found = bad(judged(evidence, check))
        assert [finding.node for finding in found] == list(NAMES)
        assert all("recipe" in finding.hint for finding in found)


def test_practice_nodes_on_loopback_are_not_warned_of_loopback_names() -> None:
    evidence = with_facts(cpu(), "tower", network={"own_name_addresses": ["127.0.1.1"]})
    evidence = replace(evidence, lan={**evidence.lan, "tower": ("127.0.0.2", "lo")})
    assert not any("its own name" in finding.message for finding in judged(evidence, "network"))


def test_node_names_paths_and_users_are_quoted_in_hints() -> None:
    nasty = "/data/it's $(touch x).jsonl"
    evidence = cpu(recipe(data={"train": nasty}))
    evidence = with_node(evidence, "laptop", user="a.b", port=2222, identity_file="/keys/my key")
    evidence = with_facts(evidence, "laptop", data={"train": {"path": nasty, "found": False}})
    hint = one(evidence, "data").hint
    words = shlex.split(hint)
    assert words[:6] == ["ssh", "-p", "2222", "-i", "/keys/my key", "a.b@192.168.1.101"]
    assert words[6] == "mkdir -p /data"
    assert f"me@192.168.1.100:{nasty}" in words
    assert words[-1].startswith("scp://a.b@192.168.1.101:2222//data/it%27s%20")


def test_a_node_that_is_the_controller_itself_needs_no_ssh() -> None:
    evidence = packages(with_node(cpu(), "tower", host="local"), "tower", peft=None)
    assert one(evidence, "python").hint == "~/.homelab/env/bin/python -m pip install peft==0.19.0"


def test_every_link_error_reaches_a_finding() -> None:
    link = Link("tower", "laptop", "192.168.1.101", 41000, False, error="another program answered on this port")
    evidence = replace(cpu(), links=(*cpu().links, link))
    assert "another program answered" in one(evidence, "network").message


def test_wires_that_are_all_slow_or_only_less_fast_are_no_finding() -> None:
    names = healthy.NAMES
    everywhere = {(a, b): 11e6 for a in names for b in names if a != b}
    assert not healthy.bad(judged(wires(everywhere), "network")), "the others are no better: nothing to mend on one node"
    assert not healthy.bad(judged(wires({("tower", "laptop"): 50e6}), "network"))
    one_way = healthy.bad(judged(wires({("tower", "laptop"): 5e6}), "network"))
    assert [(finding.node, finding.level) for finding in one_way] == [("laptop", "warn")]


def test_facts_that_say_next_to_nothing_break_no_check() -> None:
    empty = Facts(node="laptop")
    evidence = gpu(recipe())
    findings = registry.judge_all(replace(evidence, facts={**evidence.facts, "laptop": empty}))
    assert not any("broke" in finding.message for finding in findings)
    assert any(finding.node == "laptop" and finding.level == "fail" for finding in findings)
