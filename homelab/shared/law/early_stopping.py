"""Which weights become the model, and when more steps no longer help: decided by the losses over the held-out rows alone. Pure."""

from __future__ import annotations

from collections.abc import Mapping

# Nats per token. Another cluster adds the same numbers in another order, so its losses differ in the last digits: a gain of that size is none.
# Measured: in fp32 losses of one and of three ranks differ by at most 3e-6 of the loss (tests/worker/training/test_law.py).
LEAST_GAIN = 1e-4


def best_step(losses: Mapping[int, float]) -> int | None:
    """The step with the best of these losses (nats per token, by step); None without one. Step 0, before the training, is not a choice.

    A later step is better only where its loss is lower by more than LEAST_GAIN.
    """
    best = None
    for step in sorted(losses):
        if step > 0 and (best is None or losses[step] < losses[best] - LEAST_GAIN):
            best = step
    return best


def why_over(losses: Mapping[int, float], patience: int) -> str | None:
    """The reason to stop where `patience` evaluations in a row after the best one brought no better loss, else None. Never with a patience of 0."""
    best = best_step(losses)
    if patience == 0 or best is None or sum(step > best for step in losses) < patience:
        return None
    return f"{patience} evaluations since step {best} had no lower loss over the held-out rows ({losses[best]:.4f})"
