"""`[parallel]`: how the work is divided. The rank of a node, its address and its share of the work belong to the plan. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from homelab.shared.law.wire_bytes import BUCKET_MB
from homelab.shared.markers import AtLeast, AtMost, Holds, OneOf

# What a recipe may name; a strategy that is registered adds its own.
STRATEGY_NAMES = ["auto", "ddp", "fsdp", "hsdp", "pipeline", "zero2", "zero3"]
StrategyName = Annotated[str, OneOf(STRATEGY_NAMES)]


def _shares_positive(shares: Any) -> Any:
    if isinstance(shares, dict) and (min(shares.values(), default=-1) < 0 or not any(shares.values())):
        raise ValueError("samples per global batch for every node, 0 or more each and not 0 for all, e.g. { tower = 6, laptop = 4 }")
    return shares


def _bucket_positive(bucket_mb: Any) -> Any:
    if isinstance(bucket_mb, float) and not 0 < bucket_mb <= 100_000:
        raise ValueError('megabytes of gradient for each reduction, more than 0, or "auto"')
    return bucket_mb


def _micro_batch_positive(micro_batch: Any) -> Any:
    if isinstance(micro_batch, int) and micro_batch < 1:
        raise ValueError('rows per forward pass, 1 or more, or "auto"')
    return micro_batch


@dataclass(frozen=True)
class Parallel:
    """How the work is spread. None of it changes the training, but `compress`, which rounds gradients on the wire; the plan says so."""

    strategy: StrategyName = "auto"
    shares: Annotated[Literal["auto", "equal"] | dict[str, int], Holds(_shares_positive)] = "auto"
    micro_batch: Annotated[Literal["auto"] | int, Holds(_micro_batch_positive)] = "auto"
    compress: Literal["none", "bf16", "powersgd"] = "none"
    bucket_mb: Annotated[Literal["auto"] | float, Holds(_bucket_positive)] = "auto"
    port: Annotated[int, AtLeast(1024), AtMost(65535)] = 29500

    @property
    def bucket_size_mb(self) -> float:
        """Of DDP's buckets."""
        return BUCKET_MB if self.bucket_mb == "auto" else float(self.bucket_mb)
