"""The one build of torch for all nodes, as a table of fleets."""

from __future__ import annotations

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.facts.node import Facts
from homelab.controller.planning.environment.torch_choice import fleet_build

PASCAL = ("NVIDIA GeForce GTX 1080", "6.1")
TURING = ("NVIDIA GeForce RTX 2080", "7.5")
ADA = ("NVIDIA GeForce RTX 4070 Laptop GPU", "8.9")
BLACKWELL = ("NVIDIA GeForce RTX 5070 Ti", "12.0")
NONE = ("", "")
Machine = tuple[tuple[str, str], str | None]


def facts(*machines: Machine) -> dict[str, Facts]:
    """Nodes n0, n1, ... with one card (name, compute capability) and a driver each."""
    return {f"n{number}": one(f"n{number}", card, driver) for number, (card, driver) in enumerate(machines)}


def one(name: str, card: tuple[str, str], driver: str | None) -> Facts:
    cards = [{"index": 0, "name": card[0], "compute_capability": card[1]}] if card[0] else []
    return Facts.model_validate({"node": name, "gpu": {"nvidia_smi": "ok", "cards": cards, "driver_version": driver}})


@pytest.mark.parametrize(
    ("machines", "requirement", "is_on_pypi"),
    [
        ([(TURING, "580.65.06"), (BLACKWELL, "590.1")], "torch==2.13.0", True),
        ([(ADA, "580.65.06"), (NONE, None)], "torch==2.13.0", True),
        ([(BLACKWELL, None)], "torch==2.13.0", True),  # the driver is not known
        ([(BLACKWELL, "570.133.07")], "torch==2.11.0+cu128", False),
        ([(BLACKWELL, "570.133.07"), (ADA, "590.1")], "torch==2.11.0+cu128", False),
        ([(ADA, "550.54")], "torch==2.13.0+cu126", False),
        ([(PASCAL, "580.65.06"), (ADA, "580.65.06")], "torch==2.13.0+cu126", False),
        ([(NONE, None)], "torch==2.13.0+cpu", False),
        ([], "torch==2.13.0+cpu", False),
    ],
)
def test_one_build_for_all(machines: list[Machine], requirement: str, is_on_pypi: bool) -> None:
    choice = fleet_build(facts(*machines))
    assert choice.requirement == requirement and (choice.index is None) == is_on_pypi and choice.because


def test_an_older_release_is_chosen_with_the_way_to_the_newer_one() -> None:
    because = fleet_build(facts((BLACKWELL, "570.133.07"), (ADA, "590.1"))).because
    assert "driver 570 (n0)" in because and "torch 2.13.0 needs driver 580 or newer on n0" in because


def test_no_build_has_code_for_pascal_and_blackwell() -> None:
    with pytest.raises(HomelabError) as caught:
        fleet_build(facts((PASCAL, "570.1"), (BLACKWELL, "580.65.06")))
    assert caught.value.message == "no build of torch has code for sm_61 and sm_120 at once"
    assert caught.value.where == "node n0: driver 570.1, NVIDIA GeForce GTX 1080; node n1: driver 580.65.06, NVIDIA GeForce RTX 5070 Ti"
    assert "homelab setup --check" in caught.value.hint


def test_a_driver_that_is_too_old_for_all() -> None:
    with pytest.raises(HomelabError) as caught:
        fleet_build(facts((TURING, "470.1"), (ADA, "580.65.06")))
    assert "the driver of n0" in caught.value.message and "driver 525 or newer on n0" in caught.value.hint
