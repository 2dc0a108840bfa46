"""One rank of `held`: python -m benchmarks.gpu_parts.held_peer BACKEND COMMUNICATORS. It prints "held WHAT BYTES" as it goes.

Bytes are those of the card that the driver gave to both ranks, beside what torch holds for tensors, divided by two. Rank 0 asks nvidia-smi: a
question by torch would make a context.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
from typing import Any

from benchmarks.gpu_parts import smi
from benchmarks.gpu_parts.environment import first_card

_WAIT_S = 1.0  # how long two receives stay open


def main(backend: str, communicators: str) -> int:
    """Join, make the groups, leave receives open, and leave."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    before = _taken_bytes(device, 0)
    if backend == "nccl":
        torch.cuda.set_device(0)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"]), is_master=os.environ["RANK"] == "0"
    )
    rank, meetings = int(os.environ["RANK"]), iter(range(1000))

    def told(what: str) -> None:
        """Both ranks are here, and hold what they hold: each says its half."""
        _meet(store, f"before {what} {next(meetings)}")
        of_tensors = torch.cuda.memory_reserved() if device.type == "cuda" else 0
        print(f"held {what} {max(0, _taken_bytes(device, 2 * of_tensors) - before) // 2}", flush=True)
        _meet(store, f"after {what} {next(meetings)}")

    matrix = torch.ones((1024, 1024), device=device)
    told("context")
    product_s = _product_s(torch, matrix)
    told("product")
    limit, on = datetime.timedelta(seconds=30), device if backend == "nccl" else None
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=2, timeout=limit, device_id=on)
    groups: list[Any] = [dist.group.WORLD]
    for count in range(1, int(communicators) + 1):
        if count > 1:
            groups.append(dist.new_group(backend=backend, timeout=limit))
        dist.all_reduce(matrix[:8], group=groups[-1])
        _exchange(torch, dist, rank, groups[-1], device)
        told(f"communicators {count}")
    _open_receives(torch, dist, rank, groups, matrix, product_s)
    _meet(store, "the end")
    os._exit(0)


def _taken_bytes(device: Any, of_tensors: int) -> int:
    """Of the card, by all processes, without what torch holds for tensors; 0 on a CPU and on rank 1."""
    return smi.used_bytes(first_card()) - of_tensors if device.type == "cuda" and os.environ["RANK"] == "0" else 0


def _meet(store: Any, name: str) -> None:
    if store.add(f"meet {name}", 1) == 2:
        store.set(f"met {name}", "1")
    store.wait([f"met {name}"])


def _exchange(torch: Any, dist: Any, rank: int, group: Any, device: Any) -> None:
    """A message in each direction: connections are made by the first one."""
    sent, received = torch.ones(8, device=device), torch.empty(8, device=device)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, 1 - rank, group), dist.P2POp(dist.irecv, received, 1 - rank, group)]):
        work.wait()
    assert received.sum().item() == 8


def _open_receives(torch: Any, dist: Any, rank: int, groups: list[Any], matrix: Any, alone_s: float) -> None:
    """Rank 0 has two receives open for a second: what its CPU spends meanwhile, and how long a product takes beside them."""
    if rank:
        time.sleep(_WAIT_S)
        for group in groups[:2]:
            dist.send(matrix, 0, group=group)
        print("held cpu_ms_of_open_receives 0\nheld product_beside_open_receives_percent 0", flush=True)
        return
    works = [dist.irecv(torch.empty_like(matrix), 1, group=group) for group in groups[:2]]
    began, cpu = time.perf_counter(), time.process_time()
    beside_s = _product_s(torch, matrix)
    time.sleep(max(0.0, 0.8 * _WAIT_S - (time.perf_counter() - began)))
    spent = (time.process_time() - cpu) / (time.perf_counter() - began)
    for work in works:
        work.wait()
    print(
        f"held cpu_ms_of_open_receives {1000 * spent:.0f}\nheld product_beside_open_receives_percent {100 * beside_s / alone_s:.0f}",
        flush=True,
    )


def _product_s(torch: Any, matrix: Any) -> float:
    """Seconds of ten products, of the stream that computes alone: the whole card would wait for the receives, too."""
    began = time.perf_counter()
    for _ in range(10):
        result = matrix @ matrix
    if matrix.is_cuda:
        torch.cuda.current_stream().synchronize()
    result[0, 0].item()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
