"""Every card of the table has a class, and cards of one generation and line have the same one."""

from __future__ import annotations

import pytest

from homelab.controller.base.hardware import CARDS, lookup
from homelab.controller.planning.speed import roofline


def test_no_card_of_the_table_is_without_a_class() -> None:
    assert [card.name for card in CARDS if roofline.part_of_peak(card) == roofline._OTHERS] == []


@pytest.mark.parametrize(
    ("names", "of_peak"),
    [
        (("RTX 3060", "RTX 4090", "RTX 5070 Ti Laptop", "NVIDIA GeForce RTX 3090"), 0.62), (("L4", "T4"), 0.165), (("L40S", "RTX 6000 Ada"), 0.23), (("A10",), 0.28),
        (("A100-SXM4-80GB", "V100"), 0.43), (("Quadro RTX 6000", "TITAN RTX"), 0.25), (("GTX 1080 Ti", "P40"), 0.75), (("H100", "GH200"), 0.25), (("RTX A6000",), 0.38),
    ],
)  # fmt: skip
def test_names_that_begin_alike_are_not_one_card(names: tuple[str, ...], of_peak: float) -> None:
    """An L40S is no L4, an A100 no A10, a Quadro RTX 6000 no RTX 6000 Ada."""
    for name in names:
        card = lookup(name)
        assert card is not None and roofline.part_of_peak(card) == of_peak, name
