"""One rank of `nccl`: python -m benchmarks.gpu_parts.nccl_peer once|sums|subgroup BACKEND TIMEOUT_S LOCAL.

It joins as the worker does: with a store, and with NCCL on its card at once (`device_id`).
"""

from __future__ import annotations

import datetime
import os
import sys


def main(what: str, backend: str, timeout_s: str, local: str) -> int:
    """Join, do it, and leave."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(0)
    rank, timeout = int(os.environ["RANK"]), datetime.timedelta(seconds=float(timeout_s))
    dist.init_process_group(backend, timeout=timeout, device_id=device if backend == "nccl" else None)
    values = torch.ones(2**20, device=device)
    dist.all_reduce(values)
    assert values[0].item() == dist.get_world_size()
    print("joined", flush=True)
    if what == "subgroup":
        group = dist.new_group([0, 1], backend="gloo", timeout=timeout, use_local_synchronization=local == "1")
        if rank < 2:
            dist.broadcast(torch.ones(8), 0, group)
        dist.all_reduce(values)
        values.sum().item()
    for step in range(100_000 if what == "sums" else 0):
        dist.all_reduce(values)
        values.fill_(values[0].item() / dist.get_world_size())
        if step <= 20:
            print(f"step {step}", flush=True)
    print("well", flush=True)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
