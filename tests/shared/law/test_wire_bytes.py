"""What PowerSGD sends of a matrix, and from which step on."""

from __future__ import annotations

import pytest

from homelab.shared.law import wire_bytes


def test_what_powersgd_sends_of_a_matrix() -> None:
    assert wire_bytes.powersgd_elements(1024, 1024) == 4 * 2048
    assert wire_bytes.powersgd_elements(8, 4096) == 8 * 4096, "as narrow as the products: it goes as it is"
    assert wire_bytes.powersgd_elements(16, 4096) == 4 * 4112
    assert wire_bytes.powersgd_elements(1, 1) == 1


@pytest.mark.parametrize(("steps", "warmup", "resume", "first"), [(100, 5, 0, 10), (100, 30, 0, 30), (100, 30, 25, 5), (10, 0, 0, 2), (100, 5, 60, 2)])  # fmt: skip
def test_powersgd_begins_after_a_tenth_and_the_warm_up_and_never_at_once(steps: int, warmup: int, resume: int, first: int) -> None:
    assert wire_bytes.uncompressed_steps(steps, warmup, resume) == first
