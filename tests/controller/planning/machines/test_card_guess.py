"""A card that no data sheet knows, or that says something impossible of itself: the others' time stays known, and it is said."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.base.hardware import CARDS
from homelab.controller.checks.evidence import Evidence
from homelab.controller.planning.machines import card_guess
from homelab.controller.planning.types import Plan
from homelab.shared.protocol.message import as_json
from tests import builders
from tests.controller.checks import healthy
from tests.controller.planning.test_plan import make

GIB = 2**30
UNKNOWN = "NVIDIA Some Card"
ROWS = {"train": {"global_batch": 24, "steps": 10, "learning_rate": 1e-3}}


def said(made: Plan, words: str) -> list[str]:
    return [line for line in made.warnings if words in line]


def offline(*cards: tuple[str, float]) -> Plan:
    """Machines that nobody asked, with one card each: its name and GiB as their owner writes them."""
    nodes = {f"n{number}": {"gpus": [{"model": name, "vram_gb": size}]} for number, (name, size) in enumerate(cards)}
    recipe = healthy.recipe(model={"name": "meta-llama/Llama-3.1-8B"}, method={"kind": "qlora"}, **ROWS)
    return builders.make_plan(builders.cluster(nodes, nodes=nodes), recipe, {})


def test_one_unknown_card_leaves_the_time_of_the_others_known() -> None:
    known, made = offline(("RTX 4090", 24), ("RTX 5090", 32)), offline(("RTX 4090", 24), ("RTX 6090", 32))
    assert known.time and made.time and not made.time.is_measured
    alone = {plan.ranks[1].device_name: plan.time.ranks[0].alone_tokens_per_s for plan in (known, made) if plan.time}
    assert alone["RTX 6090"] == pytest.approx(alone["RTX 5090"], rel=0.05), "the 4090's own"
    (line,) = said(made, "has no data sheet of")
    assert line.startswith("RTX 6090 of n1: ") and "generation 12.0" in line and "homelab launch RECIPE" in line
    assert said(known, "has no data sheet of") == []


@pytest.mark.parametrize(
    ("capability", "gib", "like"),
    [
        ((8, 9), 8, "RTX 4060 Laptop"), ((8, 9), 23, "L2"), ((7, 5), 16, "T4"), ((12, 0), 32, "RTX 5090 D"), ((8, 8), 8, None), ((13, 0), 8, None),
        ((8, 6), 2000, "RTX A6000"), (None, 8, None), ((6, 1), None, "GTX 1050"), ((3, 0), 4, "K80"),
    ],
)  # fmt: skip
def test_the_slowest_of_its_generation_and_memory_stands_in_its_place(
    capability: tuple[int, int] | None, gib: float | None, like: str | None
) -> None:
    found = card_guess.slowest_like(capability, None if gib is None else int(gib * GIB))
    assert found in CARDS
    if capability is not None:
        assert found.compute_capability <= max(capability, (3, 7))
    peers = [card for card in CARDS if card.compute_capability == found.compute_capability and gib and card.memory_bytes >= gib * GIB]
    assert all(found.peak_flops <= card.peak_flops for card in peers if capability)
    assert like is None or found.name == like


def seen_with(**card: Any) -> Evidence:
    return healthy.card(healthy.gpu(), "laptop", **card)


def test_a_node_that_says_its_generation_is_guessed_by_it_until_a_run_has_measured_it() -> None:
    made = make(seen_with(name=UNKNOWN, compute_capability="8.6", memory_total_bytes=8 * GIB), healthy.recipe())
    (line,) = said(made, "has no data sheet of")
    assert "generation 8.6" in line and "Some Card of laptop" in line


@pytest.mark.parametrize(("gib", "is_said"), [(8, False), (4.5, False), (16, False), (64, True), (1, True)])
def test_a_card_that_lies_of_its_memory_is_planned_with_and_said(gib: float, is_said: bool) -> None:
    made = make(seen_with(name="NVIDIA GeForce RTX 4060 Ti", memory_total_bytes=int(gib * GIB), memory_used_bytes=0), healthy.recipe())
    lines = said(made, "but this card has 8.0 GiB")
    assert bool(lines) is is_said and all("nvidia-smi says" in line and "RTX 4060 Ti of laptop" in line for line in lines)


def test_an_owner_who_writes_an_impossible_memory_is_told() -> None:
    (line,) = said(offline(("RTX 4090", 24), ("RTX 4060 Ti", 64)), "but this card has")
    assert line.startswith("RTX 4060 Ti of n1: cluster.toml says 63.7 GiB") and "edit gpus of n1" in line


def test_two_cards_of_one_name_and_unlike_memory_are_two_cards() -> None:
    seen = healthy.gpu(healthy.recipe(), names=("tower",))
    first = as_json(seen.facts["tower"].gpu.cards[0]) | {
        "name": "NVIDIA GeForce RTX 3060",
        "uuid": None,
        "power_limit_w": None,
        "memory_used_bytes": 0,
    }
    cards = [{**first, "index": index, "memory_total_bytes": size * GIB} for index, size in enumerate((12, 8))]
    made = make(healthy.with_node(healthy.with_facts(seen, "tower", gpu={"cards": cards}), "tower", gpus=()), healthy.recipe())
    assert [rank.memory.available_bytes for rank in made.ranks if rank.memory] == [12 * GIB, 8 * GIB]
    assert made.time is not None and said(made, "but this card has") == []


def test_a_card_of_which_the_driver_tells_its_name_alone_is_planned_by_its_data_sheet() -> None:
    """A driver that knows no field of ours: no memory, no power, no capability."""
    card = {"index": 0, "name": "NVIDIA GeForce RTX 3090"}
    seen = healthy.with_facts(healthy.gpu(healthy.recipe(), names=("tower",)), "tower", gpu={"cards": [card], "torch": None})
    made = make(healthy.with_node(seen, "tower", gpus=()), healthy.recipe())
    (rank,) = made.ranks
    assert made.precision == "bf16" and made.time is not None and made.time.ranks[0].source == "data sheet"
    assert rank.memory is not None and rank.memory.available_bytes is None and rank.memory.fits is None
    assert not [choice for choice in made.choices if choice.subject.startswith("power limit")]


@pytest.mark.parametrize(("wanted", "index"), [(8, 1), (12, 0), (10, 0)])
def test_of_two_cards_of_one_name_the_one_with_the_named_memory_is_taken(wanted: float, index: int) -> None:
    seen = healthy.gpu(healthy.recipe(), names=("tower",))
    first = as_json(seen.facts["tower"].gpu.cards[0]) | {"name": "NVIDIA GeForce RTX 3060", "memory_used_bytes": 0}
    cards = [{**first, "index": number, "uuid": f"GPU-{number}", "memory_total_bytes": size * GIB} for number, size in enumerate((12, 8))]
    seen = healthy.with_node(
        healthy.with_facts(seen, "tower", gpu={"cards": cards}), "tower", gpus=({"model": "RTX 3060", "vram_gb": wanted},)
    )
    (rank,) = make(seen, healthy.recipe()).ranks
    assert rank.card == f"GPU-{index}"
