"""The check of memory per rank: real plans and a real refusal, on the right node, with an edit that mends it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.recipe import Recipe
from homelab.controller.planning.memory import scenario
from homelab.shared.recipe.parallel import STRATEGY_NAMES
from tests import builders
from tests.controller.checks import healthy

pytestmark = pytest.mark.timeout(20)
GIB = healthy.GIB
(CHECK,) = registry.subject("fit").checks


def recipe(**train: Any) -> Recipe:
    return healthy.recipe(
        model={"name": "HuggingFaceTB/SmolLM3-3B"}, method={"kind": "qlora"}, data={"train": "hub:a/b"},
        train={"global_batch": 12, "steps": 10, "learning_rate": 1e-4, "seq_len": 2048, "fused_loss": False, **train},
    )  # fmt: skip


def planned(evidence: Evidence) -> Evidence:
    """With the plan that a launch would make, or its refusal."""
    for name in evidence.facts:  # the shape of the model is that of its name
        evidence = healthy.with_facts(evidence, name, model={"found": False, "problem": "not in the hub cache"})
    assert evidence.recipe is not None
    try:
        plan = builders.make_plan(evidence.cluster, evidence.recipe, evidence.facts)
    except scenario.DoesNotFit as refused:
        return replace(evidence, refused=refused)
    return replace(evidence, plan=plan)


def found(evidence: Evidence) -> list[tuple[str, str]]:
    return [(finding.node, finding.level) for finding in CHECK.judge(evidence)]


def summary(evidence: Evidence, name: str) -> str:
    return registry.subject("fit").summary(evidence, evidence.cluster.node(name), evidence.facts[name])


def test_a_real_plan_that_fits_says_how_much_of_what_is_free() -> None:
    evidence = planned(healthy.gpu(recipe(fused_loss=True)))
    assert evidence.plan is not None and found(evidence) == []
    assert summary(evidence, "tower").endswith(" of 16.8 GB")  # of 16303 MiB, 300 are held
    assert registry.subject("fit").needs(evidence) is None


def test_a_rank_that_others_left_no_room_for_is_found_with_the_smallest_edit_and_the_nodes_that_have_room() -> None:
    evidence = planned(healthy.card(healthy.gpu(recipe()), "laptop", memory_used_bytes=7 * GIB))
    assert evidence.plan is not None and found(evidence) == [("laptop", "fail")]
    (finding,) = CHECK.judge(evidence)
    assert "1.1 GB are free" in finding.message and "too little" in finding.message
    assert "leave laptop out: --nodes tower,oldtower" in finding.hint
    # A micro-batch that the recipe asks for, and that is too large: the plan's own edit is named.
    asked = planned(healthy.gpu(recipe().model_copy(update={"parallel": replace(recipe().parallel, micro_batch=2, strategy="ddp")})))
    assert {node for node, level in found(asked) if level == "fail"} >= {"laptop", "oldtower"}
    assert all(
        "homelab plan RECIPE --fit writes a recipe that fits. Least: [parallel] micro_batch = " in one.hint for one in CHECK.judge(asked)
    )


def test_a_plan_that_is_refused_for_want_of_memory_is_found_on_every_node() -> None:
    evidence = healthy.gpu(recipe(seq_len=65536))
    evidence = planned(evidence)
    assert isinstance(evidence.refused, scenario.DoesNotFit)
    assert found(evidence) == [(name, "fail") for name in healthy.NAMES]
    assert {finding.hint for finding in CHECK.judge(evidence)} == {evidence.refused.hint}


def test_without_a_plan_it_says_why_and_finds_nothing() -> None:
    other = InputError("2 nodes are left, the recipe wants at least 3")
    evidence = replace(healthy.gpu(recipe()), refused=other)
    assert found(evidence) == [] and "plan" in str(registry.subject("fit").needs(evidence))
    assert "needs a recipe" in str(registry.subject("fit").needs(healthy.gpu())) and "[script]" in str(
        registry.subject("fit").needs(healthy.gpu(healthy.script()))
    )


def test_a_node_that_takes_no_part_and_a_card_of_unknown_size_are_said_aloud() -> None:
    evidence = replace(healthy.gpu(recipe()), plan=healthy.plan([{"node": "tower", "need_gib": 3.0}]))
    assert "not known" in summary(evidence, "tower") and summary(evidence, "laptop") == "takes no part"


@pytest.mark.parametrize("free_gb", [2.7, 1.7], ids=["divided", "divided and streamed"])
def test_nodes_that_hold_a_part_need_no_memory_for_the_whole(free_gb: float) -> None:
    """The check of the machine's memory asked for the whole model on each node: it refused a launch that the plan had room for, and each recovery, which
    judges nodes before it plans."""
    of = healthy.recipe(
        model={"name": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"}, method={"kind": "lora"}, data={"train": "hub:a/b"},
        train={"global_batch": 12, "steps": 10, "learning_rate": 1e-4, "seq_len": 128},
    )  # fmt: skip
    evidence = healthy.cpu(of)
    for name in evidence.facts:
        system, model = {"memory_available_bytes": int(free_gb * 10**9)}, {"found": False, "problem": "not in the hub cache"}
        evidence = healthy.with_facts(evidence, name, system=system, model=model)
    (ram,) = (check for check in registry.CHECKS if check.id == "memory.ram")
    assert [*ram.judge(evidence)] == [], "before there is a plan"
    with_plan = planned(evidence)
    assert with_plan.plan is not None and with_plan.plan.strategy == "pipeline", with_plan.refused
    assert all((rank.streaming is not None) == (free_gb < 2) for rank in with_plan.plan.ranks)
    assert [*ram.judge(with_plan)] == [] and "fail" not in {finding.level for finding in CHECK.judge(with_plan)}
    named = {
        name: replace(evidence, recipe=of.model_copy(update={"parallel": replace(of.parallel, strategy=name)})) for name in STRATEGY_NAMES
    }
    found = {name: {finding.level for finding in ram.judge(of_it)} for name, of_it in named.items()}
    assert found.pop("auto") == found.pop("pipeline") == found.pop("zero3") == found.pop("fsdp") == set()
    assert found == {name: {"fail"} for name in ("ddp", "hsdp", "zero2")}, "each node holds all weights that are not trained"
    copies = named["ddp"]
    alone = replace(copies, cluster=copies.cluster.only(("tower",)), facts={"tower": copies.facts["tower"]})
    assert [*ram.judge(alone)] == [], "one node may have a part of it on its disk"
