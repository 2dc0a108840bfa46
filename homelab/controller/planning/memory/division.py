"""What one rank holds where a model is divided over ranks (`homelab.worker.strategies.sharded`): the items of a whole model, changed.

    per step   what is trained is divided: fp32 weights, optimizer. For the passes of a step all of it is gathered, linear layers in the
               training precision, and the gradient is held whole in fp32 until the last pass
    per pass   every weight but quantised ones is divided, with gradient and optimizer; gathered are embeddings, head and norms, for the whole
               pass, and two blocks: the one that computes and the next

Sources: torch/distributed/fsdp/_fully_shard (2.13); measured: live storages of three ranks (homelab/docs/evidence.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from homelab.controller.planning.memory.activations import width
from homelab.controller.planning.model.architecture import Architecture
from homelab.shared.protocol.memory_items import (
    ACTIVATIONS,
    ADAPTERS,
    BASE_WEIGHTS,
    CASTED_WEIGHTS,
    DEQUANTISATION,
    EXCHANGED,
    GATHERED,
    GRADIENTS,
    LOGITS,
    OPTIMIZER,
    STEP,
    WORKING_SET,
)
from homelab.shared.recipe import Method

_FP32 = 4
_BLOCKS = 2  # gathered at a time
MOVING = (CASTED_WEIGHTS, ACTIVATIONS, WORKING_SET, DEQUANTISATION, LOGITS, STEP)


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
    full = method.kind == "full"
    items = dict(sizes) | {OPTIMIZER: sizes[OPTIMIZER] // parts, ADAPTERS: sizes.get(ADAPTERS, 0) // parts}
    if division.per_pass:
        items[BASE_WEIGHTS], items[GATHERED] = _gathered_per_pass(sizes[BASE_WEIGHTS], shape, method, precision, trainable, parts)
        items[GRADIENTS] = sizes[GRADIENTS] // parts
    else:
        linear = shape.linear_parameters if full else trainable
        items[BASE_WEIGHTS] = sizes[BASE_WEIGHTS] // parts if full else sizes[BASE_WEIGHTS]
        items[GATHERED] = width(precision) * linear + (_FP32 * (trainable - linear) if full else 0)
        if precision != "fp32":  # gathered in 16 bits, but for a head
            items[CASTED_WEIGHTS] = min(sizes.get(CASTED_WEIGHTS, 0), width(precision) * shape.vocabulary * shape.hidden) if full else 0
    items[EXCHANGED] = _exchanged(items, shape, trainable, parts, full=full)
    return items


def _gathered_per_pass(
    base_bytes: int, shape: Architecture, method: Method, precision: str, trainable: int, parts: int
) -> tuple[int, int]:  # fmt: skip
    """(base weights that stay, gathered ones): embeddings, head and norms, and two blocks with their adapters."""
    full = method.kind == "full"
    stored = _FP32 if full else width(precision)
    ends = shape.embedding_parameters + shape.head_parameters
    packed = shape.quantised_parameters(shape.held(method))  # quantised weights are not divided
    undivided = max(0, base_bytes - stored * (shape.total - packed))
    blocks = _BLOCKS * stored * (shape.block_parameters - packed) // shape.layers
    adapters = 0 if full else _BLOCKS * _FP32 * trainable // shape.layers
    return undivided + (base_bytes - undivided) // parts, stored * ends + blocks + adapters


def _exchanged(items: Mapping[str, int], shape: Architecture, trainable: int, parts: int, *, full: bool) -> int:
    """What a scatter of gradients needs beyond what a backward pass has given back by then.

    A gradient is there twice while it is copied into one piece, or once with the own part of the sum and what arrives from another rank. That
    of a block is summed while the layers before it hold their activations; that of embeddings and head comes last, when nothing is gathered
    any more and other gradients are divided, and one of the two is there once more.
    """
    ends = shape.embedding_parameters + shape.head_parameters if full else 0
    in_block = (trainable - ends) // shape.layers
    moving = sum(items.get(name, 0) for name in MOVING)
    copies = max(2.0, 1 + 2 / parts)
    of_block = copies * _FP32 * in_block - (moving - items.get(ACTIVATIONS, 0))
    table = _FP32 * shape.vocabulary * shape.hidden if full else 0
    others = items[GRADIENTS] - _FP32 * trainable // parts
    of_ends = copies * _FP32 * ends + table - items[GATHERED] - others - moving
    return round(max(0.0, of_block, of_ends))
