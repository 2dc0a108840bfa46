"""`[parallel]`: how the work is divided. The rank of a node, its address and its share of the work belong to the plan."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator
from pydantic_core import PydanticCustomError

from homelab.controller.base.models import ConfigModel

# What a recipe may name.
STRATEGY_NAMES = ["auto", "ddp", "fsdp", "hsdp", "pipeline", "zero2", "zero3"]


def _is_strategy(name: str) -> str:
    if name not in STRATEGY_NAMES:
        *others, last = (repr(allowed) for allowed in STRATEGY_NAMES)
        expected = f"{', '.join(others)} or {last}"
        raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
    return name


StrategyName = Annotated[str, AfterValidator(_is_strategy)]


class Parallel(ConfigModel):
    """How the work is spread. None of it changes the training, but `compress`, which rounds gradients on the wire; the plan says so.

    `bucket_mb`: with ddp, megabytes (2^20 bytes) of gradient that are reduced together; "auto" is torch's 25, after a first one of 1.
    """

    strategy: StrategyName = "auto"
    shares: Literal["auto", "equal"] | dict[str, int] = "auto"
    micro_batch: Literal["auto"] | int = "auto"
    compress: Literal["none", "bf16", "powersgd"] = "none"
    bucket_mb: Literal["auto"] | float = "auto"
    port: int = Field(default=29500, ge=1024, le=65535)

    @field_validator("shares")
    @classmethod
    def _shares_positive(cls, shares: Any) -> Any:
        if isinstance(shares, dict) and (min(shares.values(), default=-1) < 0 or not any(shares.values())):
            raise ValueError("samples per global batch for every node, 0 or more each and not 0 for all, e.g. { tower = 6, laptop = 4 }")
        return shares

    @field_validator("bucket_mb")
    @classmethod
    def _bucket_positive(cls, bucket_mb: Any) -> Any:
        if isinstance(bucket_mb, float) and not 0 < bucket_mb <= 100_000:
            raise ValueError('megabytes of gradient that are reduced together, more than 0, or "auto"')
        return bucket_mb

    @field_validator("micro_batch")
    @classmethod
    def _micro_batch_positive(cls, micro_batch: Any) -> Any:
        if isinstance(micro_batch, int) and micro_batch < 1:
            raise ValueError('rows per forward pass, 1 or more, or "auto"')
        return micro_batch
