"""What one rank holds at the peak of a training step, item by item: an estimate from the config, before anything runs.

The items add up to the peak. Their formulas stand at the functions below; T is the tokens of one micro-batch (rows x seq_len),
b the bytes of an activation (2 in bf16 and fp16, 4 in fp32), h the hidden size, r the LoRA rank. Sources: the model files of
`transformers`, `peft` and `bitsandbytes`, and "measured": live storages followed through forward and backward of small
Llama models on a CPU (tests/controller/planning/memory/test_memory_live.py does it again). CUDA's context and
NCCL's buffers are guesses until a run has measured them on the card (homelab/worker/runtime/card_memory.py); the allocator's rounding is one
always.

Assumed of the worker: base weights of lora in the training precision, everything trainable in fp32 with autocast around the
forward pass (what `peft` and the Trainer's bf16=True / fp16=True do), no attention matrix (SDPA), gradients that live in DDP's
buckets from the first pass on (homelab/worker/strategies/ddp/copies.py; with torch's default the buckets would be a second copy of them). A dry
run of the real model on a node (homelab/worker/tools/memory_dry_run.py) knows more, and its items replace these.

Compared with one card, an H100 (torch 2.11, a model of 1.1B, tests/controller/planning/memory/recorded/memory_h100.json): allocated bytes at the peak are
within 3 % of the dry run and of these formulas, after cuBLAS' workspaces. Reserved bytes are 3 to 19 % more than allocated ones, so that
predictions with an allocator's part of 5 % were up to 16 % below them: most with checkpointing and all logits at once, whose blocks of 0.5 GB fit
into no gap that layers leave. That is without expandable_segments, which real runs set and with which it is not measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from homelab.controller.planning.memory import division
from homelab.controller.planning.memory.activations import Attention, activation_bytes, copies_inputs, width
from homelab.controller.planning.memory.division import Division
from homelab.controller.planning.memory_estimate import MemoryItem
from homelab.controller.planning.model.adapters import adapter_matrices
from homelab.controller.planning.model.architecture import Architecture
from homelab.shared.protocol import quantisation
from homelab.shared.protocol.memory_items import (
    ACTIVATIONS,
    ADAPTERS,
    BASE_WEIGHTS,
    CASTED_WEIGHTS,
    CHUNK_LOGITS,
    DEQUANTISATION,
    EXCHANGED,
    GATHERED,
    GRADIENTS,
    HELD,
    LOGITS,
    OPTIMIZER,
    PLACES,
    STEP,
    WORKING_SET,
)
from homelab.shared.recipe import Method, Train

REMAINDER = "what PowerSGD has not sent"
# What comes and goes within a step, and what a dry run sees of all this.
MOVING = division.MOVING
SEEN_BY_A_DRY_RUN = (BASE_WEIGHTS, ADAPTERS, GRADIENTS, OPTIMIZER, *MOVING)
STATE = (BASE_WEIGHTS, PLACES, CASTED_WEIGHTS, ADAPTERS, GATHERED, GRADIENTS, EXCHANGED, OPTIMIZER)  # whatever the rows of a pass are
WORKSPACES = "cuBLAS workspaces"
ALLOCATOR = "allocator rounding"
CONTEXT = "CUDA context"
COMMUNICATOR = "NCCL communicator"
BESIDE_TORCH = (CONTEXT, COMMUNICATOR)  # of a card: what neither torch's allocator holds nor others do
PROCESS = "process (Python, torch, transformers; torchrun)"

# Adapters and fully trained weights are fp32 (peft: autocast_adapter_dtype; full: fp32 masters), and so are their gradients.
TRAINED_BYTES = 4
# A checkpoint holds every trained weight with two moments of AdamW, in fp32.
CHECKPOINT_BYTES = 3 * TRAINED_BYTES
# Cross-entropy at its peak, in backward: log-probabilities and two gradients in fp32 (measured: 12.1 in bf16 and fp32).
LOGIT_BYTES = 12
# One workspace for each thread that multiplies, forward and backward, from torch's allocator: 8.125 MiB on every card but Hopper, where it
# is 32 MiB (aten/src/ATen/cuda/CublasHandlePool.cpp, parseChosenWorkspaceSize): 50 MB more on cards of 80 GB, which are not counted.
WORKSPACE_BYTES = 2 * (8 * 2**20 + 128 * 2**10)
# Assumptions until a node has been measured: context with cuBLAS and loaded kernels; NCCL's channels over sockets. An H100 has 648 MB of
# context before the first kernel and 795 MB after a step; a context grows with the number of processors, which home cards have fewer of.
CONTEXT_BYTES = 512 * 2**20
COMMUNICATOR_BYTES = 256 * 2**20
# What torch's allocator holds beyond what is in use, of what comes and goes: published rows have 8 to 45 % (T4), an H100 had 3 to 19 % of all,
# each without expandable segments. With a tenth, plans are nearest to what others measured (scripts/bench foresight).
ALLOCATOR_FRACTION = 0.10
_CODE_BYTES = 2  # an int32 for two weights
# Measured with torch 2.13 (CPU build), transformers 5.23, TRL, PEFT and bitsandbytes: 501 MiB resident in a worker after the
# first step of a tiny model, 219 MiB in the torchrun beside it.
PROCESS_BYTES = 720 * 2**20


def trainable_parameters(architecture: Architecture, method: Method) -> int:
    """How many parameters the method trains: all (full), or those of the adapters. InputError for an unknown target."""
    return sum(elements * count for elements, count in _trainable_tensors(architecture, method))


def base_weight_bytes(architecture: Architecture, method: Method, precision: str) -> int:
    """Bytes of the base model on one rank.

    qlora: NF4 with double quantisation for the linears and the experts of the blocks (0.516 bytes), b for embedding, head, routers, biases and
    norms; lora: b for all, with an 8-bit base 1 for those linears (and their scales), 0.531 for experts in MXFP4; full: 4 for all (fp32 masters).
    """
    if method.kind == "full":
        return TRAINED_BYTES * architecture.total
    how = architecture.held(method)
    if how is None:
        return width(precision) * architecture.total
    rest = architecture.total - architecture.quantised_parameters(how)
    packed = sum(count * quantisation.matrix_bytes(how, matrix.outputs, matrix.inputs) for matrix, count in architecture.quantised(how))
    return round(packed) + width(precision) * rest


@dataclass(frozen=True)
class RankSetup:
    """What the memory of one rank depends on, beside the model and the recipe.

    `micro_batch` is rows of `train.seq_len` tokens. `masked`: attention needs a mask, because rows are packed or of different length
    (None: where there is more than one). `compress` as in the recipe's [parallel]. `repeats_keys`: attention does so even
    without a mask (`attention.repeats_keys`). `held_by_others_bytes` belongs here only when the sum is compared with all memory of the card;
    compared with its free memory it is 0. `measured` maps an item's name (the constants of this module) to its measured bytes, which
    replace the estimate.
    """

    precision: str
    device: str
    micro_batch: int = 1
    world_size: int = 1
    masked: bool | None = None
    compress: str = "none"
    repeats_keys: bool = False
    held_by_others_bytes: int = 0
    measured: Mapping[str, int] = field(default_factory=dict)
    division: Division = division.WHOLE


def estimate(architecture: Architecture, method: Method, train: Train, setup: RankSetup) -> tuple[MemoryItem, ...]:
    """The items of one rank's peak, in bytes; items of nothing are left out. Raises InputError for a LoRA target that the model lacks."""
    assert setup.micro_batch >= 1 and setup.world_size >= 1 and setup.device in ("cuda", "cpu")
    sizes = _torch_bytes(architecture, method, train, setup)
    sizes.update((name, size) for name, size in setup.measured.items() if name in SEEN_BY_A_DRY_RUN)
    if setup.division.parts > 1:
        sizes = division.divided(sizes, architecture, method, setup.precision, trainable_parameters(architecture, method), setup.division)
    elif setup.world_size > 1:
        # DDP makes its buckets anew before the second step, in the order of the gradients, while it still has the old ones
        sizes[EXCHANGED] = max(0, sizes[GRADIENTS] - sum(sizes.get(name, 0) for name in MOVING))
    sizes |= beside(setup.device, setup.world_size, sizes)
    sizes[HELD] = setup.held_by_others_bytes
    unknown = setup.measured.keys() - sizes.keys()
    assert not unknown, f"no such item: {unknown}"
    sizes.update((name, size) for name, size in setup.measured.items() if name not in SEEN_BY_A_DRY_RUN)
    return tuple(MemoryItem(name=name, size_bytes=size) for name, size in sizes.items() if size)


def _torch_bytes(architecture: Architecture, method: Method, train: Train, setup: RankSetup) -> dict[str, int]:
    """What torch's allocator holds at the peak: the items from the weights to the optimizer's step."""
    trainable = trainable_parameters(architecture, method)
    full, precision, device = method.kind == "full", setup.precision, setup.device
    tokens = setup.micro_batch * train.seq_len
    mask = architecture.windowed or (setup.micro_batch > 1 if setup.masked is None else setup.masked)
    attention = Attention(precision, mask, mask or setup.repeats_keys)
    copies = copies_inputs(method, precision, device)
    saved, working = activation_bytes(architecture, method, train, attention, tokens, device=device)
    if full and architecture.tied_embeddings:  # the head's gradient waits for that of the embeddings
        working += TRAINED_BYTES * architecture.embedding_parameters
    dequantisation = _dequantised_bytes(architecture, method, precision)
    if (
        not copies and architecture.experts is None
    ):  # the matrix is gone when a layer needs most: then its part of the gradient is there, and that of the adapter
        dequantisation = max(0, dequantisation - tokens * width(precision) * architecture.intermediate)
    head = _head_bytes(architecture, method, train, precision, tokens)
    sizes = {
        BASE_WEIGHTS: base_weight_bytes(architecture, method, precision),
        CASTED_WEIGHTS: _casted_bytes(architecture, method, train, trainable, head, working) if precision != "fp32" else 0,
        ADAPTERS: 0 if full else TRAINED_BYTES * trainable,
        GRADIENTS: TRAINED_BYTES * trainable,
        REMAINDER: TRAINED_BYTES * trainable if setup.compress == "powersgd" and setup.world_size > 1 else 0,
        OPTIMIZER: optimizer_bytes(architecture, method, train, device),
        ACTIVATIONS: saved,
        WORKING_SET: working,
        DEQUANTISATION: dequantisation,
        LOGITS: max(0, head - working - dequantisation),
    }
    step = _step_bytes(architecture, method, train, device)
    return sizes | {STEP: max(0, step - sum(sizes.get(name, 0) for name in MOVING))}


def _dequantised_bytes(architecture: Architecture, method: Method, precision: str) -> int:
    """The largest matrix that a product makes of few bits, or those of several experts that are made at once. Of MXFP4, with the numbers of its codes."""
    found, of_layer, how = [0], architecture.experts.count if architecture.experts else 1, architecture.held(method)
    for matrix in architecture.quantised(how):
        size = width(precision) * matrix[0].weights
        codes = _CODE_BYTES * matrix[0].weights if how == quantisation.MXFP4 else 0
        found.append((size + codes) * quantisation.experts_at_once(size, of_layer if matrix in architecture.routed else 1))
    return max(found)


def beside(device: str, world_size: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """What is there beside the items that a dry run sees (`sizes`), in bytes: of a card or of a process."""
    if device != "cuda":
        return {PROCESS: PROCESS_BYTES}
    return {
        WORKSPACES: WORKSPACE_BYTES, CONTEXT: CONTEXT_BYTES, COMMUNICATOR: COMMUNICATOR_BYTES if world_size > 1 else 0,
        ALLOCATOR: round(ALLOCATOR_FRACTION * sum(sizes.get(name, 0) for name in (ACTIVATIONS, WORKING_SET, LOGITS, STEP))),
    }  # fmt: skip


def largest_micro_batch(
    architecture: Architecture, method: Method, train: Train, setup: RankSetup, *, share: int, available_bytes: int
) -> int:
    """Most rows at once (1, 2, 4, ..., and the share itself) whose estimate fits into `available_bytes`; 0 when one row does not.

    More rows than the share would never be there together. A micro-batch changes speed and memory, never the training.
    """
    assert share >= 1
    best, rows = 0, 1
    while True:
        items = estimate(architecture, method, train, replace(setup, micro_batch=rows))
        if sum(item.size_bytes for item in items) > available_bytes:
            return best
        best = rows
        if rows == share:
            return best
        rows = min(2 * rows, share)


def optimizer_bytes(architecture: Architecture, method: Method, train: Train, device: str) -> int:
    """Bytes of optimizer state on the device.

    adamw: two fp32 moments, 8 bytes per trainable parameter. 8-bit: 2 bytes and one fp32 scale per block of 256 for each
    moment, but 8 bytes in tensors of fewer than 4096 elements. Paged, on CUDA: tensors of 100,000 elements or more live in
    memory that may leave the card and count nothing here, after a recovery too (homelab/worker/checkpoints/optimizer_state.py); most LoRA tensors
    are smaller and stay. (bitsandbytes, optim/optimizer.py: min_8bit_size, get_state_buffer.)
    """
    total = 0.0
    for elements, count in _trainable_tensors(architecture, method):
        if train.optimizer == "paged_adamw_8bit" and device == "cuda" and elements >= 100_000:
            continue
        small = train.optimizer == "adamw" or elements < 4096
        total += count * elements * (8.0 if small else 2 + 2 * 4 / 256)
    return round(total)


def _head_bytes(architecture: Architecture, method: Method, train: Train, precision: str, tokens: int) -> int:
    """The head and the loss at their peak: LOGIT_BYTES for every logit that is there at once, all or (fused) a chunk of them.

    A trained head's own gradient comes after it: beside the gradient of the logits, in fp32 and in b bytes first; fused, the sum
    over the chunks so far too.
    """
    bytes_each, vocabulary = width(precision), architecture.vocabulary
    # Unsloth's loss comes in chunks too, always (unsloth_zoo/fused_losses).
    in_chunks = architecture.fuses(train.fused_loss) or method.backend == "unsloth"
    at_once = min(tokens, max(1, CHUNK_LOGITS // vocabulary)) if in_chunks else tokens
    head = LOGIT_BYTES * at_once * vocabulary
    if method.kind != "full":
        return head
    weights = vocabulary * architecture.hidden
    gradient = weights * (TRAINED_BYTES + (bytes_each if bytes_each == 2 else 0) + (TRAINED_BYTES if at_once < tokens else 0))
    return max(head, bytes_each * at_once * vocabulary + gradient)


def _step_bytes(architecture: Architecture, method: Method, train: Train, device: str) -> int:
    """What is made after the layers' backward pass, when all activations are gone: the gradient of trained embeddings (three of it
    where they are the head too: both parts and their sum), and then what the optimizer's step makes for itself. AdamW makes a root of
    every second moment, on a CPU one tensor after the other and twice; on CUDA it is fused and makes nothing (torch/optim/adam.py). The 8-bit ones work
    in place.
    """
    table = TRAINED_BYTES * architecture.embedding_parameters * (3 if architecture.tied_embeddings else 1)
    embeddings = table if method.kind == "full" else 0
    if train.optimizer != "adamw" or device == "cuda":
        return embeddings
    return max(embeddings, 2 * TRAINED_BYTES * max(elements for elements, _ in _trainable_tensors(architecture, method)))


def _casted_bytes(architecture: Architecture, method: Method, train: Train, trainable: int, head: int, working: int) -> int:
    """16-bit copies that autocast makes of fp32 weights: of adapters, or in full training of all matrices.

    Without checkpointing autograd keeps all of them. With it they are kept to the end of the forward pass (autocast's cache)
    and then made again layer by layer: counted is one layer's, or what the end of the forward pass needs beyond the peak of
    the backward pass where that is more: the logits take 2 bytes less than LOGIT_BYTES there, but a fused loss with a frozen head makes
    its gradients there already.
    """
    every = 2 * trainable
    if method.kind == "full":
        every = 2 * (architecture.linear_parameters + architecture.router_parameters + architecture.vocabulary * architecture.hidden)
    if not train.gradient_checkpointing:
        return every
    one_layer = (2 * architecture.linear_parameters if method.kind == "full" else every) // architecture.layers
    forward = head if architecture.fuses(train.fused_loss) and method.kind != "full" else head * (LOGIT_BYTES - 2) // LOGIT_BYTES
    return max(one_layer, every + forward - max(head, working))


def _trainable_tensors(architecture: Architecture, method: Method) -> Iterator[tuple[int, int]]:
    """(elements, how many such tensors) of everything the optimizer holds state for."""
    if method.kind != "full":
        yield from ((rows * columns, count) for rows, columns, count in adapter_matrices(architecture, method.rank, method.targets))
        return
    for linear, count in architecture.linears:
        yield linear.weights, count
        if linear.bias:
            yield linear.outputs, count
    yield from architecture.expert_tensors
    yield architecture.embedding_parameters, 1
    if architecture.head_parameters:
        yield architecture.head_parameters, 1
    yield from architecture.small_tensors
    yield architecture.hidden, architecture.norms_per_layer * architecture.layers + 1
