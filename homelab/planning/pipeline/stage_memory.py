"""What one stage of a pipeline holds at its peak: the items of a model with its layers alone, changed.

A stage keeps the activations of every micro-batch that it has begun and not ended, and its messages. Embeddings are on the first stage, head
and logits on the last; embeddings that are the head too are on both.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from homelab.config.recipe import Method, Train
from homelab.planning.memory import rank_memory
from homelab.planning.memory.activations import width
from homelab.planning.memory.architecture import Architecture
from homelab.planning.memory.rank_memory import (
    ALLOCATOR,
    ALLOCATOR_FRACTION,
    COMMUNICATOR,
    COMMUNICATOR_BYTES,
    RankSetup,
)
from homelab.planning.types import MemoryItem
from homelab.protocol.memory_items import (
    ACTIVATIONS,
    BASE_WEIGHTS,
    GRADIENTS,
    LOGITS,
    MESSAGES,
    OPTIMIZER,
    STEP,
    WORKING_SET,
)

_RECEIVES_AHEAD = 2  # homelab.worker.pipeline.neighbours
_SENDS_UNDER_WAY = 1


@dataclass(frozen=True)
class Part:
    """So many layers, with the embeddings, the head, both or none."""

    layers: int
    is_first: bool
    is_last: bool


def estimate(shape: Architecture, method: Method, train: Train, setup: RankSetup, part: Part, in_flight: int) -> tuple[MemoryItem, ...]:
    """The items of one stage in bytes; `setup` as for a rank with the whole model."""
    own = dataclasses.replace(shape, layers=part.layers)
    alone = dataclasses.replace(setup, world_size=1, compress="none")
    sizes = {item.name: item.size_bytes for item in rank_memory.estimate(own, method, train, alone)}
    elsewhere = _elements_elsewhere(shape, part)
    stored = rank_memory.TRAINED_BYTES if method.kind == "full" else width(setup.precision)
    sizes[BASE_WEIGHTS] = max(0, sizes[BASE_WEIGHTS] - stored * elsewhere)
    if method.kind == "full":
        for name, per_element in ((GRADIENTS, rank_memory.TRAINED_BYTES), (OPTIMIZER, sizes[OPTIMIZER] / rank_memory.trainable_parameters(own, method))):
            sizes[name] = round(max(0, sizes[name] - per_element * elsewhere))
    if not part.is_last:
        sizes[LOGITS] = 0
    sizes[ACTIVATIONS] = in_flight * sizes[ACTIVATIONS]
    sizes[MESSAGES] = _messages(shape, method, setup, train.seq_len, part, in_flight)
    if setup.device == "cuda":
        sizes[ALLOCATOR] = round(ALLOCATOR_FRACTION * sum(sizes.get(name, 0) for name in (ACTIVATIONS, WORKING_SET, LOGITS, STEP, MESSAGES)))
        sizes.setdefault(COMMUNICATOR, setup.measured.get(COMMUNICATOR, COMMUNICATOR_BYTES))
    return tuple(MemoryItem(name=name, size_bytes=size) for name, size in sizes.items() if size)


def needed_bytes(shape: Architecture, method: Method, train: Train, setup: RankSetup, part: Part, in_flight: int) -> int:
    """The sum of the items."""
    return sum(item.size_bytes for item in estimate(shape, method, train, setup, part, in_flight))


def message_bytes(shape: Architecture, method: Method, precision: str, tokens: int) -> int:
    """What crosses a boundary for a pass of so many tokens, in each direction: hidden states as the model computes them."""
    return tokens * shape.hidden * (4 if method.kind == "full" else width(precision))


def _elements_elsewhere(shape: Architecture, part: Part) -> int:
    """Parameters of embeddings and head that this stage does not hold."""
    table = shape.embedding_parameters
    if shape.tied_embeddings:
        return 0 if part.is_first or part.is_last else table
    return (0 if part.is_first else table) + (0 if part.is_last else shape.head_parameters)


def _messages(shape: Architecture, method: Method, setup: RankSetup, seq_len: int, part: Part, in_flight: int) -> int:
    """Messages that are received ahead, the output of every micro-batch in flight, gradients on their way."""
    one = message_bytes(shape, method, setup.precision, setup.micro_batch * seq_len)
    before = 0 if part.is_first else _RECEIVES_AHEAD + _SENDS_UNDER_WAY
    behind = 0 if part.is_last else in_flight + _RECEIVES_AHEAD + _SENDS_UNDER_WAY
    return one * (before + behind)
