"""Seconds on the wire, and what they say about the strategy. Bytes are decimal here, as network people count them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from homelab.config.recipe import Method
from homelab.errors import HomelabError, InputError
from homelab.planning import memory
from homelab.planning.architecture import Architecture, adapted_linears
from homelab.planning.model import Choice
from homelab.worker.compress import powersgd_elements

# 1 Gbit/s Ethernet, MTU 1500, TCP with timestamps: 1448 of every 1538 bytes on the wire are payload.
GIGABIT_BYTES_PER_S = 117.6e6


@dataclass(frozen=True)
class Wire:
    """The slowest wire between the nodes of a plan."""

    bytes_per_s: float = GIGABIT_BYTES_PER_S
    is_measured: bool = False

    def __str__(self) -> str:
        return f"{_speed_text(self.bytes_per_s)} ({'measured' if self.is_measured else 'assumed: 1 Gbit/s'})"


def wire_between(names: Collection[str], throughputs: Mapping[tuple[str, str], float]) -> Wire:
    """The slowest of the pairs among these nodes; a pair that was not measured is assumed to have 1 Gbit/s."""
    pairs = [(source, target) for source in names for target in names if source != target]
    seen = [throughputs[pair] for pair in pairs if pair in throughputs]
    slowest = min(seen, default=GIGABIT_BYTES_PER_S)
    if len(seen) < len(pairs) and slowest >= GIGABIT_BYTES_PER_S:
        return Wire()
    return Wire(slowest, bool(seen))


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


def sent_bytes(architecture: Architecture, method: Method, compress: str = "none") -> int:
    """Bytes of one rank's gradient as it goes over the wire with [parallel] compress (see `homelab.worker.compress`)."""
    assert compress in ("none", "bf16", "powersgd")
    if compress != "powersgd":
        return gradient_bytes(architecture, method, 2 if compress == "bf16" else memory.TRAINED_BYTES)
    saved = sum(count * (rows * columns - powersgd_elements(rows, columns)) for rows, columns, count in _matrices(architecture, method))
    return memory.TRAINED_BYTES * (memory.trainable_parameters(architecture, method) - saved)


def _matrices(architecture: Architecture, method: Method) -> Iterator[tuple[int, int, int]]:
    """(rows, columns, how many) of every trained matrix."""
    if method.kind != "full":
        for linear, count in adapted_linears(architecture, method.targets):
            yield method.rank, linear.inputs, count
            yield linear.outputs, method.rank, count
        return
    for linear in architecture.block:
        yield linear.outputs, linear.inputs, architecture.layers
    yield architecture.vocabulary, architecture.hidden, 1 if architecture.tied_embeddings else 2


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
    wire: Wire = Wire(),
    compress: str = "none",
    machines: int | None = None,
    fits: bool = True,
) -> Choice:
    """The strategy, with its price on this wire in bytes and seconds.

    `machines`: on how many the ranks are; on one of them nothing goes over the LAN.
    "auto" and "ddp" become ddp. Unknown shapes (`architecture` or `method` None) get no figures. Raises InputError for
    fsdp, zero2 and zero3, which this version does not train with, and HomelabError when the model does not fit (`fits`
    False), both with what sharding would cost.
    """
    assert strategy in ("auto", "ddp", "fsdp", "zero2", "zero3")
    sharding = ""
    if architecture is not None and method is not None and machines != 1:
        sharding = price_of_sharding(strategy, architecture, method, precision, ring_size, wire)
    if strategy not in ("auto", "ddp"):
        raise InputError(
            f'strategy = "{strategy}" is not in this version: it trains with ddp only.{sharding and " " + sharding}',
            where="recipe, [parallel] strategy",
            hint='strategy = "auto"',
        )
    if compress == "powersgd" and precision == "fp16" and ring_size > 1:
        raise InputError(
            'compress = "powersgd" does not go with fp16: its loss scaling overflows on purpose, and an overflow stays in what a rank keeps back',
            where="recipe, [parallel] compress",
            hint='compress = "bf16" halves the bytes with any precision; or [train] precision = "bf16" or "fp32"',
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
    if machines == 1:
        return Choice(subject="strategy", value="ddp", because=f"{ring_size} ranks on one machine: nothing goes over the LAN")
    if architecture is None or method is None:
        return Choice(
            subject="strategy", value="ddp", because="the gradient's size is not known here; this version has ddp only"
        )
    size = sent_bytes(architecture, method, compress)
    seconds = all_reduce_s(size, ring_size, wire.bytes_per_s)
    because = (
        f"all-reduce of {_bytes_text(size)} of gradient over {ring_size} ranks at {wire}: "
        f"{_seconds_text(seconds)} per step. {sharding}"
    )
    return Choice(subject="strategy", value="ddp", because=because)


def _gathered_bytes(architecture: Architecture, method: Method, precision: str) -> int:
    stored = method if method.kind == "qlora" else method.model_copy(update={"kind": "lora"})
    return memory.base_weight_bytes(architecture, stored, precision)


def price_of_sharding(
    strategy: str,
    architecture: Architecture,
    method: Method,
    precision: str,
    ring_size: int,
    wire: Wire,
) -> str:
    """What another strategy than ddp would cost on this wire, in one sentence. ZeRO-2 keeps the weights whole but reduces the gradient after every micro-batch."""
    if strategy == "zero2":
        size, name = gradient_bytes(architecture, method), "ZeRO-2"
        seconds = gather_s(size, ring_size, wire.bytes_per_s)
        what = f"scatter {_bytes_text(size)} of gradient"
    else:
        size, name = _gathered_bytes(architecture, method, precision), "ZeRO-3" if strategy == "zero3" else "FSDP"
        seconds = sharded_micro_batch_s(architecture, method, precision, ring_size, wire.bytes_per_s)
        what = f"gather {_bytes_text(size)} of weights twice"
    return f"{name} would {what}: {_seconds_text(seconds)} per micro-batch at {_speed_text(wire.bytes_per_s)}."


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
