"""Bytes and seconds on the wire. Bytes are decimal here, as in networking."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from homelab.controller.base.units import megabytes
from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.model.adapters import adapter_matrices
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.time.hidden_wire import LastPass
from homelab.controller.planning.work.job import TrainingJob
from homelab.shared.law import wire_bytes
from homelab.shared.law.wire_bytes import powersgd_elements
from homelab.shared.recipe import Method

# 1 Gbit/s Ethernet, MTU 1500, TCP with timestamps: 1448 of every 1538 bytes on the wire are payload.
GIGABIT_BYTES_PER_S = 117.6e6


@dataclass(frozen=True)
class Wire:
    """The slowest wire between the nodes of a plan."""

    bytes_per_s: float = GIGABIT_BYTES_PER_S
    is_measured: bool = False

    def __str__(self) -> str:
        return f"{_speed_text(self.bytes_per_s)} ({'measured' if self.is_measured else 'assumed: 1 Gbit/s'})"


class NetworkCost(ABC):
    """What a way to divide a training (`planning.strategy`) sends between its ranks, and how long that takes."""

    name: ClassVar[str]
    divides_weights: ClassVar[bool] = False
    """Whether the ranks hold parts of the model, which are gathered before a checkpoint can be written."""

    @abstractmethod
    def step_bytes(self, job: TrainingJob, passes: int) -> int | None:
        """Bytes of what the ranks exchange in an optimizer step of so many passes; None where the model's shape is not known."""

    @abstractmethod
    def wire_s(self, size_bytes: float, ranks: int, bytes_per_s: float) -> float:
        """Seconds that these bytes take in one step, with so many ranks and this speed of the slowest wire."""

    def exposed_s(self, job: TrainingJob, wire_s: float, passes: Sequence[LastPass]) -> float:
        """Of the seconds on the wire, those in which no rank computes any more. `passes`: the last one of each rank."""
        return wire_s

    def checkpoint_wire_s(self, job: TrainingJob, ranks: int, bytes_per_s: float) -> float:
        """Seconds on the wire before a checkpoint can be written: every rank sends its weights and optimizer to all others once."""
        if job.shape is None or not self.divides_weights:
            return 0.0
        size_bytes = rank_memory.CHECKPOINT_BYTES * rank_memory.trainable_parameters(job.shape, job.recipe.method)
        return gather_s(size_bytes, ranks, bytes_per_s)


def wire_between(names: Collection[str], throughputs: Mapping[tuple[str, str], float]) -> Wire:
    """The slowest of the pairs among these nodes; a pair that was not measured is assumed to have 1 Gbit/s."""
    pairs = [(source, target) for source in names for target in names if source != target]
    measured = [throughputs[pair] for pair in pairs if pair in throughputs]
    slowest = min(measured, default=GIGABIT_BYTES_PER_S)
    if len(measured) < len(pairs) and slowest >= GIGABIT_BYTES_PER_S:
        return Wire()
    return Wire(slowest, bool(measured))


def all_reduce_s(size_bytes: float, ring_size: int, bytes_per_s: float = GIGABIT_BYTES_PER_S) -> float:
    """Seconds of a ring all-reduce of `size_bytes`: 2 (W - 1) / W x size / speed; latency and overlap not counted.

    `ring_size` W is the number of ranks in the ring: gloo and NCCL pass everything through every link, the wire between two
    nodes included (Patarasuk and Yuan 2009, bandwidth-optimal all-reduce). `bytes_per_s` is that of the slowest link.
    """
    assert ring_size >= 1 and bytes_per_s > 0
    return wire_bytes.reduced(size_bytes, ring_size) / bytes_per_s


def gather_s(size_bytes: float, ring_size: int, bytes_per_s: float = GIGABIT_BYTES_PER_S) -> float:
    """Seconds of one all-gather (or reduce-scatter) whose whole is `size_bytes`: (W - 1) / W x size / speed."""
    return wire_bytes.gathered(size_bytes, ring_size) / bytes_per_s


def gradient_bytes(architecture: Architecture, method: Method, bytes_per_element: int = rank_memory.TRAINED_BYTES) -> int:
    """What every rank sends around once per optimizer step: the gradient of the trainable parameters (fp32 by default)."""
    return bytes_per_element * rank_memory.trainable_parameters(architecture, method)


def sent_bytes(architecture: Architecture, method: Method, compress: str = "none") -> int:
    """Bytes of one rank's gradient as it goes over the wire with [parallel] compress (see `homelab.worker.strategies.ddp.gradient_compression`)."""
    assert compress in ("none", "bf16", "powersgd")
    if compress != "powersgd":
        return gradient_bytes(architecture, method, 2 if compress == "bf16" else rank_memory.TRAINED_BYTES)
    saved = sum(count * (rows * columns - powersgd_elements(rows, columns)) for rows, columns, count in _matrices(architecture, method))
    return rank_memory.TRAINED_BYTES * (rank_memory.trainable_parameters(architecture, method) - saved)


def _matrices(architecture: Architecture, method: Method) -> Iterator[tuple[int, int, int]]:
    """(rows, columns, how many) of every trained matrix."""
    if method.kind != "full":
        yield from adapter_matrices(architecture, method.rank, method.targets)
        return
    for linear, count in architecture.linears:
        yield linear.outputs, linear.inputs, count
    for experts in (architecture.experts,) if architecture.experts else ():
        for matrix in experts.matrices(architecture.hidden):  # a tensor of all experts, with a row for each
            yield experts.count, matrix.weights, architecture.expert_layers
    yield architecture.vocabulary, architecture.hidden, 1 if architecture.tied_embeddings else 2


def sharded_micro_batch_s(
    architecture: Architecture, method: Method, precision: str, ring_size: int, bytes_per_s: float = GIGABIT_BYTES_PER_S
) -> float:
    """Seconds on the wire of one micro-batch with sharded weights (FSDP, ZeRO-3), for gathering alone.

    All weights are gathered in forward and again in backward (Zhao et al. 2023): quantised ones as they are stored, others in the
    training precision. The gradients' reduce-scatter comes on top and is left out: the weights alone decide.
    """
    return 2 * gather_s(_gathered_bytes(architecture, method, precision), ring_size, bytes_per_s)


def all_reduce_text(size_bytes: int, ranks: int, wire: Wire) -> str:
    """The all-reduce of a gradient in bytes and seconds, as one sentence."""
    seconds = all_reduce_s(size_bytes, ranks, wire.bytes_per_s)
    return f"all-reduce of {bytes_text(size_bytes)} of gradient over {ranks} ranks at {wire}: {seconds_text(seconds)} per step."


def _gathered_bytes(architecture: Architecture, method: Method, precision: str) -> int:
    stored = method if method.quantisation else replace(method, kind="lora")
    return rank_memory.base_weight_bytes(architecture, stored, precision)


def price_of_sharding(job: TrainingJob, shape: Architecture) -> str:
    """What sharded weights would cost on the slowest wire of these machines, in one sentence."""
    ranks, method = job.machines.world_size, job.recipe.method
    speed = wire_between(job.machines.names, job.throughputs).bytes_per_s
    size = _gathered_bytes(shape, method, job.precision)
    seconds = sharded_micro_batch_s(shape, method, job.precision, ranks, speed)
    return f"FSDP would gather {bytes_text(size)} of weights twice: {seconds_text(seconds)} per micro-batch at {_speed_text(speed)}."


def bytes_text(size_bytes: float) -> str:
    """5.7 GB, 168 MB: decimal, as networks count."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.3g} {unit}" if size_bytes < 1000 * scale else f"{size_bytes / scale:.0f} {unit}"
    return f"{size_bytes:.0f} B"


def seconds_text(seconds: float) -> str:
    """1.9 s, 65 s."""
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _speed_text(bytes_per_s: float) -> str:
    return f"{megabytes(bytes_per_s, '.4g')} MB/s"
