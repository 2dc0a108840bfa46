"""How gradients are summed over the ranks, and in how few bytes. Each rank's is its part of that of the whole batch.

    none       fp32 as it is: the sum over ranks to the last digits
    bf16       every rank rounds its gradient to bfloat16 (2 bytes), and the sum is rounded again after each addition
    powersgd   matrices as products of two narrow ones (Vogels et al. 2019, torch's hook); what a product leaves out is kept on its
               rank and added to the next gradient. Vectors and small matrices go as they are

Every way gives all ranks the same bits: their copies of the weights stay copies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from homelab.shared.law import wire_bytes

if TYPE_CHECKING:
    from homelab.worker.runtime.task import Task

_NO_ZERO = 1e-8  # added to a column's norm: a gradient may be all zeros


def reduction_for(task: Task, steps: int) -> Reduction:
    """The reduction that the recipe names, for a run of `steps` optimizer steps."""
    compression = task.parallel.compress
    if compression == "bf16":
        return Bf16()
    if compression == "powersgd":
        return PowerSgd(wire_bytes.uncompressed_steps(steps, task.train.warmup_steps, task.resume_step))
    assert compression == "none", compression
    return Reduction()


class Reduction:
    """Sums one bucket of gradients over the ranks; the state of DDP's communication hook. DDP calls it for every bucket of a step
    in the same order on all ranks. `step_bytes` is what this rank put into all-reduces in the current step so far."""

    def __init__(self) -> None:
        self.step_bytes = 0

    def reduce(self, bucket: Any) -> Any:
        """A future of the summed bucket."""
        if bucket.index() == 0:
            self.step_bytes = 0
        return self._reduce(bucket)

    def _reduce(self, bucket: Any) -> Any:
        """As it is."""
        return self._sum(bucket.buffer(), bucket.buffer())

    def _sum(self, sent: Any, into: Any) -> Any:
        """Add up `sent` over the ranks, in its own type, and put the result into `into`."""
        import torch.distributed as dist

        self.step_bytes += sent.numel() * sent.element_size()
        work = dist.all_reduce(sent, async_op=True)
        return work.get_future().then(lambda done: done.value()[0] if sent is into else into.copy_(done.value()[0]))


class Bf16(Reduction):
    """Half the bytes. Gloo and NCCL both add bfloat16 by themselves."""

    def _reduce(self, bucket: Any) -> Any:
        import torch

        return self._sum(bucket.buffer().to(torch.bfloat16), bucket.buffer())


class PowerSgd(Reduction):
    """torch's PowerSGD hook after `uncompressed` steps. Its memory of the omitted parts is in no checkpoint."""

    def __init__(self, uncompressed: int) -> None:
        super().__init__()
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

        self.state = PowerSGDState(
            None,
            matrix_approximation_rank=wire_bytes.POWERSGD_RANK,
            start_powerSGD_iter=uncompressed,
            min_compression_rate=wire_bytes.POWERSGD_WORTH,
            orthogonalization_epsilon=_NO_ZERO,
        )
        self._waiting: list[tuple[Any, Any]] = []

    def _reduce(self, bucket: Any) -> Any:
        import torch
        import torch.distributed as dist

        if dist.get_backend() == "nccl":  # a stream of its own, in the order of the calls
            return self._one(bucket)
        # Gloo finishes an all-reduce in a thread of its own, and the hook starts the next one there. With two buckets on their way
        # those would be started in another order on each rank, and mixed up: so one bucket after the other, when all are ready.
        # Gloo also sums tensors on a card.
        buffer = bucket.buffer()
        future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._waiting.append((bucket, future))
        if bucket.is_last():
            waiting, self._waiting = self._waiting, []
            for ready, promised in waiting:
                promised.set_result(self._one(ready).wait())
        return future

    def _one(self, bucket: Any) -> Any:
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

        if self.state.iter < self.state.start_powerSGD_iter:
            elements = bucket.buffer().numel()
        else:
            shapes = [tensor.shape for tensor in bucket.gradients()]
            elements = sum(
                wire_bytes.powersgd_elements(shape[0], shape.numel() // shape[0]) if len(shape) > 1 else shape.numel() for shape in shapes
            )
        self.step_bytes += elements * bucket.buffer().element_size()
        bucket.buffer().mul_(dist.get_world_size())  # torch's hook averages
        return powerSGD_hook(self.state, bucket)
