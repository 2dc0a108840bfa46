"""What a merge needs of memory and disk, against what is free. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from homelab.shared.protocol.quantisation import INT8, NF4, NF4_BYTES
from homelab.worker.errors import WorkerError

_GAPS = 1.1  # the interpreter, its libraries and the allocator's gaps beside the weights
_QUANTISED_BYTES: dict[str | None, float] = {NF4: NF4_BYTES, INT8: 1}  # of a weight; its scale in 8 bits is one of a whole row
_LIBRARIES_BYTES = 700 * 10**6
_LOGITS_COPIES = 4  # in fp32, of one row: logits, their shifted copy, the softmax and its logarithm


@dataclass(frozen=True)
class Sizes:
    """Weights of the base model, bytes of one weight as it is stored, tokens of the longest row times the vocabulary."""

    weights: int
    stored_bytes: int
    logits: int


@dataclass(frozen=True)
class Room:
    """What is needed, and whether the losses are computed in fp32 (else in the precision in which the weights are stored)."""

    memory_bytes: int
    disk_bytes: int
    in_fp32: bool


def needed(sizes: Sizes, *, quantisation: str | None, in_fp32: bool) -> Room:
    """The merged model in memory (in fp32 also while it is rounded), the quantised base beside it, the logits of a row; on the disk the model as it is stored."""
    each = 4 if in_fp32 else sizes.stored_bytes
    memory = sizes.weights * (each + _QUANTISED_BYTES.get(quantisation, 0)) * _GAPS + _LOGITS_COPIES * 4 * sizes.logits + _LIBRARIES_BYTES
    return Room(int(memory), int(sizes.weights * sizes.stored_bytes * 1.02) + 50 * 10**6, in_fp32)


def choose(sizes: Sizes, *, quantisation: str | None, free_memory: int | None, free_disk: int, where: str) -> Room:
    """fp32 where it fits into memory. Raises WorkerError with both numbers where the smaller way does not fit, or the disk is too full."""
    room = needed(sizes, quantisation=quantisation, in_fp32=True)
    if free_memory is not None and room.memory_bytes > free_memory:
        room = needed(sizes, quantisation=quantisation, in_fp32=False)
    if free_memory is not None and room.memory_bytes > free_memory:
        raise WorkerError(
            f"the merge needs {_gb(room.memory_bytes)} of memory, and {_gb(free_memory)} are free", where=where,
            hint="free memory on this node (ps aux --sort=-rss | head shows the programs that use it), or serve the adapter without a merge: vllm serve BASE --enable-lora",
        )  # fmt: skip
    if room.disk_bytes > free_disk:
        raise WorkerError(
            f"the merged model needs {_gb(room.disk_bytes)} of disk, and {_gb(free_disk)} are free", where=where,
            hint="make room on that disk (`df -h` shows it), then repeat the command",
        )  # fmt: skip
    return room


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"
