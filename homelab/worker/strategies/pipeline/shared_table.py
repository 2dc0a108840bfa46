"""The table of embeddings that is the head, too, where all weights are trained: the first stage and the last one hold a copy each.

Of a step each has one half of the table's gradient, of the tokens that go in and of those that are to come. They exchange the halves after the passes: a sum of
two numbers is the same in either order, so both clip, step and keep the same numbers. The first stage counts the table in the norm, and in all that is saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from homelab.worker.errors import TrainingError
from homelab.worker.model import weight_digests
from homelab.worker.runtime import host_memory, process_group
from homelab.worker.runtime.task import Task
from homelab.worker.strategies import replica_check

PIECE_ELEMENTS = 2**21  # 8 MiB at a time, beside the gradient itself


@dataclass(frozen=True)
class SharedTable:
    """One of the two copies. `name`: of the weight; `peer`: the rank that has the other copy; `is_second`: whether the other one counts. As all messages of a
    pipeline, halves go through the host's memory and `group` (gloo)."""

    name: str
    weight: torch.nn.Parameter
    peer: int
    group: Any
    device: torch.device
    is_second: bool

    @torch.no_grad()
    def sum_gradients(self, after_piece: Callable[[], None]) -> tuple[float, int]:
        """Add the other copy's gradient to the own one: the seconds that it took, and the bytes that were sent. By both ranks."""
        began_s = time.perf_counter()
        gradient = self.weight.grad
        assert gradient is not None, "every step has a micro-batch"
        for piece in gradient.view(-1).split(PIECE_ELEMENTS):
            own = piece.cpu()
            arriving = host_memory.empty(own.shape, own.dtype, pinned=self.device.type == "cuda")
            for work in (dist.irecv(arriving, self.peer, group=self.group), dist.isend(own, self.peer, group=self.group)):
                work.wait()
            piece.add_(arriving.to(self.device, non_blocking=True))  # torch keeps pinned memory until a card has read it
            after_piece()
        return time.perf_counter() - began_s, int(gradient.nbytes)


class CopiesCheck:
    """Whether the two copies are the same: to the last bit at the start, to rounding while they train. Collective, by all ranks."""

    def __init__(self, task: Task, table: SharedTable | None) -> None:
        self._ends = task.stage_ranks[0], task.stage_ranks[-1]
        self._held: Mapping[str, torch.Tensor] = {} if table is None else {table.name: table.weight}
        self._task = task
        self._comparison = replica_check.Comparison(task, self._ends)

    def refuse_unequal(self, where: str) -> None:
        """Raises TrainingError, the same on every rank, where they differ in a bit."""
        digests = process_group.exchange("table", weight_digests.joined(weight_digests.each(self._held)))
        first, last = (digests[rank] for rank in self._ends)
        if first != last:
            names = self._task.named(*self._ends)
            raise TrainingError(
                f"the two copies of the embeddings, which are the head, too, do not start from the same numbers: {names}", where=where,
                hint=f"homelab recover {self._task.run_dir.name}; if it happens again, test the memory of these nodes (memtester)",
            )  # fmt: skip

    def compare(self, step: int) -> str | None:
        """A sentence for the user; None where there is nothing new."""
        return self._comparison.compare(self._held, step)
