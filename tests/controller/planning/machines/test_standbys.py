"""Which nodes prepare the processes of the next attempt, and how the plan says it."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.config.recipe import Recipe
from homelab.controller.planning.machines import standbys
from homelab.controller.planning.machines.machines import Machines
from tests import builders

GIB = 2**30
NAMES = ("tower", "laptop")


def said(recipe: Recipe, *, device: str = "cpu", **laptop: Any) -> list[tuple[str, str]]:
    """(value, reason) of the plan's choice; the tower has plenty of memory, the laptop what is given."""
    cluster = builders.cluster(NAMES, with_gpus=device == "cuda")
    facts = {name: builders.facts(name, with_gpus=device == "cuda") for name in NAMES}
    system = {"tower": {"memory_available_bytes": 64 * GIB}, "laptop": laptop}
    facts = {name: known.model_copy(update={"system": known.system.model_copy(update=system[name])}) for name, known in facts.items()}
    ranks = [builders.rank_plan(number, name, memory=builders.memory(3.0)) for number, name in enumerate(NAMES)]
    found = standbys.choices(recipe, Machines(device, cluster.nodes, facts), ranks)
    return [(choice.value, choice.because) for choice in found]


def test_every_node_with_the_memory_for_it_does() -> None:
    ((value, because),) = said(builders.recipe(), memory_available_bytes=5 * GIB)
    assert value == "tower, laptop" and because.endswith("1.0 GiB of memory a rank"), because


@pytest.mark.parametrize(
    ("device", "laptop"),
    [
        ("cpu", {"memory_available_bytes": 4 * GIB - 1}),
        ("cuda", {"memory_available_bytes": 3 * GIB - 1}),
        ("cpu", {"memory_available_bytes": 32 * GIB, "memory_limit_bytes": 8 * GIB, "memory_limit_used_bytes": 5 * GIB}),
    ],
    ids=["cpu", "card", "limited login"],
)
def test_a_node_whose_memory_is_short_does_not(device: str, laptop: dict[str, Any]) -> None:
    ((value, because),) = said(builders.recipe(), device=device, **laptop)
    assert value == "tower" and because.endswith("too little is free on laptop")


def test_what_is_not_known_is_not_short() -> None:
    assert said(builders.recipe(), memory_available_bytes=None)[0][0] == "tower, laptop"


@pytest.mark.parametrize(
    "recipe",
    [
        builders.script_recipe(), builders.recipe(recovery={"standby": False}), builders.recipe(recovery={"auto": False}),
        builders.recipe(method={"kind": "lora", "backend": "unsloth"}),
    ],
    ids=["own program", "left out", "by hand", "unsloth"],
)  # fmt: skip
def test_where_nobody_is_to_the_plan_says_nothing(recipe: Recipe) -> None:
    assert not standbys.prepares(recipe) and said(recipe, memory_available_bytes=64 * GIB) == []
