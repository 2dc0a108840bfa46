"""Seconds on the wire, and what they say about the strategy. Bytes are decimal here, as network people count them."""

from __future__ import annotations

from homelab.config.recipe import Method
from homelab.errors import HomelabError, InputError
from homelab.planning import memory
from homelab.planning.architecture import Architecture
from homelab.planning.model import Choice

# 1 Gbit/s Ethernet, MTU 1500, TCP with timestamps: 1448 of every 1538 bytes on the wire are payload.
GIGABIT_BYTES_PER_S = 117.6e6


def all_reduce_s(size_bytes: float, ring_size: int, bytes_per_s: float = GIGABIT_BYTES_PER_S) -> float:
    """Seconds of a ring all-reduce of `size_bytes`: 2 (W - 1) / W x size / speed; latency and overlap not counted.

    `ring_size` W is the number of ranks in the ring: gloo and NCCL pass everything through every link, the wire between two
    nodes included (Patarasuk and Yuan 2009, bandwidth-optimal all-reduce). `bytes_per_s` is that of the slowest link.
    """
    assert ring_size >= 1 and bytes_per_s > 0
    return 2 * (ring_size - 1) / ring_size * size_bytes / bytes_per_s


def gather_s(size_bytes: float, ring_size: int, bytes_per_s: float = GIGABIT_BYTES_PER_S) -> float:
    """Seconds of one all-gather (or reduce-scatter) whose whole is `size_bytes`: (W - 1) / W x size / speed."""
    return all_reduce_s(size_bytes, ring_size, bytes_per_s) / 2


def gradient_bytes(architecture: Architecture, method: Method, bytes_per_element: int = memory.TRAINED_BYTES) -> int:
    """What every rank sends around once per optimizer step: the gradient of the trainable parameters (fp32 by default)."""
    return bytes_per_element * memory.trainable_parameters(architecture, method)


def ddp_step_s(
    architecture: Architecture,
    method: Method,
    ring_size: int,
    bytes_per_s: float = GIGABIT_BYTES_PER_S,
    bytes_per_element: int = memory.TRAINED_BYTES,
) -> float:
    """Seconds on the wire of one optimizer step with DDP: one all-reduce of the gradient, however many micro-batches."""
    return all_reduce_s(gradient_bytes(architecture, method, bytes_per_element), ring_size, bytes_per_s)


def sharded_micro_batch_s(
    architecture: Architecture,
    method: Method,
    precision: str,
    ring_size: int,
    bytes_per_s: float = GIGABIT_BYTES_PER_S,
) -> float:
    """Seconds on the wire of one micro-batch with sharded weights (FSDP, ZeRO-3), for gathering alone.

    All weights are gathered in forward and again in backward (Zhao et al. 2023): NF4 as it is stored, others in the
    training precision. The gradients' reduce-scatter comes on top and is left out: the weights alone decide.
    """
    return 2 * gather_s(_gathered_bytes(architecture, method, precision), ring_size, bytes_per_s)


def verdict(
    strategy: str,
    architecture: Architecture | None,
    method: Method | None,
    precision: str,
    ring_size: int,
    *,
    bytes_per_s: float = GIGABIT_BYTES_PER_S,
    fits: bool = True,
) -> Choice:
    """The strategy, with its price on this wire in bytes and seconds.

    "auto" and "ddp" become ddp. Unknown shapes (`architecture` or `method` None) get no figures. Raises InputError for
    fsdp, zero2 and zero3, which this version does not train with, and HomelabError when the model does not fit (`fits`
    False), both with what sharding would cost.
    """
    assert strategy in ("auto", "ddp", "fsdp", "zero2", "zero3")
    sharding = ""
    if architecture is not None and method is not None:
        sharding = _price_of_sharding(strategy, architecture, method, precision, ring_size, bytes_per_s)
    if strategy not in ("auto", "ddp"):
        raise InputError(
            f'strategy = "{strategy}" is not in this version: it trains with ddp only.{sharding and " " + sharding}',
            where="recipe, [parallel] strategy",
            hint='strategy = "auto"',
        )
    if not fits:
        smaller = "seq_len or rank" if method is not None and method.kind == "qlora" else 'seq_len, or kind = "qlora"'
        raise HomelabError(
            f"the model does not fit, and ddp needs all of it on every card.{sharding and ' ' + sharding}",
            where="recipe, [method] and [train]",
            hint=f"a smaller {smaller}; a smaller model; or leave the node out: [parallel] shares = {{ NODE = 0, ... }}",
        )
    if ring_size == 1:
        return Choice(subject="strategy", value="ddp", because="one rank alone: nothing goes over the wire")
    if architecture is None or method is None:
        return Choice(
            subject="strategy", value="ddp", because="the gradient's size is not known here; this version has ddp only"
        )
    size, seconds = gradient_bytes(architecture, method), ddp_step_s(architecture, method, ring_size, bytes_per_s)
    because = (
        f"all-reduce of {_bytes_text(size)} of gradient over {ring_size} ranks at {_speed_text(bytes_per_s)}: "
        f"{_seconds_text(seconds)} per step. {sharding}"
    )
    return Choice(subject="strategy", value="ddp", because=because)


def _gathered_bytes(architecture: Architecture, method: Method, precision: str) -> int:
    stored = method if method.kind == "qlora" else method.model_copy(update={"kind": "lora"})
    return memory.base_weight_bytes(architecture, stored, precision)


def _price_of_sharding(
    strategy: str,
    architecture: Architecture,
    method: Method,
    precision: str,
    ring_size: int,
    bytes_per_s: float,
) -> str:
    """One sentence. ZeRO-2 keeps the weights whole but reduces the gradient after every micro-batch."""
    if strategy == "zero2":
        size, name = gradient_bytes(architecture, method), "ZeRO-2"
        seconds = gather_s(size, ring_size, bytes_per_s)
        what = f"scatter {_bytes_text(size)} of gradient"
    else:
        size, name = _gathered_bytes(architecture, method, precision), "ZeRO-3" if strategy == "zero3" else "FSDP"
        seconds = sharded_micro_batch_s(architecture, method, precision, ring_size, bytes_per_s)
        what = f"gather {_bytes_text(size)} of weights twice"
    return f"{name} would {what}: {_seconds_text(seconds)} per micro-batch at {_speed_text(bytes_per_s)}."


def _bytes_text(size_bytes: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return (
                f"{size_bytes / scale:.3g} {unit}" if size_bytes < 1000 * scale else f"{size_bytes / scale:.0f} {unit}"
            )
    return f"{size_bytes:.0f} B"


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _speed_text(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.4g} MB/s"
