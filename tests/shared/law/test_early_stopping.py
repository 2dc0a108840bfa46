"""Which evaluation is the best, and when the training is over."""

from __future__ import annotations

import pytest

from homelab.shared.law.early_stopping import LEAST_GAIN, best_step, why_over


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ({}, None),
        ({0: 1.0}, None),  # the untrained model is no choice
        ({0: 1.0, 10: 1.2}, 10),
        ({0: 3.0, 10: 2.0, 20: 1.5, 30: 1.6}, 20),
        ({10: 2.0, 20: 2.0 - LEAST_GAIN / 2}, 10),  # what another order of additions could make
        ({30: 1.6, 10: 2.0, 20: 1.5}, 20),  # whatever the order in which they came
    ],
)
def test_the_best_step(losses: dict[int, float], best: int | None) -> None:
    assert best_step(losses) == best


def test_rounding_of_another_cluster_changes_no_choice_among_equal_losses() -> None:
    losses = dict.fromkeys(range(10, 100, 10), 1.5)
    assert best_step({step: loss + 1e-6 * (step % 30) for step, loss in losses.items()}) == best_step(losses) == 10


def test_patience_counts_evaluations_since_the_best() -> None:
    losses = {0: 3.0, 10: 2.0, 20: 1.5, 30: 1.6}
    assert not why_over(losses, 0) and why_over(losses, 1) and not why_over(losses, 2)
    assert why_over(losses | {40: 1.5}, 2) and not why_over(losses | {40: 1.4}, 1)
    assert not why_over({0: 1.0}, 1)
