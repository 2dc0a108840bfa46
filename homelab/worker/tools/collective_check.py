"""The collective smoke test: joins the process group as training will, and sums 8 bytes, 1 MB and 64 MB over all ranks.

torchrun starts it on every node (`python -m homelab.worker.tools.collective_check BACKEND`); `homelab.worker.tools.rank_state` tells how far it is.

Seconds are those of the slowest rank. Bus bandwidth is size x 2 (n - 1) / n / seconds: what each wire of a ring of n ranks carried
per second, which can be compared with the speed of the wire whatever n is (nccl-tests, doc/PERFORMANCE.md).
"""

from __future__ import annotations

import datetime
import math
import os
import sys
import time
from typing import TYPE_CHECKING, Any

from homelab.shared.protocol import collective_stages
from homelab.worker.tools.rank_state import StateFile, leave, watched

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

SIZES = tuple(collective_stages.SIZES.items())
REPEATS = {8: 5, 1_000_000: 3, 64_000_000: 1}  # the fastest one counts, because the first large message also sets up buffers
REPEATED_S = 0.3
# A size that would take longer than this is left out: 64 MB take 73 s on 10 Mbit/s, and 1 MB is enough to know.
TOO_LONG_S = 10.0
PERIOD = 1009  # prime: a piece that lands in the wrong place gives another number


def bus_bandwidth(size_bytes: int, ranks: int, seconds: float) -> float:
    """Bytes per second over each wire of a ring: size x 2 (n - 1) / n / seconds (nccl-tests, doc/PERFORMANCE.md)."""
    return size_bytes * 2 * (ranks - 1) / ranks / seconds if seconds > 0 else 0.0


def pattern(size_bytes: int, device: torch.device) -> torch.Tensor:
    """float32 [size_bytes / 4]: 1, 2, ... PERIOD, 1, 2, ... Rank r contributes (r + 1) times this; sums are whole numbers, so exact."""
    import torch

    return (torch.arange(size_bytes // 4, device=device) % PERIOD + 1).to(torch.float32)


def measure(size_bytes: int, rank: int, ranks: int, device: torch.device) -> dict[str, Any]:
    """All-reduce of so many bytes: seconds of the slowest rank, bus bandwidth, CPU seconds, and how many elements were wrong here."""
    import torch
    import torch.distributed as dist

    assert ranks * (ranks + 1) // 2 * PERIOD < 2**24, ranks  # float32 holds whole numbers up to there
    base = pattern(size_bytes, device)
    expected = base * (ranks * (ranks + 1) // 2)
    best, used_s, slowest_s, cpu_s, wrong, first = math.inf, 0.0, math.inf, 0.0, 0, None
    for _ in range(REPEATS.get(size_bytes, 1)):
        buffer = base * (rank + 1)
        dist.all_reduce(torch.zeros(1, device=device))  # all begin together
        _finish(device)
        cpu_at, started = time.process_time(), time.perf_counter()
        dist.all_reduce(buffer)
        _finish(device)
        seconds = time.perf_counter() - started
        if seconds < best:
            best, used_s = seconds, time.process_time() - cpu_at
        if not torch.equal(buffer, expected):
            bad = (buffer != expected).nonzero()
            wrong, place = int(bad.numel()), int(bad[0])
            first = f"element {place} is {buffer[place].item():g}, not {expected[place].item():g}"
        slowest = torch.tensor([best, used_s], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        slowest_s, cpu_s = slowest.tolist()
        if slowest_s > REPEATED_S:  # the same number on all ranks
            break
    return {
        "size_bytes": size_bytes, "seconds": slowest_s, "bus_bytes_per_s": bus_bandwidth(size_bytes, ranks, slowest_s), "cpu_s": cpu_s,
        "wrong": wrong, "first_wrong": first,
    }  # fmt: skip


def run(backend: str, stage: StateFile) -> None:
    """All stages, one after another: what was measured, right or wrong, is written down. Raises what torch raises."""
    stage(collective_stages.IMPORTING)
    import torch
    import torch.distributed as dist

    stage(collective_stages.JOINING)
    rank, ranks, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    device = torch.device("cpu")
    if backend == "nccl":
        if not torch.cuda.is_available():
            raise RuntimeError("the plan needs CUDA, but torch sees no GPU here")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    patience = datetime.timedelta(seconds=float(os.environ.get("HOMELAB_PATIENCE_S", "180")))
    store = dist.PrefixStore("homelab/collective", _store(patience))
    # A slow machine may need a minute more than the others for its imports. This waits for it, so that the process
    # group's own limit measures the network alone.
    if store.add("arrived", 1) == ranks:
        store.set("all", "here")
    store.wait(["all"], patience)
    limit = datetime.timedelta(seconds=float(os.environ.get("HOMELAB_DDP_TIMEOUT_S", "75")))
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=ranks, timeout=limit, device_id=device if backend == "nccl" else None
    )
    results: list[dict[str, Any]] = []
    for size_bytes, name in SIZES:
        # Seconds are the same number on all ranks, so all decide the same.
        if results and size_bytes / results[-1]["size_bytes"] * results[-1]["seconds"] > TOO_LONG_S and size_bytes > SIZES[1][0]:
            results.append({"size_bytes": size_bytes, "predicted_s": size_bytes / results[-1]["size_bytes"] * results[-1]["seconds"]})
            continue
        stage(name, results=results)
        results.append(measure(size_bytes, rank, ranks, device))
    dist.all_reduce(torch.zeros(1, device=device))  # no rank leaves before all have finished
    _finish(device)
    stage(collective_stages.DONE, results=results)
    dist.destroy_process_group()


def _store(patience: datetime.timedelta) -> dist.Store:
    """torchrun's key-value store."""
    import torch.distributed as dist

    return next(iter(dist.rendezvous("env://", timeout=patience)))[0]


def _finish(device: torch.device) -> None:
    """Wait for what was queued on the card."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    leave(watched(lambda stage: run(sys.argv[1], stage)))
