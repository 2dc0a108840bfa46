"""The table of cards: many spellings, one card; unknown is unknown."""

from __future__ import annotations

import pytest

from homelab.controller.base.hardware import CARDS, lookup, usable_bytes

GIB = 2**30


@pytest.mark.parametrize(
    ("written", "name", "architecture", "memory_gib", "has_bf16"),
    [
        ("NVIDIA GeForce RTX 3070 Ti", "RTX 3070 Ti", "sm_86", 8, True),
        ("rtx3070ti", "RTX 3070 Ti", "sm_86", 8, True),
        ("3070 Ti", "RTX 3070 Ti", "sm_86", 8, True),
        ("NVIDIA GeForce RTX 3070 Ti Laptop GPU", "RTX 3070 Ti Laptop", "sm_86", 8, True),
        ("RTX 4070", "RTX 4070", "sm_89", 12, True),
        ("RTX 4070 Laptop", "RTX 4070 Laptop", "sm_89", 8, True),
        ("GeForce RTX 4070 Mobile", "RTX 4070 Laptop", "sm_89", 8, True),
        ("RTX 4070 Ti SUPER", "RTX 4070 Ti Super", "sm_89", 16, True),
        ("RTX 5070 Ti", "RTX 5070 Ti", "sm_120", 16, True),
        ("NVIDIA GeForce RTX 5070 Ti Laptop GPU", "RTX 5070 Ti Laptop", "sm_120", 12, True),
        ("RTX 4060 Ti (16 GB)", "RTX 4060 Ti 16GB", "sm_89", 16, True),
        ("NVIDIA A10", "A10", "sm_86", 24, True),
        ("NVIDIA A10G", "A10G", "sm_86", 24, True),
        ("NVIDIA L40S", "L40S", "sm_89", 48, True),
        ("NVIDIA H100 80GB HBM3", "H100", "sm_90", 80, True),
        ("NVIDIA H100 PCIe", "H100 PCIe", "sm_90", 80, True),
        ("NVIDIA H200", "H200", "sm_90", 141, True),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", "sm_80", 80, True),
        ("NVIDIA A100-PCIE-40GB", "A100", "sm_80", 40, True),
        ("Tesla T4", "T4", "sm_75", 16, False),
        ("Tesla V100-PCIE-32GB", "V100 PCIe", "sm_70", 32, False),
        ("NVIDIA GeForce GTX 1080 Ti", "GTX 1080 Ti", "sm_61", 11, False),
        ("GeForce RTX 2070 with Max-Q Design", "RTX 2070 Laptop", "sm_75", 8, False),
        ("Quadro RTX 6000", "RTX 6000", "sm_75", 24, False),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada", "sm_89", 48, True),
        ("A6000", "RTX A6000", "sm_86", 48, True),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "RTX PRO 6000 Blackwell Max-Q", "sm_120", 96, True),
        ("NVIDIA GB10", "GB10", "sm_121", 128, True),
        ("DGX Spark", "GB10", "sm_121", 128, True),
        ("NVIDIA GH200 480GB", "GH200 480GB", "sm_90", 96, True),
        ("NVIDIA A100-SXM-64GB", "A100 64GB", "sm_80", 64, True),
        ("NVIDIA A800-SXM4-80GB", "A800", "sm_80", 80, True),
        ("NVIDIA A800 40GB Active", "A800 40GB", "sm_80", 40, True),
        ("NVIDIA B300 SXM6 AC", "B300", "sm_103", 268, True),
        ("NVIDIA RTX A2000 Laptop GPU", "RTX A2000 Laptop", "sm_86", 4, True),
        ("NVIDIA RTX 5000 Ada Generation Laptop GPU", "RTX 5000 Ada Laptop", "sm_89", 16, True),
        ("NVIDIA RTX PRO 5000 Blackwell Generation Laptop GPU", "RTX PRO 5000 Blackwell Laptop", "sm_120", 24, True),
        ("NVIDIA RTX PRO 4000 Blackwell SFF Edition", "RTX PRO 4000 Blackwell SFF", "sm_120", 24, True),
        ("Quadro RTX 5000 with Max-Q Design", "RTX 5000 Laptop", "sm_75", 16, False),
        ("NVIDIA GeForce RTX 2080 Super with Max-Q Design", "RTX 2080 Super Laptop", "sm_75", 8, False),
        ("NVIDIA GeForce RTX 2050", "RTX 2050", "sm_86", 4, True),
        ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", "RTX 3050 6GB Laptop", "sm_86", 6, True),
        ("NVIDIA GeForce RTX 4090 D", "RTX 4090 D", "sm_89", 24, True),
        ("5090D v2", "RTX 5090 D V2", "sm_120", 24, True),
        ("NVIDIA TITAN X (Pascal)", "TITAN X Pascal", "sm_61", 12, False),
        ("GeForce GTX TITAN X", "GTX TITAN X", "sm_52", 12, False),
        ("Tesla M40 24GB", "M40", "sm_52", 24, False),
        ("Quadro P6000", "P6000", "sm_61", 24, False),
        ("Tesla P100-PCIE-12GB", "P100 PCIe 12GB", "sm_60", 12, False),
        ("Orin (nvgpu)", "Orin", "sm_87", 8, True),
        ("NVIDIA Jetson AGX Thor Developer Kit", "AGX Thor", "sm_110", 128, True),
    ],
)
def test_spellings(written: str, name: str, architecture: str, memory_gib: int, has_bf16: bool) -> None:
    card = lookup(written)
    assert card is not None
    assert (card.name, card.architecture, card.compute_capability >= (8, 0)) == (name, architecture, has_bf16)
    assert card.memory_bytes == memory_gib * GIB


@pytest.mark.parametrize(
    "written", ["", "NVIDIA", "RTX", "GPU", "RTX 9999", "AMD Radeon RX 7900 XTX", "RTX 4070 Extreme", "RTX A2500 Laptop GPU", "llvmpipe"]
)
def test_unknown_is_none(written: str) -> None:
    assert lookup(written) is None


def test_every_card_is_found_by_its_own_name_and_as_nvidia_smi_would_say_it() -> None:
    for card in CARDS:
        assert lookup(card.name) == card
        assert lookup(f"NVIDIA GeForce {card.name.upper()}" + (" GPU" if card.laptop else "")) == card


# These have the higher clock on their data sheets.
FASTER_THAN_THE_DESKTOP_CARD = ("RTX 5050 Laptop", "RTX 3050 6GB Laptop", "RTX A1000 6GB Laptop")


def test_a_laptop_card_is_never_faster_than_its_desktop_sister() -> None:
    laptops = [card for card in CARDS if card.laptop]
    assert len(laptops) >= 40
    for card in laptops:
        desktop = lookup(card.name.removesuffix(" Laptop"))
        if desktop is not None and card.name not in FASTER_THAN_THE_DESKTOP_CARD:
            assert card.peak_flops < desktop.peak_flops or card.memory_bytes != desktop.memory_bytes


def test_values_are_of_a_possible_size() -> None:
    for card in CARDS:
        assert 1e12 < card.peak_flops < 3e15 and 6e10 < card.bandwidth_bytes_per_s < 1e13 and card.memory_bytes >= 2 * GIB


def test_a_newer_card_of_one_line_and_number_is_faster() -> None:
    """GeForce desktop cards of one rank (80, 70 Ti), generation by generation: a slip of a digit shows."""
    for rank in ("60 Ti", "70", "70 Ti", "80", "90"):
        line = [card for series in (20, 30, 40, 50) if (card := lookup(f"RTX {series}{rank}"))]
        assert [card.peak_flops for card in line] == sorted(card.peak_flops for card in line), rank


# nvidia-smi's total in MiB, as machines have answered.
ANSWERED = {
    "Tesla T4": 15360, "NVIDIA L4": 23034, "NVIDIA A10": 23028, "NVIDIA A10G": 23028, "NVIDIA L40S": 46068, "NVIDIA H100 80GB HBM3": 81559,
    "NVIDIA A100-SXM4-80GB": 81920, "NVIDIA GeForce RTX 4090": 24564, "NVIDIA GeForce RTX 3090": 24576, "NVIDIA GeForce RTX 5070 Ti": 16303,
    "NVIDIA GeForce RTX 4070 Laptop GPU": 8188, "NVIDIA GeForce RTX 5090": 32607, "NVIDIA RTX 6000 Ada Generation": 49140, "NVIDIA GB10": 124621,
}  # fmt: skip


@pytest.mark.parametrize("name", ANSWERED)
def test_usable_memory_is_what_nvidia_smi_answers(name: str) -> None:
    card = lookup(name)
    assert card is not None
    usable = usable_bytes(name, card.memory_bytes)
    assert -0.006 < usable / (ANSWERED[name] * 2**20) - 1 < 0.001, "a little less than there is, never more than a thousandth above"
    assert usable_bytes(name, ANSWERED[name] * 2**20) <= ANSWERED[name] * 2**20, (
        "an owner who wrote what nvidia-smi says is believed, and nothing goes off twice"
    )


def test_another_size_than_the_one_sold_first_loses_the_same_part() -> None:
    assert usable_bytes("Tesla T4", 15 * GIB) == 15 * GIB
    assert usable_bytes("RTX 2080 Ti", 22 * GIB) == int(22 * GIB * 0.995), "memory that someone doubled"
    assert usable_bytes("Tesla M40", 24 * GIB) == 24 * GIB * 15 // 16
    assert usable_bytes("Some Card", 8 * GIB) == int(8 * GIB * 0.995)
