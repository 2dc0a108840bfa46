"""An old card turns all to fp16, in which no model is divided: it never costs the others their pipeline without a word."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.errors import InputError
from homelab.planning.types import Plan
from tests import builders
from tests.checks import healthy

NEW = (("tower", ("RTX 5070 Ti", 16)), ("laptop", ("RTX 4070 Laptop", 8)))
OLD = ("old", ("RTX 2060 Super", 8))
TRAIN = {"global_batch": 24, "steps": 10, "learning_rate": 1e-3}


def plan(*machines: tuple[Any, ...], model: str = "meta-llama/Llama-2-13b-hf", **sections: Any) -> Plan:
    """Of machines that nobody asked: (name, (card, GiB), ...)."""
    nodes = {name: {"gpus": [{"model": card, "vram_gb": size} for card, size in cards]} for name, *cards in machines}
    recipe = healthy.recipe(**{"model": {"name": model}, "method": {"kind": "qlora"}, "train": TRAIN, **sections})
    return builders.make_plan(builders.cluster(nodes, nodes=nodes), recipe, {})


def left_out(made: Plan) -> list[str]:
    return [line for line in made.warnings if line.startswith("left out: ")]


@pytest.mark.parametrize("card", [("RTX 2060 Super", 8), ("GTX 1660 Ti", 6), ("T4", 16), ("Some Card", 8)])
def test_a_faster_plan_without_the_old_card_is_taken_and_said(card: tuple[str, int]) -> None:
    with_it = plan(*NEW, ("old", card), parallel={"strategy": "ddp"})
    made, alone = plan(*NEW, ("old", card)), plan(*NEW)
    assert made.time and with_it.time and with_it.precision == "fp16"
    assert (made.strategy, made.precision, made.left_out) == ("pipeline", "bf16", ("old",)) and made.ranks == alone.ranks
    assert with_it.fits is False or made.time.tokens_per_s > with_it.time.tokens_per_s
    (line,) = left_out(made)
    assert f"the {card[0]} of old stays out" in line and "fp16, which rules out pipeline" in line and f"{made.time.tokens_per_s:.0f} tokens/s" in line
    assert made.choices[0].subject == "node old" and '[parallel] strategy = "ddp"' in made.choices[0].because
    assert left_out(with_it) == [] and with_it.left_out == (), "the edit that the plan names"


@pytest.mark.parametrize("strategy", ["pipeline", "zero2", "zero3"])
def test_a_named_strategy_that_fp16_rules_out_is_planned_without_the_old_card(strategy: str) -> None:
    made = plan(*NEW, OLD, model="meta-llama/Llama-3.2-1B", parallel={"strategy": strategy})
    assert (made.strategy, made.precision, made.left_out) == (strategy, "bf16", ("old",))
    assert left_out(made) and "does not go with fp16" in left_out(made)[0]


def test_an_old_card_that_costs_nothing_takes_part() -> None:
    made = plan(*NEW, OLD, model="meta-llama/Llama-3.2-1B")
    assert (made.strategy, made.precision, made.world_size) == ("ddp", "fp16", 3) and left_out(made) == []
    only = plan(OLD, ("old2", ("T4", 16)), model="meta-llama/Llama-3.2-1B")
    assert (only.precision, only.world_size) == ("fp16", 2) and left_out(only) == []


def test_what_the_recipe_says_is_left_to_it() -> None:
    with pytest.raises(InputError, match="does not go with fp16"):
        plan(*NEW, OLD, train={**TRAIN, "precision": "fp16"}, parallel={"strategy": "pipeline"})
    assert plan(*NEW, OLD, train={**TRAIN, "precision": "bf16"}).world_size == 3


def test_beside_newer_cards_in_one_machine_the_edit_is_said() -> None:
    both = (("tower", ("RTX 5070 Ti", 16), ("RTX 2060 Super", 8)), NEW[1])
    made = plan(*both)
    (line,) = [line for line in made.warnings if "edit gpus of tower" in line]
    assert made.world_size == 3 and "without the RTX 2060 Super" in line and "pipeline in bf16" in line
    with pytest.raises(InputError, match="does not go with fp16") as caught:
        plan(*both, parallel={"strategy": "pipeline"})
    assert "edit gpus of tower in cluster.toml: without the RTX 2060 Super" in str(caught.value.hint)


def test_the_same_where_the_nodes_were_asked() -> None:
    seen = healthy.card(healthy.gpu(healthy.recipe()), "oldtower", name="NVIDIA Some Card", compute_capability="7.5", memory_total_bytes=8 * healthy.GIB)
    recipe = healthy.recipe(train=TRAIN, parallel={"strategy": "pipeline"})
    made = builders.make_plan(seen.cluster, recipe, seen.facts)
    assert (made.precision, made.left_out, [node.name for node in made.nodes]) == ("bf16", ("oldtower",), ["tower", "laptop"])
