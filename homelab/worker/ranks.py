"""The other ranks: starting the process group, and the few small collectives that the worker needs beside DDP's own."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from homelab.worker.errors import WorkerError
from homelab.worker.task import Task


def connect(task: Task) -> None:
    """Join the process group of this attempt, with a timeout that ends silence.

    Hugging Face would do it too, but with `use_cpu=True` it ignores its own `ddp_timeout` (accelerate/state.py), and a lost peer
    would hang for 30 minutes. A single process joins nothing: DDP's buckets would cost it one more copy of the gradient.
    """
    if task.device == "cuda":
        if not torch.cuda.is_available():
            hint = "run `homelab preflight`; torch must be built for this card's CUDA, and the driver must be loaded"
            raise WorkerError("the plan wants CUDA, but torch sees no GPU here", where=f"node {task.node}", hint=hint)
        torch.cuda.set_device(task.local_rank)
    if task.world_size == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    timeout_s = float(os.environ.get("HOMELAB_DDP_TIMEOUT_S", "120"))
    dist.init_process_group(
        task.plan["backend"],
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=torch.device("cuda", task.local_rank) if task.plan["backend"] == "nccl" else None,
    )


def disconnect() -> None:
    """Leave the process group after everything is done."""
    if dist.is_initialized():
        dist.destroy_process_group()


def barrier() -> None:
    """Wait for all ranks."""
    gather([0.0])


def gather(values: list[float]) -> list[list[float]]:
    """The values of every rank in rank order, the same on all ranks. Sent as float64: token counts stay exact up to 2^53."""
    if not dist.is_initialized():
        return [values]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [theirs.tolist() for theirs in everyone]
