"""What one rank of a pipeline holds: the planner decides it, the worker loads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """The layers `begin` to `end` (not included) of `layers`, and where the stage stands. `work`: its part of what a pass of the whole model
    computes; `in_flight` as in `homelab.law.pipeline_schedule`."""

    number: int
    count: int
    begin: int
    end: int
    layers: int
    work: float = 1.0
    in_flight: int = 1

    @property
    def is_first(self) -> bool:
        """Whether it has the embeddings."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Whether it has the head and computes the loss."""
        return self.number == self.count - 1

    def holds(self, layer: int) -> bool:
        """Whether this layer is one of its own."""
        return self.begin <= layer < self.end
