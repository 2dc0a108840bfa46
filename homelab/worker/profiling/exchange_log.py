"""What a rank exchanges with the others in the profiled steps: when, how many bytes, and how many of them it sends itself.

    ddp       each bucket of gradients is one all-reduce, from the hook's call to the moment at which its future is ready
    sharded   the gathers of weights and the scatters of gradients of each part of the model
    figures   the losses and counts that ranks gather in every step

Times of a card are those of its processor, which only puts the work into a queue: `homelab.worker.profiling.overlap` takes the
kernels' own times instead.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.autograd.profiler import record_function

from homelab.shared.law import wire_bytes
from homelab.shared.protocol import profile_files
from homelab.worker.profiling.replaced import Replaced
from homelab.worker.runtime import process_group

FIGURES = "figures of the step"


@dataclass
class Exchanged:
    """One exchange. `payload_bytes`: of the whole tensor; `sent_bytes`: of what this rank sends of it. Times are Unix nanoseconds."""

    name: str
    kind: str  # all-reduce, gather or scatter
    payload_bytes: int
    sent_bytes: float
    begin_ns: int
    end_ns: int = 0


class ExchangeLog:
    """The exchanges of the profiled steps, in the order in which they began."""

    def __init__(self, world_size: int, shard_ranks: int) -> None:
        """`shard_ranks`: over how many ranks a model's weights are divided."""
        self.entries: list[Exchanged] = []
        self._world_size = world_size
        self._shard_ranks = shard_ranks

    def watch(self, replaced: Replaced, strategy: Any) -> None:
        """Note what the strategy and the trainer exchange, until `replaced` is put back."""
        if self._world_size == 1:
            return
        if reduction := getattr(strategy, "reduction", None):
            replaced.method(reduction, "reduce", lambda reduce, bucket: self._bucket(reduction, reduce, bucket))
        if exchange := getattr(strategy, "exchange", None):
            replaced.method(exchange, "timed", self._part)
        replaced.method(process_group, "gather", self._figures)

    def _bucket(self, reduction: Any, reduce: Any, bucket: Any) -> Any:
        before = reduction.step_bytes if bucket.index() else 0
        entry = Exchanged(f"bucket {bucket.index()}", "all-reduce", 0, 0.0, time.time_ns())
        self.entries.append(entry)
        future = reduce(bucket)
        entry.payload_bytes = reduction.step_bytes - before
        entry.sent_bytes = wire_bytes.reduced(entry.payload_bytes, self._world_size)
        future.add_done_callback(lambda _done: setattr(entry, "end_ns", time.time_ns()))
        return future

    def _part(self, timed: Any, name: str, work: Any, size_bytes: int) -> Any:
        sent = wire_bytes.gathered(size_bytes, self._shard_ranks)
        entry = Exchanged(name, name.partition(" ")[0], size_bytes, sent, time.time_ns())
        self.entries.append(entry)
        with record_function(profile_files.REDUCTION):
            done = timed(name, work, size_bytes)
        entry.end_ns = time.time_ns()
        return done

    def _figures(self, gather: Any, values: list[float]) -> Any:
        if not dist.is_initialized():
            return gather(values)
        size_bytes = 8 * len(values) * self._world_size
        entry = Exchanged(FIGURES, "gather", size_bytes, wire_bytes.gathered(size_bytes, self._world_size), time.time_ns())
        self.entries.append(entry)
        with record_function(profile_files.REDUCTION):
            everyone = gather(values)
        entry.end_ns = time.time_ns()
        return everyone
