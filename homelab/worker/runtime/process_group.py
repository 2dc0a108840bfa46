"""The process group: joining the other ranks, waiting for them, and the one small collective beside the reduction of gradients.

There are two kinds of waiting. Where ranks connect, a silent peer cannot be reached, and HOMELAB_DDP_TIMEOUT_S (120) ends the wait.
After that a rank may take many minutes longer than another: it loads or saves (there the others wait at torchrun's key-value
store), or its machine is slow and the others wait in a collective. Both end after half an hour, or after three times what the plan
expects of a step where that is longer (HOMELAB_PATIENCE_S overrules it). That is the last resort: the supervisor and the nodes notice a
rank that is dead, frozen or cut off within seconds (`homelab.controller.attempt.watchdog`, `homelab.node.run.isolation_guard`).
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from homelab.worker.errors import WorkerError
from homelab.worker.runtime.task import Task

_stores: list[dist.Store] = []  # the store of the process group, once joined
_hosted: list[dist.Store] = []  # where this process holds it
# Set by torchrun, which holds the store itself (torch/distributed/elastic/agent/server/local_elastic_agent.py).
_AGENT = "TORCHELASTIC_RUN_ID"
_MEETING = datetime.timedelta(minutes=5)  # as torchrun's (`homelab.controller.launchers.torchrun_ssh`)
_LEAVE_S = 30.0  # for the others to have read what they wait for
_LEAST_PATIENCE_S = 1800.0
_GUESS = 3.0  # the estimate for a card that was never measured may be wrong by this factor


def host(task: Task) -> None:
    """Hold the store at which the ranks meet, as rank 0, where no torchrun does (`homelab.node.run.rank_launcher`).

    As soon as it can: who asks for it before it is there tries again only after a second.
    """
    if task.rank == 0 and task.world_size > 1 and _AGENT not in os.environ:
        _hosted.append(_own_store(is_host=True))


def _own_store(*, is_host: bool) -> dist.TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, is_master=is_host, timeout=_MEETING, wait_for_workers=False, multi_tenant=True)
    store.set_timeout(patience())
    return store


def claim_device(task: Task) -> None:
    """Take this rank's GPU, if the plan wants one. Raises WorkerError when torch sees none."""
    if task.device == "cuda":
        if not torch.cuda.is_available():
            hint = "run `homelab preflight`; torch must be built for this card's CUDA, and the driver must be loaded"
            raise WorkerError("the plan needs CUDA, but torch sees no GPU here", where=f"node {task.node}{_card_of(task)}", hint=hint)
        if task.local_rank >= torch.cuda.device_count():  # CUDA does not list any card after the first missing one
            planned = task.nodes.count(task.node)
            problem = f"torch sees {torch.cuda.device_count()} of the {planned} cards of the plan here"
            hint = "`nvidia-smi -L` there lists the cards; correct `gpus` of the node in cluster.toml, then `homelab recover`"
            raise WorkerError(f"{problem}: one is gone since the plan was made", where=f"node {task.node}{_card_of(task)}", hint=hint)
        torch.cuda.set_device(task.local_rank)
        # torch prefers cuDNN's attention on Hopper and data-centre Blackwell. It makes a plan for every new shape, and here each pass has a
        # length of its own: 30 steps of a small model in bf16 took 46 s instead of 4 s (H100, torch 2.11; pytorch pull request 155958).
        torch.backends.cuda.enable_cudnn_sdp(False)


def _card_of(task: Task) -> str:
    own = task.ranks[task.rank]
    name = " ".join(part for part in (own.device_name, own.card) if part)
    return f", card {name}" if name else ""


def connect(task: Task) -> None:
    """Join the process group of this attempt when all ranks have loaded. A peer that cannot be reached has a short time-out, later waits a longer one.

    Hugging Face would do it too, but with `use_cpu=True` it ignores its own `ddp_timeout` (accelerate/state.py), and a lost peer
    would hang for 30 minutes. A single process joins nothing: DDP's buckets would cost it one more copy of the gradient.
    """
    if task.world_size == 1:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        return
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))
    os.environ.setdefault("HOMELAB_PATIENCE_S", str(patience_s(task.plan)))
    store: dist.Store
    if _AGENT in os.environ:
        store, rank, size = next(iter(dist.rendezvous("env://", timeout=patience())))
    else:
        store, rank, size = _hosted[0] if _hosted else _own_store(is_host=False), task.rank, task.world_size
    _stores.append(dist.PrefixStore(f"homelab/{task.attempt}", store))
    wait_for_all("loaded", size)
    dist.init_process_group(
        task.backend,
        store=_stores[0],
        rank=rank,
        world_size=size,
        timeout=silence(),
        device_id=torch.device("cuda", task.local_rank) if task.backend == "nccl" else None,
    )
    dist.distributed_c10d._set_pg_timeout(patience())


def disconnect() -> None:
    """Leave the process group at the end. A group of NCCL is left by the end of the process: taking it down waits for the card and for threads
    (ProcessGroupNCCL::shutdown), and a finished rank that stalls there would look like one that hangs.
    """
    waits_for = dist.get_world_size() if _hosted else 0
    if dist.is_initialized() and dist.get_backend() != "nccl":
        dist.destroy_process_group()
    if _stores and _AGENT not in os.environ:
        with contextlib.suppress(dist.DistError):  # all is written: a store that is gone takes nothing away
            left, deadline = _stores[0].add("left", 1), time.monotonic() + _LEAVE_S
            while left < waits_for and time.monotonic() < deadline:
                time.sleep(0.02)
                left = _stores[0].add("left", 0)
    _stores.clear()
    _hosted.clear()


def wait_for_all(occasion: str, size: int) -> None:
    """Wait until all `size` ranks are here, patiently. Each occasion needs a name of its own."""
    if not _stores:
        return
    if _stores[0].add(f"{occasion}/arrived", 1) == size:
        _stores[0].set(f"{occasion}/all", "here")
    _stores[0].wait([f"{occasion}/all"], patience())


def sign(occasion: str) -> None:
    """Tell the ranks that wait in `wait_while_moving` that there is progress."""
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
    last_signs, since_s, beat_s = -1, time.monotonic(), time.monotonic()
    while not store.check([f"{occasion}/all"]):
        signs = store.add(f"{occasion}/signs", 0) + store.add(f"{occasion}/arrived", 0)
        now_s = time.monotonic()
        if signs != last_signs:
            last_signs, since_s = signs, now_s
        if now_s - since_s > patience().total_seconds():
            raise TimeoutError(f"waiting for the others ({occasion}) timed out after {now_s - since_s:.0f} s without progress")
        if now_s - beat_s >= 1.0:
            beat_s = now_s
            beat()
        time.sleep(0.02)


def exchange(occasion: str, text: str) -> list[str]:
    """The texts of every rank in rank order, the same on all ranks. Each occasion needs a name of its own."""
    if not _stores:
        return [text]
    size = dist.get_world_size()
    _stores[0].set(f"{occasion}/{dist.get_rank()}", text)
    return [_stores[0].get(f"{occasion}/{number}").decode() for number in range(size)]


def gather(values: list[float]) -> list[list[float]]:
    """The values of every rank in rank order, the same on all ranks. Sent as float64: token counts stay exact up to 2^53."""
    if not dist.is_initialized():
        return [values]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    own_values = torch.tensor(values, dtype=torch.float64, device=device)
    everyone = own_values.new_empty(dist.get_world_size() * len(values))
    dist.all_gather_into_tensor(everyone, own_values)
    by_rank: list[list[float]] = everyone.view(-1, len(values)).tolist()  # one copy from the card, and one wait for it
    return by_rank


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
