"""What one rank holds where a model is divided over ranks (`homelab.worker.sharding`): the items of a whole model, changed.

    per step   what is trained is divided: fp32 weights, optimizer. For the passes of a step all of it is gathered, linear layers in the
               training precision, and the gradient is held whole in fp32 until the last pass
    per pass   every weight but 4-bit ones is divided, with gradient and optimizer; gathered are embeddings, head and norms, for the whole
               pass, and two blocks: the one that computes and the next

Sources: torch/distributed/fsdp/_fully_shard (2.13); measured: live storages of three ranks (`scripts/bench sharding`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from homelab.config.recipe import Method
from homelab.planning.memory.activations import width
from homelab.planning.memory.architecture import Architecture
from homelab.protocol.memory_items import (
    ADAPTERS,
    BASE_WEIGHTS,
    CASTED_WEIGHTS,
    EXCHANGED,
    GATHERED,
    GRADIENTS,
    OPTIMIZER,
)

_FP32 = 4
_BLOCKS = 2  # gathered at a time


@dataclass(frozen=True)
class Division:
    """Over how many ranks a model is divided; 1: every rank has all of it. `per_pass`: gathered for every pass, not once per step."""

    parts: int = 1
    per_pass: bool = False


WHOLE = Division()


def of(strategy: str, nodes: Collection[str]) -> Division:
    """The division of this strategy, with the node of every rank."""
    if strategy == "zero2":
        return Division(len(nodes))
    if strategy in ("zero3", "fsdp"):
        return Division(len(nodes), per_pass=True)
    if strategy == "hsdp":
        return Division(len(nodes) // len(set(nodes)), per_pass=True)
    return WHOLE


def divided(
    sizes: Mapping[str, int], shape: Architecture, method: Method, precision: str, trainable: int, division: Division
) -> dict[str, int]:  # fmt: skip
    """The items of one rank in bytes, from those of a whole model. `trainable`: parameters that are trained."""
    parts = division.parts
    if parts == 1:
        return dict(sizes)
    full, narrow = method.kind == "full", width(precision)
    stored = _FP32 if full else narrow
    ends = shape.embedding_parameters + shape.head_parameters
    block = shape.linear_parameters // shape.layers
    items = dict(sizes)
    items[OPTIMIZER] = sizes[OPTIMIZER] // parts
    items[ADAPTERS] = sizes.get(ADAPTERS, 0) // parts
    if division.per_pass:
        sharded_blocks = 0 if method.kind == "qlora" else _BLOCKS * stored * block
        whole = sizes[BASE_WEIGHTS] - stored * (shape.total - (shape.linear_parameters if method.kind == "qlora" else 0))
        items[BASE_WEIGHTS] = max(0, whole) + (sizes[BASE_WEIGHTS] - max(0, whole)) // parts
        own = _FP32 * (trainable - ends if full else trainable) // shape.layers  # of a block
        items[GATHERED] = stored * ends + sharded_blocks + (0 if full else _BLOCKS * own)
        items[GRADIENTS] = sizes[GRADIENTS] // parts
        items[EXCHANGED] = 3 * own  # the block's gradient, all of it in one piece, and what came from the others
        return items
    linear = shape.linear_parameters if full else trainable
    items[BASE_WEIGHTS] = sizes[BASE_WEIGHTS] // parts if full else sizes[BASE_WEIGHTS]
    items[GATHERED] = narrow * linear + (_FP32 * (trainable - linear) if full else 0)
    items[EXCHANGED] = 2 * _FP32 * (max(block, ends) if full else trainable // shape.layers)
    if precision != "fp32":  # gathered in 16 bits, but for a head
        items[CASTED_WEIGHTS] = min(sizes.get(CASTED_WEIGHTS, 0), narrow * shape.vocabulary * shape.hidden) if full else 0
    return items
