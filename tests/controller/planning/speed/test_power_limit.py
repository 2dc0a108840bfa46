"""A card that may not draw the power of its data sheet is guessed slower, and the plan says so; where nobody knows its limit, nothing is said."""

from __future__ import annotations

import pytest

from homelab.controller.base.data_sheets import LAPTOP_W
from homelab.controller.base.hardware import lookup
from homelab.controller.planning.speed import power_limit
from homelab.controller.planning.types import Choice, Plan
from tests.controller.checks import healthy
from tests.controller.planning.test_plan import make

ROWS = {"train": {"global_batch": 64, "steps": 10, "learning_rate": 1e-3}}


def part(name: str, limit_w: float | None, default_w: float | None = None) -> float:
    card = lookup(name)
    assert card is not None
    return power_limit.limited(card, limit_w, default_w).peak_flops / card.peak_flops


@pytest.mark.parametrize(
    ("name", "limit_w", "default_w", "least", "most"),
    [
        ("RTX 4070 Laptop GPU", 35.0, 55.0, 0.50, 0.60),  # its data sheet: 1230 of 2175 MHz
        ("RTX 4070 Laptop GPU", 60.0, 60.0, 0.68, 0.75),  # 70 % in a published benchmark
        ("RTX 3090", 280.0, 350.0, 0.92, 0.97),  # over 95 %, Puget Systems
        ("RTX 3090", 230.0, 480.0, 0.77, 0.83),  # 80 %, published
        ("RTX 3090", 1.0, 350.0, 0.6, 0.75),
    ],
)  # fmt: skip
def test_the_speed_agrees_with_what_others_measured(name: str, limit_w: float, default_w: float, least: float, most: float) -> None:
    assert least <= part(name, limit_w, default_w) <= most


@pytest.mark.parametrize(
    ("name", "limit_w", "default_w"),
    [
        ("RTX 4070 Laptop GPU", None, None), ("RTX 4070 Laptop GPU", 115.0, 55.0), ("RTX 4070 Laptop GPU", 140.0, 80.0), ("RTX 3090", None, 350.0),
        ("RTX 3090", 280.0, None), ("RTX 3090", 400.0, 350.0), ("RTX 3090", 0.0, 350.0), ("RTX 3090", -5.0, 350.0), ("RTX 5000 Ada Laptop", 60.0, 80.0),
    ],
)  # fmt: skip
def test_where_no_limit_is_known_or_none_is_felt_the_data_sheet_stays(name: str, limit_w: float | None, default_w: float | None) -> None:
    assert part(name, limit_w, default_w) == 1.0


def test_every_watt_is_of_a_laptop_part_that_the_data_sheets_have() -> None:
    for name, watts in LAPTOP_W.items():
        card = lookup(name)
        assert card is not None and card.laptop and card.name == name and 30 <= watts <= 175


def limits(plan: Plan) -> list[Choice]:
    return [choice for choice in plan.choices if choice.subject.startswith("power limit")]


def test_a_laptop_with_half_of_its_power_gets_fewer_rows_and_the_plan_says_why() -> None:
    whole, half, silent = (
        make(healthy.card(healthy.gpu(), "laptop", power_limit_w=watts, power_limit_default_w=55.0), healthy.recipe(**ROWS))
        for watts in (115.0, 60.0, None)
    )
    (found,) = limits(half)
    assert (
        found.subject == "power limit, RTX 4070 Laptop of laptop"
        and found.value == "60 of 115 W"
        and "72% of its data sheet's speed" in found.because
    )
    assert half.ranks[1].share < whole.ranks[1].share and not limits(whole)
    assert silent.ranks == whole.ranks and not limits(silent)
