"""How fast a rank computes: seconds = a + b x tokens for each forward and backward pass, and a fixed part per optimizer step.

Pure and standard library only: the worker measures with it, the plan predicts with it. Units: seconds and tokens of input, padding
included, because a padded token costs what any other does.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Speed:
    """One rank's cost: `step_s` per optimizer step (optimizer, loader), `micro_batch_s` per forward and backward pass, `token_s` per token."""

    step_s: float
    micro_batch_s: float
    token_s: float

    def seconds(self, micro_batches: Sequence[int]) -> float:
        """Seconds of one optimizer step whose micro-batches hold so many tokens each (rows x longest row)."""
        return self.step_s + self.micro_batch_s * len(micro_batches) + self.token_s * sum(micro_batches)

    def slower(self, factor: float) -> Speed:
        """The same rank taking `factor` times as long for everything."""
        return Speed(self.step_s * factor, self.micro_batch_s * factor, self.token_s * factor)


def file_name(model: str, kind: str) -> str:
    """Name of the file of measured speeds of a model (hub id or folder) and a method, e.g. `smollm2-135m-instruct-lora.json`."""
    last = model.rstrip("/").rsplit("/", 1)[-1].lower()
    return f"{re.sub(r'[^a-z0-9._-]+', '-', last) or 'model'}-{kind}.json"
