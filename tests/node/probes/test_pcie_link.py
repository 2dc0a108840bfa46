"""The PCIe link of a card: what nvidia-smi tells of it, and what of that is believed."""

from __future__ import annotations

import re

import pytest

from homelab.controller.facts.node import Facts
from homelab.controller.facts.reading import read
from homelab.node.probes import nvidia
from homelab.shared.protocol.card_messages import GpuFacts
from tests.controller.checks.fake_gpu import REPLIES, reply

# (generation that card and slot can have together, lanes that work) of each card. The RTX 5070 Ti could have generation 5, its slot has 4.
LINKS: dict[str, list[tuple[int, int | None]]] = {
    "nvidia-smi-418-p4.xml": [(3, 16)],
    "nvidia-smi-470-power-brake.xml": [(4, 16)],
    "nvidia-smi-470-rtx3070ti.xml": [(4, 16)],
    "nvidia-smi-535-a100-mig.xml": [(4, 16)],
    "nvidia-smi-535-t4-errors.xml": [(3, 16)],
    "nvidia-smi-535-t4-pending.xml": [(3, 16)],
    "nvidia-smi-535-unknown-error.xml": [(4, None)],
    "nvidia-smi-550-a100-remap-failed.xml": [(4, 16)],
    "nvidia-smi-550-a100-remapped.xml": [(4, 16)],
    "nvidia-smi-550-busy.xml": [(4, 16)],
    "nvidia-smi-550-idle-hot.xml": [(4, 16)],
    "nvidia-smi-550-lost-one-of-two.xml": [(4, 16)],
    "nvidia-smi-550-thermal.xml": [(4, 16)],
    "nvidia-smi-550-two-rtx4090.xml": [(4, 16), (4, 4)],
    "nvidia-smi-570-rtx4070-laptop-battery.xml": [(4, 8)],
    "nvidia-smi-570-rtx4070-laptop.xml": [(4, 8)],
    "nvidia-smi-575-inforom.xml": [(4, 16)],
    "nvidia-smi-575-reset.xml": [(4, 16)],
    "nvidia-smi-575-rtx5070ti.xml": [(4, 16)],
    "nvidia-smi-580-gb10.xml": [(4, 1)],
    "nvidia-smi-580-thor.xml": [(4, 1)],
}


def cards_of(xml: str) -> list[GpuFacts]:
    """As the controller reads what the node sends."""
    return list(Facts.model_validate({"node": "tower", "gpu": nvidia.parse(xml)}).gpu.cards)


def test_each_recorded_reply_is_named_here() -> None:
    assert sorted(LINKS) == sorted(path.name for path in REPLIES.glob("nvidia-smi-*.xml"))


@pytest.mark.parametrize("name", LINKS)
def test_the_generation_is_what_card_and_slot_can_have_also_while_the_card_idles(name: str) -> None:
    assert [(card.pcie_generation, card.pcie_width) for card in cards_of(reply(name))] == LINKS[name]


@pytest.mark.parametrize(
    "text",
    ["N/A", "[N/A]", "[Unknown Error]", "Requested functionality has been deprecated", "", "0", "-1", "7", "999999999", "9" * 400, "fast"],
)
def test_a_generation_that_is_none_is_none_and_the_rest_of_the_card_is_there(text: str) -> None:
    xml = re.sub(r"<max_link_gen>[^<]*<", f"<max_link_gen>{text}<", reply("nvidia-smi-570-rtx4070-laptop.xml"))
    (card,) = cards_of(xml)
    assert card.pcie_generation is None and (card.pcie_width, card.name) == (8, "NVIDIA GeForce RTX 4070 Laptop GPU")


@pytest.mark.parametrize("text", ["N/A", "0x", "-8x", "33x", "4294967295x"])
def test_lanes_that_no_card_has_are_none(text: str) -> None:
    xml = re.sub(r"<(max|current)_link_width>[^<]*<", rf"<\1_link_width>{text}<", reply("nvidia-smi-570-rtx4070-laptop.xml"))
    (card,) = cards_of(xml)
    assert (card.pcie_generation, card.pcie_width, card.pcie_width_max) == (4, None, None)


def test_a_node_of_an_older_version_does_not_tell_the_generation() -> None:
    entry = nvidia.parse(reply("nvidia-smi-570-rtx4070-laptop.xml"))["cards"][0]
    del entry["pcie_generation"]
    card = read(GpuFacts, entry)
    assert (card.pcie_generation, card.pcie_width) == (None, 8)
    assert read(GpuFacts, {**entry, "pcie_generation": "four"}).pcie_generation is None
