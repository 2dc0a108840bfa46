"""What one stage of a pipeline holds at its peak: the items of a model with its layers alone, changed.

A stage keeps the activations of every micro-batch that it has begun and not ended, and its messages. Without checkpointing each of them keeps
16-bit copies of the trained weights of its own, because autocast begins anew for every pass. Embeddings are on the first stage, head, final norm and
logits on the last; embeddings that are the head too are on both, in a full training each with gradient and optimizer.
Measured: tests/controller/planning/strategy/pipeline/test_stage_memory_live.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.memory.activations import width
from homelab.controller.planning.memory.rank_memory import ALLOCATOR, ALLOCATOR_FRACTION, COMMUNICATOR, COMMUNICATOR_BYTES, RankSetup
from homelab.controller.planning.memory_estimate import MemoryItem
from homelab.controller.planning.model.architecture import Architecture
from homelab.shared.law.pipeline_schedule import POSTED, UNDER_WAY
from homelab.shared.protocol.memory_items import (
    ACTIVATIONS,
    BASE_WEIGHTS,
    CASTED_WEIGHTS,
    GRADIENTS,
    LOGITS,
    MESSAGES,
    OPTIMIZER,
    STEP,
    WORKING_SET,
)
from homelab.shared.recipe import Method, Train

# homelab.worker.strategies.pipeline.neighbours: both are in the host's memory, so a card holds only the message that it computes with.


@dataclass(frozen=True)
class Part:
    """So many layers, with the embeddings, the head, both or none."""

    layers: int
    is_first: bool
    is_last: bool


def estimate(shape: Architecture, method: Method, train: Train, setup: RankSetup, part: Part, in_flight: int) -> tuple[MemoryItem, ...]:
    """The items of one stage in bytes; `setup` as for a rank with the whole model."""
    method = _own_method(method, part)
    # a table that is the head, too, is held and trained on both ends
    own = dataclasses.replace(shape.of_layers(part.layers), tied_embeddings=False, outside=0)
    alone = dataclasses.replace(setup, world_size=1, compress="none")
    sizes = {item.name: item.size_bytes for item in rank_memory.estimate(own, method, train, alone)}
    elsewhere = _elements_elsewhere(shape, part)
    stored = rank_memory.TRAINED_BYTES if method.kind == "full" else width(setup.precision)
    sizes[BASE_WEIGHTS] = max(0, sizes[BASE_WEIGHTS] - stored * elsewhere)
    if method.kind == "full":
        for name, per_element in (
            (GRADIENTS, rank_memory.TRAINED_BYTES),
            (OPTIMIZER, sizes[OPTIMIZER] / rank_memory.trainable_parameters(own, method)),
        ):
            sizes[name] = round(max(0, sizes[name] - per_element * elsewhere))
    if not part.is_last:
        sizes[LOGITS] = 0
        sizes[ACTIVATIONS] = max(0, sizes[ACTIVATIONS] - _final_norm(shape, train, setup))
    if CASTED_WEIGHTS in sizes:
        sizes[CASTED_WEIGHTS] = _casted(own, method, train, part, in_flight, sizes)
    sizes[ACTIVATIONS] = in_flight * sizes[ACTIVATIONS]
    sizes[MESSAGES] = _messages(shape, method, setup, train, part, in_flight)
    if setup.device == "cuda":
        sizes[ALLOCATOR] = round(
            ALLOCATOR_FRACTION * sum(sizes.get(name, 0) for name in (ACTIVATIONS, WORKING_SET, LOGITS, STEP, MESSAGES))
        )
        sizes.setdefault(COMMUNICATOR, setup.measured.get(COMMUNICATOR, COMMUNICATOR_BYTES))
    return tuple(MemoryItem(name=name, size_bytes=size) for name, size in sizes.items() if size)


def _own_method(method: Method, part: Part) -> Method:
    """Adapters on the ends of the model are where these are: on embeddings in the first stage, on the head in the last one."""
    if method.kind == "full" or isinstance(method.targets, str):
        return method
    is_here = {"embed_tokens": part.is_first, "lm_head": part.is_last}
    own = tuple(target for target in method.targets if is_here.get(target.rsplit(".", 1)[-1], True))
    return dataclasses.replace(method, targets=own)


def message_bytes(shape: Architecture, method: Method, precision: str, tokens: int) -> int:
    """What crosses a boundary for a pass of so many tokens, in each direction: hidden states as the model computes them."""
    return tokens * shape.hidden * (4 if method.kind == "full" else width(precision))


def table_bytes(shape: Architecture, recipe: TrainRecipe) -> int:
    """What first and last stage exchange in a step, each way: the gradient of embeddings that are the head, too, where they are trained. A model that scores
    has another head."""
    scores = recipe.objective is not None and recipe.objective.scores
    is_one = shape.tied_embeddings and recipe.method.kind == "full" and not scores
    return rank_memory.TRAINED_BYTES * shape.embedding_parameters if is_one else 0


def _elements_elsewhere(shape: Architecture, part: Part) -> int:
    """Parameters of embeddings and head that this stage does not hold."""
    table = shape.embedding_parameters
    return (0 if part.is_first else table) + (0 if part.is_last else table)


def _final_norm(shape: Architecture, train: Train, setup: RankSetup) -> int:
    """What `activation_bytes` counts after the last layer (8 h per token) and other stages do not keep. What stays of every pass is the mask that the
    layers share, a byte for each pair of tokens, and the rotation (cosines and sines)."""
    each, is_masked = width(setup.precision), setup.micro_batch > 1 if setup.masked is None else setup.masked
    shared = (train.seq_len if is_masked else 0) + 4 * shape.head_dim * each
    return setup.micro_batch * train.seq_len * (8 * shape.hidden - shared)


def _casted(own: Architecture, method: Method, train: Train, part: Part, in_flight: int, sizes: dict[str, int]) -> int:
    """16-bit copies as in `rank_memory`, but without the head's where it is elsewhere."""
    copies = sizes[CASTED_WEIGHTS]
    if not part.is_last:
        every = 2 * (own.linear_parameters if method.kind == "full" else rank_memory.trainable_parameters(own, method))
        copies = max(every // own.layers, every - sizes[WORKING_SET]) if train.gradient_checkpointing else every
    return copies if train.gradient_checkpointing else in_flight * copies


def _messages(shape: Architecture, method: Method, setup: RankSetup, train: Train, part: Part, in_flight: int) -> int:
    """What is received ahead, both directions; the output of every micro-batch in flight; the gradient that a backward pass begins with, and the
    one that is sent. In 16 bit the input of every micro-batch in flight, too: the first layer keeps it only with checkpointing or in fp32."""
    one = message_bytes(shape, method, setup.precision, setup.micro_batch * train.seq_len)
    is_input_apart = method.kind != "full" and setup.precision != "fp32" and not train.gradient_checkpointing
    received, sent = (1, 1) if setup.device == "cuda" else (POSTED, UNDER_WAY)
    before = 0 if part.is_first else received + sent + (in_flight if is_input_apart else 0)
    behind = 0 if part.is_last else in_flight + received + 1
    return one * (before + behind)
