"""What one rank holds at the peak of a training step, item by item: an estimate from the config, before anything runs.

The items add up to the peak. Their formulas stand at the functions below; T is the tokens of one micro-batch (rows x seq_len),
b the bytes of an activation (2 in bf16 and fp16, 4 in fp32), h the hidden size, r the LoRA rank. Sources: the model files of
`transformers`, `peft` and `bitsandbytes`, and "measured": live storages followed through forward and backward of small
Llama models on a CPU (tests/planning/test_memory_live.py does it again). CUDA's context and
NCCL's buffers are guesses until a run has measured them on the card (homelab/worker/card_memory.py); the allocator's rounding is one
always.

Assumed of the worker: base weights of lora in the training precision, everything trainable in fp32 with autocast around the
forward pass (what `peft` and the Trainer's bf16=True / fp16=True do), no attention matrix (SDPA), gradients that live in DDP's
buckets from the first pass on (homelab/worker/gradients.py; with torch's default the buckets would be a second copy of them). A dry
run of the real model on a node (homelab/worker/dryrun.py) knows more, and its items replace these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from homelab.config.recipe import Method, Train
from homelab.planning.architecture import Architecture, adapted_linears
from homelab.planning.model import MemoryItem

BASE_WEIGHTS = "base weights"
CASTED_WEIGHTS = "16-bit copies of the weights (autocast)"
ADAPTERS = "adapters"
GRADIENTS = "gradients"
REMAINDER = "what PowerSGD has left out"
OPTIMIZER = "optimizer"
ACTIVATIONS = "saved activations"
WORKING_SET = "one layer's working set"
DEQUANTISATION = "dequantisation buffer"
LOGITS = "logits"  # estimated: beyond the room that a layer's work takes later
STEP = "optimizer's step"  # and the embeddings' gradient; estimated: beyond the room that the layers took
# What comes and goes within a step, and what a dry run sees of all this.
MOVING = (CASTED_WEIGHTS, ACTIVATIONS, WORKING_SET, DEQUANTISATION, LOGITS, STEP)
SEEN_BY_A_DRY_RUN = (BASE_WEIGHTS, ADAPTERS, GRADIENTS, OPTIMIZER, *MOVING)
ALLOCATOR = "allocator rounding"
CONTEXT = "CUDA context"
COMMUNICATOR = "NCCL communicator"
BESIDE_TORCH = (CONTEXT, COMMUNICATOR)  # of a card: what neither torch's allocator holds nor others do
PROCESS = "process (Python, torch, transformers; torchrun)"
HELD = "held by others"

# NF4: half a byte, one 8-bit scale per block of 64, one fp32 scale per 256 of those (Dettmers et al. 2023, double quantisation).
NF4_BYTES = 0.5 + 1 / 64 + 4 / (64 * 256)
# Adapters and fully trained weights are fp32 (peft: autocast_adapter_dtype; full: fp32 masters), and so are their gradients.
TRAINED_BYTES = 4
# Cross-entropy at its peak, in backward: log-probabilities and two gradients in fp32 (measured: 12.1 in bf16 and fp32).
LOGIT_BYTES = 12
# Logits that a fused loss has at once (homelab/worker/fused_loss.py).
CHUNK_LOGITS = 2**24
# Assumptions until a node has been measured: context with cuBLAS and loaded kernels; NCCL's channels over sockets.
CONTEXT_BYTES = 512 * 2**20
COMMUNICATOR_BYTES = 256 * 2**20
ALLOCATOR_FRACTION = 0.05
# Measured with torch 2.13 (CPU build), transformers 5.23, TRL, PEFT and bitsandbytes: 501 MiB resident in a worker after the
# first step of a tiny model, 219 MiB in the torchrun beside it.
PROCESS_BYTES = 720 * 2**20


def trainable_parameters(architecture: Architecture, method: Method) -> int:
    """How many parameters the method trains: all (full), or those of the adapters. InputError for an unknown target."""
    return sum(elements * count for elements, count in _trainable_tensors(architecture, method))


def base_weight_bytes(architecture: Architecture, method: Method, precision: str) -> int:
    """Bytes of the base model on one rank.

    qlora: NF4 with double quantisation for the linears of the blocks (0.516 bytes), b for embedding, head, biases and norms;
    lora: b for all; full: 4 for all (fp32 masters).
    """
    if method.kind == "full":
        return TRAINED_BYTES * architecture.total
    if method.kind == "lora":
        return _width(precision) * architecture.total
    rest = architecture.total - architecture.linear_parameters
    return round(NF4_BYTES * architecture.linear_parameters) + _width(precision) * rest


def estimate(
    architecture: Architecture,
    method: Method,
    train: Train,
    *,
    precision: str,
    device: str,
    micro_batch: int,
    world_size: int,
    masked: bool | None = None,
    compress: str = "none",
    repeats_keys: bool = False,
    held_by_others_bytes: int = 0,
    measured: Mapping[str, int] | None = None,
) -> tuple[MemoryItem, ...]:
    """The items of one rank's peak, in bytes; items of nothing are left out.

    `micro_batch` is rows of `train.seq_len` tokens. `masked`: attention needs a mask, because rows are packed or of different length
    (None: where there is more than one). `compress` as in the recipe's [parallel]. `repeats_keys`: attention does so even
    without a mask (`attention.repeats_keys`). `held_by_others_bytes` belongs here only when the sum is compared with all memory of the card;
    compared with its free memory it is 0. `measured` maps an item's name (the constants of this module) to its measured bytes, which
    replace the estimate. Raises InputError for a LoRA target that the model lacks.
    """
    assert micro_batch >= 1 and world_size >= 1 and device in ("cuda", "cpu")
    trainable = trainable_parameters(architecture, method)
    mixed, full = precision != "fp32", method.kind == "full"
    tokens = micro_batch * train.seq_len
    mask = micro_batch > 1 if masked is None else masked
    repeated = mask or repeats_keys
    saved, working = _activation_bytes(architecture, method, train, precision, tokens, mask=mask, repeated=repeated)
    if full and architecture.tied_embeddings:  # the head's gradient waits for that of the embeddings
        working += TRAINED_BYTES * architecture.embedding_parameters
    dequantisation = (
        _width(precision) * max(linear.weights for linear in architecture.block) if method.kind == "qlora" else 0
    )
    head = _head_bytes(architecture, method, train, precision, tokens)
    casted = _casted_bytes(architecture, method, train, trainable, head, working) if mixed else 0
    sizes = {
        BASE_WEIGHTS: base_weight_bytes(architecture, method, precision),
        CASTED_WEIGHTS: casted,
        ADAPTERS: 0 if full else TRAINED_BYTES * trainable,
        GRADIENTS: TRAINED_BYTES * trainable,
        REMAINDER: TRAINED_BYTES * trainable if compress == "powersgd" and world_size > 1 else 0,
        OPTIMIZER: optimizer_bytes(architecture, method, train, device),
        ACTIVATIONS: saved,
        WORKING_SET: working,
        DEQUANTISATION: dequantisation,
        LOGITS: max(0, head - working - dequantisation),
    }
    step = _step_bytes(architecture, method, train, device, precision)
    sizes[STEP] = max(0, step - sum(sizes.get(name, 0) for name in MOVING))
    sizes.update((name, size) for name, size in (measured or {}).items() if name in SEEN_BY_A_DRY_RUN)
    if device == "cuda":
        sizes[ALLOCATOR] = round(
            ALLOCATOR_FRACTION * sum(sizes[name] for name in (ACTIVATIONS, WORKING_SET, LOGITS, STEP))
        )
        sizes[CONTEXT] = CONTEXT_BYTES
        sizes[COMMUNICATOR] = COMMUNICATOR_BYTES if world_size > 1 else 0
    else:
        sizes[PROCESS] = PROCESS_BYTES
    sizes[HELD] = held_by_others_bytes
    unknown = set(measured or ()) - sizes.keys()
    assert not unknown, f"no such item: {unknown}"
    sizes.update(measured or {})
    return tuple(MemoryItem(name=name, size_bytes=size) for name, size in sizes.items() if size)


def largest_micro_batch(
    architecture: Architecture,
    method: Method,
    train: Train,
    *,
    precision: str,
    device: str,
    share: int,
    world_size: int,
    available_bytes: int,
    masked: bool | None = None,
    compress: str = "none",
    repeats_keys: bool = False,
    held_by_others_bytes: int = 0,
    measured: Mapping[str, int] | None = None,
) -> int:
    """Most rows at once (1, 2, 4, ..., and the share itself) whose estimate fits into `available_bytes`; 0 when one row does not.

    More rows than the share would never be there together. A micro-batch changes speed and memory, never the training.
    """
    assert share >= 1
    best, rows = 0, 1
    while True:
        items = estimate(
            architecture,
            method,
            train,
            precision=precision,
            device=device,
            micro_batch=rows,
            world_size=world_size,
            masked=masked,
            compress=compress,
            repeats_keys=repeats_keys,
            held_by_others_bytes=held_by_others_bytes,
            measured=measured,
        )
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
    memory that may leave the card and count nothing here, after a recovery too (homelab/worker/optimizer_state.py); most LoRA tensors
    are smaller and stay. (bitsandbytes, optim/optimizer.py: min_8bit_size, get_state_buffer.)
    """
    total = 0.0
    for elements, count in _trainable_tensors(architecture, method):
        if train.optimizer == "paged_adamw_8bit" and device == "cuda" and elements >= 100_000:
            continue
        small = train.optimizer == "adamw" or elements < 4096
        total += count * elements * (8.0 if small else 2 + 2 * 4 / 256)
    return round(total)


def _width(precision: str) -> int:
    """Bytes of an activation."""
    assert precision in ("fp32", "bf16", "fp16")
    return 4 if precision == "fp32" else 2


def _head_bytes(architecture: Architecture, method: Method, train: Train, precision: str, tokens: int) -> int:
    """The head and the loss at their peak: LOGIT_BYTES for every logit that is there at once, all or (fused) a chunk of them.

    A trained head's own gradient comes after it: beside the gradient of the logits, in fp32 and in b bytes first; fused, the sum
    over the chunks so far too.
    """
    width, vocabulary = _width(precision), architecture.vocabulary
    # Unsloth's loss comes in chunks too, always (unsloth_zoo/fused_losses).
    in_chunks = train.fused_loss or method.backend == "unsloth"
    at_once = min(tokens, max(1, CHUNK_LOGITS // vocabulary)) if in_chunks else tokens
    head = LOGIT_BYTES * at_once * vocabulary
    if method.kind != "full":
        return head
    weights = vocabulary * architecture.hidden
    gradient = weights * (TRAINED_BYTES + (width if width == 2 else 0) + (TRAINED_BYTES if at_once < tokens else 0))
    return max(head, width * at_once * vocabulary + gradient)


def _step_bytes(architecture: Architecture, method: Method, train: Train, device: str, precision: str) -> int:
    """What is made after the layers' backward pass, when all activations are gone: the gradient of trained embeddings (three of it
    where they are the head too: both parts and their sum), and then what the optimizer's step makes for itself. AdamW makes a root of
    every second moment: on a CPU one tensor after the other and twice, on CUDA in fp16 for all tensors together (foreach); on CUDA
    otherwise it is fused and makes nothing (torch/optim/adam.py). The 8-bit ones work in place.
    """
    table = TRAINED_BYTES * architecture.embedding_parameters * (3 if architecture.tied_embeddings else 1)
    embeddings = table if method.kind == "full" else 0
    if train.optimizer != "adamw":
        return embeddings
    sizes = [(elements, count) for elements, count in _trainable_tensors(architecture, method)]
    if device == "cuda" and precision != "fp16":
        return embeddings
    if device == "cuda":
        return max(embeddings, TRAINED_BYTES * sum(elements * count for elements, count in sizes))
    return max(embeddings, 2 * TRAINED_BYTES * max(elements for elements, _ in sizes))


def _casted_bytes(
    architecture: Architecture, method: Method, train: Train, trainable: int, head: int, working: int
) -> int:
    """16-bit copies that autocast makes of fp32 weights: of adapters, or in full training of all matrices.

    Without checkpointing autograd keeps all of them. With it they are kept to the end of the forward pass (autocast's cache)
    and then made again layer by layer: counted is one layer's, or what the end of the forward pass needs beyond the peak of
    the backward pass where that is more (there the logits take 2 bytes less than LOGIT_BYTES).
    """
    every = 2 * trainable
    if method.kind == "full":
        every = 2 * (architecture.linear_parameters + architecture.vocabulary * architecture.hidden)
    if not train.gradient_checkpointing:
        return every
    one_layer = (2 * architecture.linear_parameters if method.kind == "full" else every) // architecture.layers
    return max(one_layer, every + head * (LOGIT_BYTES - 2) // LOGIT_BYTES - max(head, working))


def _trainable_tensors(architecture: Architecture, method: Method) -> Iterator[tuple[int, int]]:
    """(elements, how many such tensors) of everything the optimizer holds state for."""
    if method.kind != "full":
        for linear, count in adapted_linears(architecture, method.targets):
            yield method.rank * linear.inputs, count
            yield method.rank * linear.outputs, count
        return
    for linear in architecture.block:
        yield linear.weights, architecture.layers
        if linear.bias:
            yield linear.outputs, architecture.layers
    yield architecture.embedding_parameters, 1
    if architecture.head_parameters:
        yield architecture.head_parameters, 1
    if architecture.query_key_norm:
        yield architecture.head_dim, 2 * architecture.layers
    yield architecture.hidden, architecture.norms_per_layer * architecture.layers + 1


def _activation_bytes(
    architecture: Architecture, method: Method, train: Train, precision: str, tokens: int, *, mask: bool, repeated: bool
) -> tuple[int, int]:
    """(saved between forward and backward, one layer's working set).

    With checkpointing a layer keeps its input only (T x h, in b bytes; 4 where full training runs under autocast, for then
    the residual stream is fp32) and is computed again: the working set is all one layer saves plus the temporaries of its
    backward. Without, every layer keeps what it saves, and the temporaries alone are the working set. After the last layer
    8 h more per token stay (final norm in fp32, its output). Temporaries: measured, 3 b I + 6 h per token in 16 bit,
    2 b I + 6 h in fp32 (I: intermediate size).
    """
    width, hidden = _width(precision), architecture.hidden
    residual = 4 if method.kind == "full" else width
    per_layer = _saved_by_one_layer_per_token(
        architecture, method, precision, train.seq_len, mask=mask, repeated=repeated
    )
    temporaries = (3 if width == 2 else 2) * width * architecture.intermediate + 6 * hidden
    if train.gradient_checkpointing:
        return tokens * hidden * (residual * architecture.layers + 8), tokens * (per_layer + temporaries)
    return tokens * (architecture.layers * per_layer + 8 * hidden), tokens * temporaries


def _saved_by_one_layer_per_token(
    architecture: Architecture, method: Method, precision: str, seq_len: int, *, mask: bool, repeated: bool
) -> int:
    """Bytes per token that autograd keeps of one layer.

    Norms: the input in fp32, and for trained norms the normalised input too. Attention: q, k and v (with a mask, or
    on a card that cannot do without, k and v are repeated for grouped queries), the output, the log-sum-exp, one row of the mask. MLP:
    gate, its activation, up. Linears: a trained or adapted one keeps its input; autocast makes a copy for each reader, in fp32 readers
    of one tensor share it. A frozen linear keeps nothing. Adapters: r per adapted linear.
    """
    width, full, mixed = _width(precision), method.kind == "full", precision != "fp32"
    query, key = architecture.query_width, architecture.key_width
    if full:
        trained = {linear.name: linear for linear in architecture.block}
    else:
        block = {linear.name for linear in architecture.block}
        adapted = adapted_linears(architecture, method.targets)
        trained = {linear.name: linear for linear, _ in adapted if linear.name in block}
    norms = architecture.norms_per_layer * architecture.hidden + (query + key if architecture.query_key_norm else 0)
    total = 4 * norms * (2 if full else 1)
    # In the mixed LoRA case the adapter's copy of the attention output is beside the one that attention itself keeps.
    output_apart = (mixed and not full) or "o_proj" not in trained
    total += width * query * (2 if output_apart else 1) + 2 * width * (query if repeated else key) + 4 * architecture.heads
    total += width * seq_len if mask else 0
    total += 3 * width * architecture.intermediate
    inputs: dict[str, int] = {}
    for name, linear in trained.items():
        source = (
            name
            if mixed or name in ("o_proj", "down_proj")
            else "mlp"
            if name.startswith(("gate", "up"))
            else "attention"
        )
        inputs[source] = linear.inputs
    total += width * sum(inputs.values())
    return total + (0 if full else width * method.rank * len(trained))
