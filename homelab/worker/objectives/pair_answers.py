"""What an objective sees of a pass: of each of its pairs, how probable the model finds the two answers. Pure."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Answers(NamedTuple):
    """One side of the pairs of a pass, each of shape [pairs]: the summed log-probability (nats) of an answer's tokens, how many they are, and what the base
    model gives to them (0 where the objective does not ask)."""

    summed: torch.Tensor
    tokens: torch.Tensor
    reference: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """Of one token."""
        return self.summed / self.tokens

    @property
    def moved(self) -> torch.Tensor:
        """How much more probable the answer has become since the base."""
        return self.summed - self.reference
