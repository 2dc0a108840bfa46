"""How shards travel: plain gathers and plain sums, counted and timed.

Not torch's defaults. Gloo's average in a reduce-scatter was once silently a sum (pytorch issue 162338), it refuses a scaled sum, and
NCCL made zeros of a scaled sum in bf16 (pytorch issue 190747). Gloo also does a reduce-scatter as an all-reduce of everything, whose
bytes are twice as many (measured with 3 ranks: 4.0 times the size on the wire instead of 2.0); here each rank sends every other one its
part, one rank after the other, so that a cable carries one stream in each direction: three ranks at 100 Mbit/s need 1.7 s for 26 MB, and
2.5 s where all send to all at once, as gloo's all-to-all does (both measured; 1.5 s is what the bytes take).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from homelab.worker.errors import TrainingError
from homelab.worker.runtime import process_group
from homelab.worker.runtime.step_timer import StepTimer
from homelab.worker.runtime.task import Task

_CHECKED_ELEMENTS = 1 << 10  # of each rank's part


class Exchange:
    """What the groups of a model send in a step. `step_bytes`: of the whole gathered and scattered tensors, since `begin`."""

    def __init__(self) -> None:
        self.step_bytes = 0
        self.timer: StepTimer | None = None

    def begin(self) -> None:
        """A new step."""
        self.step_bytes = 0

    def gather(self, part: str) -> AllGather:
        """For `set_custom_all_gather` of this part of the model."""
        return _Gather(self, f"gather {part}")

    def scatter(self, part: str) -> ReduceScatter:
        """For `set_custom_reduce_scatter` of this part of the model."""
        return _Scatter(self, f"scatter {part}")

    def told(self, post_backward: Callable[[], None]) -> Callable[..., None]:
        """What torch does when the gradients of a group of weights are computed, which the timer then learns."""

        def after_backward(*_unused: Any) -> None:
            if self.timer is not None:
                self.timer.part_computed()
            post_backward()

        return after_backward

    def timed(self, name: str, work: Any, size_bytes: int) -> Any:
        """Call `work` as an exchange of so many bytes. `name` is for a profile (`homelab.worker.profiling`)."""
        self.step_bytes += size_bytes
        if self.timer is None:
            return work()
        with self.timer.exchange():
            return work()


class _Counted:
    def __init__(self, exchange: Exchange, name: str) -> None:
        self._exchange = exchange
        self._name = name

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Counted, AllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:  # fmt: skip
        work: dist.Work | None = self._exchange.timed(
            self._name,
            lambda: dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op),
            output_tensor.nbytes,
        )
        return work


class _Scatter(_Counted, ReduceScatter):
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """torch asks for the input of the sum when the stream has waited for the sums before it."""
        if self._exchange.timer is not None:
            self._exchange.timer.part_goes_on()
        return super().allocate(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:  # fmt: skip
        assert op == dist.ReduceOp.SUM, op
        if self._exchange.timer is not None:
            self._exchange.timer.part_ready()
        work: dist.Work | None = self._exchange.timed(
            self._name, lambda: sum_parts(output_tensor, input_tensor, group, async_op=async_op), input_tensor.nbytes
        )
        return work


def sum_parts(own_part: torch.Tensor, whole: torch.Tensor, group: dist.ProcessGroup, *, async_op: bool = False) -> dist.Work | None:
    """`own_part` becomes the sum over the ranks of this rank's part of `whole`, [ranks x part] flattened."""
    if dist.get_backend(group) != "gloo":
        work: dist.Work | None = dist.reduce_scatter_tensor(own_part, whole, op=dist.ReduceOp.SUM, group=group, async_op=async_op)
        return work
    size, rank = group.size(), group.rank()
    parts = whole.view(size, -1)
    total = own_part.view(-1)
    total.copy_(parts[rank])
    received = torch.empty_like(total)
    for distance in range(1, size):
        sending = dist.isend(parts[(rank + distance) % size], group=group, group_dst=(rank + distance) % size)
        receiving = dist.irecv(received, group=group, group_src=(rank - distance) % size)
        assert sending is not None and receiving is not None
        receiving.wait()
        total += received
        sending.wait()
    return None


def check(task: Task, group: dist.ProcessGroup, device: torch.device) -> None:
    """Sum known numbers over the ranks, the way in which gradients are, and compare to the last bit. Collective. Raises TrainingError.

    Rank r holds (r + 1) * (i % 64 + 1) at position i: the sums are small integers, exact in fp32 in any order.
    """
    size, rank = group.size(), dist.get_rank(group)
    pattern = torch.arange(size * _CHECKED_ELEMENTS, device=device).remainder(64).add(1).float()
    own_part = pattern.new_empty(_CHECKED_ELEMENTS)
    sum_parts(own_part, pattern * (rank + 1), group)
    everything = torch.empty_like(pattern)
    dist.all_gather_into_tensor(everything, own_part, group=group)
    is_right = torch.equal(everything, pattern * (size * (size + 1) // 2))
    wrong = [index for index, values in enumerate(process_group.gather([float(is_right)])) if not values[0]]
    if wrong:
        raise TrainingError(
            f"a sum of known numbers over the ranks is wrong on {task.named(*wrong)}, so gradients would be wrong, too",
            where=f"torch {torch.__version__}, {dist.get_backend(group)}",
            hint='set [parallel] strategy = "ddp" in the recipe and launch again, or install another torch (homelab setup)',
            needs_launch=True,
        )
