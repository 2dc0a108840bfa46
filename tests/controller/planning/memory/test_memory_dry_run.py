"""What a dry run on one node says of every rank of a plan."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.facts.node import Facts
from homelab.controller.planning.memory import dry_run, rank_memory, scenario
from homelab.controller.planning.memory.rank_memory import RankSetup
from homelab.controller.planning.memory_estimate import MemoryEstimate, MemoryItem
from homelab.controller.planning.render import plan_table
from homelab.controller.planning.types import Plan, RankPlan
from homelab.shared.protocol import memory_items
from homelab.shared.protocol.memory_items import ACTIVATIONS, LOGITS
from tests import builders

SHAPE = builders.architecture("TinyLlama/TinyLlama-1.1B-Chat-v1.0")
GB = 10**9
RECIPE = builders.train_recipe(
    {
        "model": {"name": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"}, "data": {"train": "hub:a/b"}, "method": {"kind": "qlora"},
        "train": {"global_batch": 12, "steps": 1, "learning_rate": 1e-4, "seq_len": 1024},
    }
)  # fmt: skip


def plan(*ranks: tuple[int, float], cap: int | None = None) -> Plan:
    """Ranks as (micro-batch, GB of the card), each with 0.3 GB held by others."""
    assert SHAPE and RECIPE.method and RECIPE.train
    found = []
    for number, (rows, size) in enumerate(ranks):
        items = rank_memory.estimate(
            SHAPE, RECIPE.method, RECIPE.train, RankSetup("bf16", "cuda", rows, len(ranks), held_by_others_bytes=GB // 3)
        )
        estimate = MemoryEstimate(items=items, available_bytes=round(size * GB))
        found.append(
            RankPlan(
                rank=number,
                node=f"n{number}",
                local_rank=0,
                device_name="RTX 3070 Ti",
                share=4,
                micro_batch=rows,
                memory=estimate,
                token_cap=cap,
            )
        )
    return Plan(
        run="r", attempt=1, world_size=len(ranks), backend="nccl", device="cuda", precision="bf16", strategy="ddp", head="n0",
        master_address="", master_port=1, resume_step=0, ranks=tuple(found), nodes=(),
    )  # fmt: skip


def result(made: Plan, rank: int, factor: float) -> dict[str, Any]:
    """A dry run that finds everything that moves `factor` times as large as the formulas."""
    estimate = made.ranks[rank].memory
    assert estimate
    items = {item.name: item.size_bytes for item in estimate.items if item.name in rank_memory.SEEN_BY_A_DRY_RUN}
    items = {name: round(size * (factor if name in rank_memory.MOVING else 1)) for name, size in items.items()}
    return {"peak_bytes": sum(items.values()), "at": "aten.mm.default", "items": items, "seconds": 4.2}


def moving(rank: RankPlan) -> int:
    assert rank.memory
    return sum(item.size_bytes for item in rank.memory.items if item.name in rank_memory.MOVING)


def test_one_dry_run_for_each_situation_the_tightest_rank_first() -> None:
    made = plan((1, 4.0), (2, 24.0), (2, 8.0), (1, 6.0))
    wanted = dry_run.situations(made, RECIPE)
    assert [one.micro_batch for one in wanted] == [1, 2]
    assert [one.masked for one in wanted] == [False, True] and {one.seq_len for one in wanted} == {1024}
    assert dry_run.situations(plan((1, 4.0), cap=300), RECIPE)[0].seq_len == 300


def test_its_items_replace_the_formulas_and_others_are_scaled() -> None:
    made = plan((1, 8.0), (4, 24.0))
    wanted = dry_run.situations(made, RECIPE)[:1]
    after = dry_run.applied(made, RECIPE, SHAPE, "n0", wanted, [result(made, 0, 1.25)])
    own, other = after.ranks
    assert own.memory and own.memory.dry_run and other.memory and other.memory.dry_run is None
    assert moving(own) == pytest.approx(1.25 * moving(made.ranks[0]), rel=1e-3)
    assert moving(other) == pytest.approx(1.25 * moving(made.ranks[1]), rel=1e-3)
    assert own.memory.dry_run.at == "aten.mm.default" and own.memory.dry_run.analytic_bytes < own.memory.dry_run.peak_bytes
    assert made.ranks[0].memory
    # Context, communicator and what others hold stay as they were.
    for name in (rank_memory.CONTEXT, rank_memory.COMMUNICATOR, memory_items.HELD):
        assert [item for item in own.memory.items if item.name == name] == [
            item for item in made.ranks[0].memory.items if item.name == name
        ]
    text = plan_table.text(after)
    assert "dry run:" in text and "at op aten.mm.default, analytic" in text and "times 1.25" in text


def test_a_rank_that_turns_out_too_small_is_a_warning() -> None:
    size = plan((1, 99.0)).ranks[0].memory
    assert size
    made = plan((1, size.total_bytes / GB + 0.01))
    wanted = dry_run.situations(made, RECIPE)
    after = dry_run.applied(made, RECIPE, SHAPE, "n0", wanted, [result(made, 0, 1.5)])
    assert len(after.warnings) == 1 and "rank 0 on n0 does not fit by the dry run" in after.warnings[0]
    assert dry_run.applied(made, RECIPE, SHAPE, "n0", wanted, [result(made, 0, 0.9)]).warnings == ()
    assert dry_run.applied(made, RECIPE, SHAPE, "n0", wanted, []) == made


def test_a_node_that_can() -> None:
    packages = dict.fromkeys(("torch", "transformers", "peft", "accelerate", "bitsandbytes"), "1")

    def node(name: str, **more: Any) -> Facts:
        return Facts.model_validate(
            {"node": name, "system": {"time": 0, "hostname": "", "user": "", "home": ""}, "resources": {"workdir": ""}, **more}
        )

    model = {"found": True, "config": {"model_type": "llama"}}
    busy, idle = (
        node("a", python={"packages": packages}, model=model, runs={"alive": ["r"]}),
        node("b", python={"packages": packages}, model=model),
    )
    poor = node("c", python={"packages": {**packages, "bitsandbytes": None}}, model=model)
    assert dry_run.able({"a": busy, "b": idle}, RECIPE) == "b"
    assert dry_run.able({"a": busy, "c": poor}, RECIPE) == "a"
    assert dry_run.able({"c": poor, "d": node("d", python={"packages": packages})}, RECIPE) is None


def test_headroom_is_judged_against_what_is_free() -> None:
    shown = plan_table.text(plan((1, 8.0)))
    assert "of 7.7 GB" in shown and "NOT fit" not in shown
    assert "GB too little, does NOT fit" in plan_table.text(plan((1, 1.0)))
    situation = scenario.of_plan(plan((1, 8.0)), SHAPE, {})
    assert situation and situation.ranks[0].held_bytes == GB // 3


def test_a_measured_item_replaces_its_estimate() -> None:
    assert RECIPE.method and RECIPE.train
    about: dict[str, Any] = {"precision": "bf16", "device": "cuda", "micro_batch": 1, "world_size": 1}
    items = rank_memory.estimate(SHAPE, RECIPE.method, RECIPE.train, RankSetup(**about, measured={LOGITS: 0, ACTIVATIONS: 10**9}))
    found = {item.name: item for item in items}
    assert LOGITS not in found and found[ACTIVATIONS] == MemoryItem(name=ACTIVATIONS, size_bytes=10**9)
    assert found[rank_memory.ALLOCATOR].size_bytes > 0.05 * 10**9
