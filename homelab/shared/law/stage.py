"""What one rank of a pipeline holds: the planner decides it, the worker loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Where config.json says how many experts a layer has.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# The edit that turns off a router's own loss.
ROUTER_LOSS_OFF = "set output_router_logits to false in the model's config.json on every node (this changes the training, too)"


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether this config.json (of the text model, where it has several parts) is that of a mixture of experts."""
    return any(isinstance(count := config.get(name), int) and count > 1 for name in EXPERT_COUNTS)


def why_not_in_stages(config: Mapping[str, Any]) -> str | None:
    """Why a pipeline does not train the mixture of experts of this config.json (as in `has_experts`); None where it does, and for any other model."""
    if has_experts(config) and config.get("output_router_logits"):
        return "its router has its own loss (output_router_logits in config.json), which is not a sum over tokens"
    return None


@dataclass(frozen=True)
class Stage:
    """The layers `begin` to `end` (not included) of `layers`, and where the stage stands. `work`: its part of what a pass of the whole model
    computes; `in_flight` as in `homelab.shared.law.pipeline_schedule`."""

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
