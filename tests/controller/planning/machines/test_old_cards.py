"""An old card turns all to fp16: it takes part where that pays, and the plan says what it costs."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.planning.types import Plan
from tests import builders
from tests.controller.checks import healthy

NEW = (("tower", ("RTX 5070 Ti", 16)), ("laptop", ("RTX 4070 Laptop", 8)))
OLD = ("old", ("RTX 2060 Super", 8))
SLOW = ("old", ("Some Card", 8))
SMALL = "meta-llama/Llama-3.2-1B"
TRAIN = {"global_batch": 24, "steps": 10, "learning_rate": 1e-3}


def plan(*machines: tuple[Any, ...], model: str = "meta-llama/Llama-2-13b-hf", **sections: Any) -> Plan:
    """Of machines that nobody asked: (name, (card, GiB), ...)."""
    nodes = {name: {"gpus": [{"model": card, "vram_gb": size} for card, size in cards]} for name, *cards in machines}
    recipe = healthy.recipe(**{"model": {"name": model}, "method": {"kind": "qlora"}, "train": TRAIN, **sections})
    return builders.make_plan(builders.cluster(nodes, nodes=nodes), recipe, {})


def left_out(made: Plan) -> list[str]:
    return [line for line in made.warnings if line.startswith("left out: ")]


def adds(made: Plan) -> list[str]:
    return [line.partition(",")[0] for line in made.warnings if "compares" in line]


@pytest.mark.parametrize("card", [("RTX 2060 Super", 8), ("GTX 1660 Ti", 6), ("T4", 16), ("Some Card", 8)])
def test_an_old_card_costs_the_others_their_bf16_and_not_their_pipeline(card: tuple[str, int]) -> None:
    made, alone = plan(*NEW, ("old", card)), plan(*NEW)
    assert made.time and alone.time and alone.precision == "bf16"
    assert (made.strategy, made.precision, made.world_size, made.left_out) == ("pipeline", "fp16", 3, ())
    gain = made.time.tokens_per_s / alone.time.tokens_per_s - 1
    assert gain > 0 and adds(made) == ([f"old adds {gain:.0%} tokens per second"] if gain < 0.15 else []), "both plans were made"
    assert any("fp16 with pipeline" in line and "not run on a card" in line for line in made.warnings)


@pytest.mark.parametrize("strategy", ["pipeline", "zero2", "zero3", "hsdp"])
def test_every_strategy_is_planned_in_fp16(strategy: str) -> None:
    machines = (("tower", ("RTX 5070 Ti", 16), ("RTX 5070 Ti", 16)), ("old", ("T4", 16), ("T4", 16)))
    made = plan(*machines, train={**TRAIN, "precision": "fp16"}, parallel={"strategy": strategy})
    assert (made.strategy, made.precision, made.world_size) == (strategy, "fp16", 4)
    assert any(f"fp16 with {strategy}" in line for line in made.warnings)


def test_an_old_card_that_makes_it_slower_stays_out_and_that_is_said() -> None:
    made, alone, asked = (
        plan(*machines, model=SMALL, parallel={"strategy": how})
        for machines, how in (((*NEW, SLOW), "auto"), (NEW, "auto"), ((*NEW, SLOW), "ddp"))
    )
    assert made.time and asked.time and (made.precision, made.left_out, made.ranks) == ("bf16", ("old",), alone.ranks)
    (line,) = left_out(made)
    assert (
        "the Some Card of old stays out: with it precision is fp16, and ddp does " in line
        and f"ddp in bf16 does {made.time.tokens_per_s:.0f} tokens/s" in line
    )
    assert made.choices[0].subject == "node old" and '[parallel] strategy = "ddp"' in made.choices[0].because
    assert (left_out(asked), asked.left_out, asked.precision) == ([], (), "fp16"), "the edit that the plan names"
    loss = asked.time.tokens_per_s / made.time.tokens_per_s - 1
    assert loss < 0 and adds(asked) == [f"old adds {loss:.0%} tokens per second"]


def test_an_old_card_that_costs_nothing_takes_part() -> None:
    made = plan(*NEW, OLD, model=SMALL)
    assert (made.strategy, made.precision, made.world_size) == ("ddp", "fp16", 3) and left_out(made) == []
    only = plan(OLD, ("old2", ("T4", 16)), model=SMALL)
    assert (only.precision, only.world_size) == ("fp16", 2) and left_out(only) == [] and adds(only) == []


def test_what_the_recipe_says_is_left_to_it() -> None:
    for precision in ("fp16", "bf16"):
        made = plan(*NEW, SLOW, model=SMALL, train={**TRAIN, "precision": precision})
        assert (made.world_size, made.precision, left_out(made), adds(made)) == (3, precision, [], [])


def test_beside_newer_cards_in_one_machine_the_edit_is_said() -> None:
    both = (("tower", ("RTX 5070 Ti", 16), SLOW[1]), NEW[1])
    made = plan(*both, model=SMALL, train={**TRAIN, "global_batch": 3})
    (line,) = [line for line in made.warnings if "edit gpus of tower" in line]
    assert made.world_size == 3 and "without the Some Card" in line and "in bf16 does" in line
    with pytest.raises(InputError, match="does not work with fp16") as caught:
        plan(*both, model=SMALL, parallel={"compress": "powersgd"})
    assert "edit gpus of tower in cluster.toml: without the Some Card" in str(caught.value.hint)


def test_one_way_that_fp16_rules_out_is_planned_without_the_old_card() -> None:
    made = plan(*NEW, OLD, model=SMALL, parallel={"compress": "powersgd"})
    assert (made.precision, made.left_out) == ("bf16", ("old",)) and "does not work with fp16" in left_out(made)[0]


def test_the_same_where_the_nodes_were_asked() -> None:
    seen = healthy.card(
        healthy.gpu(healthy.recipe()), "oldtower", name="NVIDIA Some Card", compute_capability="7.5", memory_total_bytes=8 * healthy.GIB
    )
    recipe = healthy.recipe(train=TRAIN, parallel={"strategy": "pipeline"})
    made = builders.make_plan(seen.cluster, recipe, seen.facts)
    assert (made.precision, made.left_out, [node.name for node in made.nodes]) == ("bf16", ("oldtower",), ["tower", "laptop"])
