"""What a rank holds on its device where some of its layers come from the host: the items of a rank that holds them all, changed. Pure.

Streamed layers have places instead of room of their own. The inputs of all layers, which activation checkpointing keeps on a card, lie in the host's
memory; the last hidden states of a group's micro-batches and their gradients stay. On a processor all of these are in its memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.memory.activations import width
from homelab.controller.planning.memory.rank_memory import RankSetup
from homelab.controller.planning.memory_estimate import TIGHT, MemoryItem
from homelab.controller.planning.model.architecture import Architecture
from homelab.shared.law.streaming import PLACES_AT_ONCE
from homelab.shared.protocol.memory_items import ACTIVATIONS, BASE_WEIGHTS, PLACES
from homelab.shared.recipe import Method, Train


def layer_bytes(shape: Architecture, method: Method, precision: str) -> int:
    """The frozen weights of one layer, of the largest kind."""
    if shape.delta is not None or shape.wide is not None:
        assert shape.equal is not None, "a model of unequal layers is not streamed"
        shape = shape.equal
    one_less = shape.of_layers(shape.layers - 1)
    return rank_memory.base_weight_bytes(shape, method, precision) - rank_memory.base_weight_bytes(one_less, method, precision)


def boundary_bytes(shape: Architecture, train: Train, setup: RankSetup) -> int:
    """The hidden states of a micro-batch between two layers."""
    return width(setup.precision) * shape.hidden * setup.micro_batch * train.seq_len


def on_device(
    items: Sequence[MemoryItem], one_layer_bytes: int, one_boundary_bytes: int, streamed: int, group: int, kept_layers: int
) -> tuple[MemoryItem, ...]:
    """The items with so many layers streamed, `group` micro-batches at a time. `kept_layers`: of how many layers the device keeps the inputs (0: the
    host keeps them)."""
    sizes = {item.name: item.size_bytes for item in items}
    sizes[BASE_WEIGHTS] -= streamed * one_layer_bytes
    sizes[PLACES] = min(PLACES_AT_ONCE, streamed) * one_layer_bytes
    # In and out of the layer that computes; the hidden states of the group, and their gradients; four more behind the last layer (norm in fp32).
    sizes[ACTIVATIONS] = one_boundary_bytes * (kept_layers * group + 2 + 2 * group + 4)
    return tuple(MemoryItem(name=name, size_bytes=size) for name, size in sizes.items() if size)


def fewest(items: Sequence[MemoryItem], one_layer_bytes: int, available_bytes: int, layers: int) -> int | None:
    """How many of `layers` are streamed, of a rank whose items with none streamed are these; None where all of them are too few. More than must be,
    where that leaves as much room as such an estimate may be wrong by."""
    needed_bytes = sum(item.size_bytes for item in items)
    if needed_bytes <= available_bytes:
        return 0
    for wanted_bytes in ((1 - TIGHT) * available_bytes, available_bytes):
        count = math.ceil((needed_bytes - wanted_bytes) / one_layer_bytes) + PLACES_AT_ONCE
        if count <= layers:
            return count
    return None
