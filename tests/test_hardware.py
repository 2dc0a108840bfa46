"""The table of cards: many spellings, one card; unknown is unknown."""

from __future__ import annotations

import pytest

from homelab.hardware import CARDS, lookup

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
    ],
)
def test_spellings(written: str, name: str, architecture: str, memory_gib: int, has_bf16: bool) -> None:
    card = lookup(written)
    assert card is not None
    assert (card.name, card.architecture, card.compute_capability >= (8, 0)) == (name, architecture, has_bf16)
    assert card.memory_bytes == memory_gib * GIB


@pytest.mark.parametrize(
    "written",
    [
        "",
        "NVIDIA",
        "RTX",
        "GPU",
        "RTX 9999",
        "AMD Radeon RX 7900 XTX",
        "RTX 4070 Extreme",
        "RTX A2000 Laptop GPU",
        "llvmpipe",
    ],
)
def test_unknown_is_none(written: str) -> None:
    assert lookup(written) is None


def test_every_card_is_found_by_its_own_name_and_as_nvidia_smi_would_say_it() -> None:
    for card in CARDS:
        assert lookup(card.name) == card
        assert lookup(f"NVIDIA GeForce {card.name.upper()}" + (" GPU" if card.laptop else "")) == card


def test_a_laptop_card_is_never_faster_than_its_desktop_sister() -> None:
    laptops = [card for card in CARDS if card.laptop]
    assert len(laptops) >= 15
    for card in laptops:
        desktop = lookup(card.name.removesuffix(" Laptop"))
        if desktop is not None and card.name != "RTX 5050 Laptop":  # that one has the higher clock on its data sheet
            assert card.peak_flops < desktop.peak_flops or card.memory_bytes != desktop.memory_bytes


def test_values_are_of_a_possible_size() -> None:
    for card in CARDS:
        assert (
            1e12 < card.peak_flops < 3e15 and 1e11 < card.bandwidth_bytes_per_s < 1e13 and card.memory_bytes >= 2 * GIB
        )
