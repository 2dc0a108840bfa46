"""Numbers with their units: the powers a person expects, and the ends of each range."""

from __future__ import annotations

import pytest

from homelab.controller.base import units


@pytest.mark.parametrize(("size_bytes", "text"), [(999, "999 bytes"), (1000, "1.0 kB"), (1_240_000, "1.2 MB"), (5_000_000_000, "5.0 GB")])
def test_files_count_in_powers_of_ten(size_bytes: int, text: str) -> None:
    assert units.decimal_size(size_bytes) == text


def test_memory_counts_in_powers_of_two() -> None:
    assert units.binary_size(8 * 2**30) == "8.0 GiB"
    assert units.memory_gb(7.6 * 2**30) == "7.6"
    assert units.memory_gb(16 * 2**30, 0) == "16"


def test_gigabytes_count_in_powers_of_ten() -> None:
    assert units.gigabytes(1_250_000_000) == "1.2"


def test_names_in_a_row() -> None:
    assert units.listed([]) == ""
    assert units.listed(["tower"]) == "tower"
    assert units.listed(["tower", "laptop", "oldtower"]) == "tower, laptop and oldtower"
