"""The other ranks: joining them, waiting for them, and the one small collective that the worker needs beside DDP's own.

There are two kinds of waiting. Where ranks connect, a silent peer cannot be reached, and HOMELAB_DDP_TIMEOUT_S (120) ends the wait. From
then on one rank may rightly take many minutes longer than another: it loads or saves (there the others wait at torchrun's key-value
store), or its machine is slow today and the others wait in a collective. Both end after half an hour, or after three
times what the plan expects of a step where that is longer (HOMELAB_PATIENCE_S overrules it). That is a last resort: who is dead, frozen
or cut off is noticed in seconds by whoever watches the run (`homelab.runs.watchdog`, `homelab.node.guard`).
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from homelab.worker.errors import WorkerError
from homelab.worker.task import Task

_stores: list[dist.Store] = []  # the store of the process group, once joined
_LEAST_PATIENCE_S = 1800.0
_GUESS = 3.0  # what is expected of a card that was never measured may be wrong by so much


def claim_device(task: Task) -> None:
    """Take this rank's GPU, if the plan wants one. Raises WorkerError when torch sees none."""
    if task.device == "cuda":
        if not torch.cuda.is_available():
            hint = "run `homelab preflight`; torch must be built for this card's CUDA, and the driver must be loaded"
            raise WorkerError("the plan wants CUDA, but torch sees no GPU here", where=f"node {task.node}{_card_of(task)}", hint=hint)
        if task.local_rank >= torch.cuda.device_count():  # CUDA takes no card behind the first that is gone
            wanted = sum(entry["node"] == task.node for entry in task.plan["ranks"])
            seen = f"torch sees {torch.cuda.device_count()} of the {wanted} cards that the plan wants here"
            hint = "`nvidia-smi -L` there lists the cards; correct `gpus` of the node in cluster.toml, then `homelab recover`"
            raise WorkerError(f"{seen}: one is gone since the plan was made", where=f"node {task.node}{_card_of(task)}", hint=hint)
        torch.cuda.set_device(task.local_rank)


def _card_of(task: Task) -> str:
    own = next((entry for entry in task.plan["ranks"] if entry["rank"] == task.rank), {})
    name = " ".join(str(own[key]) for key in ("device_name", "card") if own.get(key))
    return f", card {name}" if name else ""


def connect(task: Task) -> None:
    """Join the process group of this attempt when everybody has loaded, with a timeout that ends silence, and a longer one from then on.

    Hugging Face would do it too, but with `use_cpu=True` it ignores its own `ddp_timeout` (accelerate/state.py), and a lost peer
    would hang for 30 minutes. A single process joins nothing: DDP's buckets would cost it one more copy of the gradient.
    """
    if task.world_size == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    os.environ.setdefault("HOMELAB_PATIENCE_S", str(patience_s(task.plan)))
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=patience())))
    _stores.append(dist.PrefixStore(f"homelab/{task.attempt}", store))
    wait_for_all("loaded", size)
    dist.init_process_group(
        task.plan["backend"],
        store=_stores[0],
        rank=rank,
        world_size=size,
        timeout=silence(),
        device_id=torch.device("cuda", task.local_rank) if task.plan["backend"] == "nccl" else None,
    )
    dist.distributed_c10d._set_pg_timeout(patience())


def disconnect() -> None:
    """Leave the process group after everything is done. One of NCCL is left by the end of the process: to take it down waits for the card and
    for threads (ProcessGroupNCCL::shutdown), and a finished rank that stalls there would look like one that hangs.
    """
    if dist.is_initialized() and dist.get_backend() != "nccl":
        dist.destroy_process_group()
    _stores.clear()


def wait_for_all(occasion: str, size: int) -> None:
    """Wait until all `size` ranks are here, patiently. Each occasion needs a name of its own."""
    if not _stores:
        return
    if _stores[0].add(f"{occasion}/arrived", 1) == size:
        _stores[0].set(f"{occasion}/all", "here")
    _stores[0].wait([f"{occasion}/all"], patience())


def sign(occasion: str) -> None:
    """Tell those who wait at `wait_while_moving` that there is progress."""
    if _stores:
        _stores[0].add(f"{occasion}/signs", 1)


def wait_while_moving(occasion: str, size: int, beat: Callable[[], None]) -> None:
    """Wait until all `size` ranks are here, however long that takes, while `sign` tells of progress. `beat` is called once a second.

    Raises TimeoutError when there was none for as long as a peer is waited for inside a step.
    """
    if not _stores:
        return
    store = _stores[0]
    if store.add(f"{occasion}/arrived", 1) == size:
        store.set(f"{occasion}/all", "here")
    seen, since_s, beat_s = -1, time.monotonic(), time.monotonic()
    while not store.check([f"{occasion}/all"]):
        signs = store.add(f"{occasion}/signs", 0) + store.add(f"{occasion}/arrived", 0)
        now_s = time.monotonic()
        if signs != seen:
            seen, since_s = signs, now_s
        if now_s - since_s > patience().total_seconds():
            raise TimeoutError(f"waiting for the others ({occasion}) timed out after {now_s - since_s:.0f} s without progress")
        if now_s - beat_s >= 1.0:
            beat_s = now_s
            beat()
        time.sleep(0.02)


def gather(values: list[float]) -> list[list[float]]:
    """The values of every rank in rank order, the same on all ranks. Sent as float64: token counts stay exact up to 2^53."""
    if not dist.is_initialized():
        return [values]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mine = torch.tensor(values, dtype=torch.float64, device=device)
    everyone = mine.new_empty(dist.get_world_size() * len(values))
    dist.all_gather_into_tensor(everyone, mine)
    return everyone.view(-1, len(values)).tolist()  # one copy from the card, and one wait for it


def silence() -> datetime.timedelta:
    """How long a peer that cannot be reached is waited for."""
    return datetime.timedelta(seconds=float(os.environ.get("HOMELAB_DDP_TIMEOUT_S", "120")))


def patience() -> datetime.timedelta:
    """How long a peer that was reached once is waited for."""
    return datetime.timedelta(seconds=float(os.environ.get("HOMELAB_PATIENCE_S", _LEAST_PATIENCE_S)))


def patience_s(plan: Mapping[str, Any]) -> float:
    """The same in seconds, as a plan wants it: NCCL counts from the moment at which the first rank comes to a collective, and that one
    may have had next to nothing to do in a step, or an evaluation, of many minutes."""
    expected = plan.get("time") or {}
    return max(_LEAST_PATIENCE_S, *(_GUESS * float(expected.get(name) or 0.0) for name in ("step_s", "evaluate_s")))
