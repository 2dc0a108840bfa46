"""How much of ddp's reduction runs while the backward pass still computes. Pure.

DDP fills buckets with gradients in the order in which the backward pass gives them, and reduces a bucket as soon as all ranks have it, one
after the other (torch/csrc/distributed/c10d/reducer.cpp). That holds from the second step on; in the first all is one bucket. A tensor is
never cut: a trained table of embeddings, whose gradient comes last, is reduced when nothing computes any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.model.adapters import WITH_EXPERTS, adapted_linears, adapter_matrices, computed_parameters
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.model.layers import Linear
from homelab.shared.law.wire_bytes import BUCKET_MB
from homelab.shared.recipe import Method, Train

# Gloo's threads share the cores with the backward pass. Measured at 100 Mbit/s with buckets of 1, 3 and 5 MB on two practice nodes (0.65 core each,
# a full gradient of 19 MB) and three (0.43 core, adapters of 15 MB): of what would be hidden behind a card's pass, 0.5 to 0.9 was.
HIDDEN_ON_CPU = 0.7
_MB = 2**20  # as torch counts
_FIRST_BYTES = 2**20  # torch's first bucket, unless a size was named (torch/nn/parallel/distributed.py, BucketCapacityConfig)


@dataclass(frozen=True)
class LastPass:
    """A rank's last pass of a step: its end, in seconds since the step began, and its length."""

    end_s: float
    seconds: float


@dataclass(frozen=True)
class Bucket:
    """`ready`: the part of the backward pass after which its last gradient is there."""

    size_bytes: int
    ready: float


def exposed_s(wire_s: float, buckets: Sequence[Bucket], backward_part: float, passes: Sequence[LastPass]) -> float:
    """Of the seconds on the wire, those after the last rank's backward pass. `backward_part`: of a pass."""
    size_bytes = sum(bucket.size_bytes for bucket in buckets)
    done_s = 0.0
    for bucket in buckets:
        ready_s = max(one.end_s - one.seconds * backward_part * (1 - bucket.ready) for one in passes)
        done_s = max(done_s, ready_s) + wire_s * bucket.size_bytes / size_bytes
    return done_s - max(one.end_s for one in passes)


def buckets_of(architecture: Architecture, method: Method, train: Train, bucket_mb: float) -> tuple[Bucket, ...]:
    """In the order of their reduction. `bucket_mb`: [parallel] bucket_mb."""
    limit = _FIRST_BYTES if bucket_mb == BUCKET_MB else bucket_mb * _MB
    buckets, filled, ready = [], 0, 0.0
    for elements, ready in _gradients(architecture, method, train):
        filled += rank_memory.TRAINED_BYTES * elements
        if filled >= limit:
            buckets.append(Bucket(filled, ready))
            filled, limit = 0, bucket_mb * _MB
    return (*buckets, Bucket(filled, ready)) if filled else tuple(buckets)


def backward_part(architecture: Architecture, method: Method, train: Train) -> float:
    """Of a pass's floating-point operations, those of the backward pass: 2/3 in full training, 1/2 with adapters; more where the forward pass is
    computed again."""
    forward = 2 * (architecture.active_parameters + head_weights(architecture))
    head, blocks = backward_flops(architecture, method, train)
    made_in_forward = 2 * head_weights(architecture) if has_early_head(method, train) else 0
    return (head + blocks) / (forward + made_in_forward + head + blocks)


def backward_flops(architecture: Architecture, method: Method, train: Train) -> tuple[int, int]:
    """Per token: (of the head, of all blocks). 2 for each weight's input, 2 for each weight that is trained, 2 to compute blocks again."""
    full = method.kind == "full"
    head = 0 if has_early_head(method, train) else (4 if full else 2) * head_weights(architecture)
    trained = architecture.active_parameters if full else 2 * computed_parameters(architecture, method.rank, method.targets)
    blocks = 2 * architecture.active_parameters + 2 * trained + (2 * architecture.active_parameters if train.gradient_checkpointing else 0)
    return head, blocks


def has_early_head(method: Method, train: Train) -> bool:
    """A fused loss with a frozen head makes its gradient in the forward pass."""
    return bool(train.fused_loss) and method.kind != "full"


def head_weights(architecture: Architecture) -> int:
    """Weights of the head, tied or not."""
    return architecture.vocabulary * architecture.hidden


def _of_block(architecture: Architecture, method: Method, block: Sequence[Linear], adapted: Sequence[Linear]) -> list[int]:
    """Elements of what is trained in one block, from its end to its beginning."""
    if method.kind == "full":
        own = [size for linear in reversed(block) for size in (linear.weights, *([linear.outputs] if linear.bias else []))]
        own += [size for size, _ in architecture.expert_tensors]
        is_delta = architecture.delta is not None and block[0].name.startswith("in_proj")
        others = architecture.delta.others if is_delta and architecture.delta else architecture.query_key_norms
        return [*own, *[architecture.hidden] * architecture.norms_per_layer, *others]
    own = [method.rank * size for linear in reversed(adapted) if linear in block for size in (linear.outputs, linear.inputs)]
    if method.targets == WITH_EXPERTS:  # the last two of them, each with two matrices for all experts of a layer
        last = [rows * columns for rows, columns, _ in adapter_matrices(architecture, method.rank, method.targets)][-4:]
        own = [*reversed(last), *own]
    return own


def _gradients(architecture: Architecture, method: Method, train: Train) -> Iterator[tuple[int, float]]:
    """(elements, part of the backward pass after which it is there) of every trained tensor, from the head to the embeddings."""
    head, blocks = backward_flops(architecture, method, train)
    begin, layers = head / (head + blocks), architecture.layers
    adapted = [] if method.kind == "full" else [linear for linear, _ in adapted_linears(architecture, method.targets)]
    if method.kind == "full":
        if architecture.head_parameters:
            yield architecture.head_parameters, begin
        yield architecture.hidden, begin
    yield from ((method.rank * (linear.inputs + linear.outputs), begin) for linear in adapted if linear.name == "lm_head")
    attending = _of_block(architecture, method, architecture.block, adapted)
    kinds = [attending] * architecture.attention_layers
    if architecture.delta is not None:
        linears = (*architecture.delta.block(architecture.hidden), *architecture.block[len(architecture.attention) :])
        kinds += [_of_block(architecture, method, linears, adapted)] * architecture.delta.layers
    if architecture.wide is not None:
        wide = architecture.all_wide
        kinds += [_of_block(wide, method, wide.block, adapted)] * len(architecture.wide.places)
    for block, own in enumerate(kinds):
        for number, size in enumerate(own, 1):
            yield size, begin + (1 - begin) * (block + sum(own[:number]) / sum(own)) / layers
    if method.kind == "full":
        yield architecture.embedding_parameters, 1.0
    else:
        yield from ((method.rank * (linear.inputs + linear.outputs), 1.0) for linear in adapted if linear.name == "embed_tokens")
