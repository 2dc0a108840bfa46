"""How fast a rank computes: seconds = a + b x tokens for each forward and backward pass, and a fixed part per optimizer step.

A guess also knows the host: it starts a card's kernels one after the other, and a pass cannot end before all are started.

The worker measures with it, the planner predicts with it. Units: seconds, and tokens of input with padding, because a padded token costs
what any other does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Speed:
    """The cost of one rank: `step_s` per optimizer step (optimizer, loader), `micro_batch_s` per forward and backward pass, `token_s` per token.

    `floor_s`: the least that a pass takes, whatever it holds. A measured speed has none: there it is a part of `micro_batch_s`.
    """

    step_s: float
    micro_batch_s: float
    token_s: float
    floor_s: float = 0.0

    def pass_s(self, tokens: float) -> float:
        """Seconds of one forward and backward pass over so many tokens."""
        seconds = self.micro_batch_s + self.token_s * tokens
        return seconds if seconds > self.floor_s else self.floor_s  # `max` takes twice as long, and a plan asks millions of times

    def seconds(self, micro_batches: Sequence[int]) -> float:
        """Seconds of one optimizer step whose micro-batches hold these numbers of tokens."""
        return self.step_s + sum(map(self.pass_s, micro_batches))

    def slower(self, factor: float) -> Speed:
        """The speed of a rank that needs `factor` times as long for everything."""
        return Speed(self.step_s * factor, self.micro_batch_s * factor, self.token_s * factor, self.floor_s * factor)
