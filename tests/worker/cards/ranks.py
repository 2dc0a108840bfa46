"""The ranks of a training on stand-in cards: what torch.distributed, the store, the clock and a card are to the worker's own modules.

torch's own classes run, too. Each thread has a default group of its own (torch's "fake" backend, which sends nothing, with registries for each
thread as torch's multi-threaded tests have them), so that meshes, `fully_shard` and DistributedDataParallel are the real ones. What they send
goes through the stand-in. `fully_shard` gets streams of the stand-in as its device handle.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

from homelab.worker.runtime import host_memory, process_group
from homelab.worker.strategies import base, gradient_norm
from homelab.worker.strategies.pipeline import neighbours, passes, shared_table, stages_state
from homelab.worker.strategies.pipeline import stages as pipeline
from homelab.worker.strategies.sharded import exchange
from homelab.worker.training import model_checks, trainer
from tests.worker.cards.card import Card, OnCard, Torch
from tests.worker.cards.nccl import Distributed, Rules, Work
from tests.worker.cards.world import Deadlock, World

_ON_CARD = (
    host_memory,
    neighbours,
    passes,
    shared_table,
    stages_state,
    process_group,
    exchange,
    base,
    gradient_norm,
    model_checks,
    pipeline,
    trainer,
)
_CALLS = (
    "new_group", "destroy_process_group", "isend", "irecv", "batch_isend_irecv", "all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "broadcast",
)  # fmt: skip


class Store:
    """torch's key-value store (TCPStore): a host that waits for a key stands still until another has set it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._set: dict[str, tuple[float, str]] = {}
        self._counts: dict[str, int] = {}

    def add(self, key: str, count: int) -> int:
        self._counts[key] = self._counts.get(key, 0) + count
        return self._counts[key]

    def set(self, key: str, value: str) -> None:
        self._set.setdefault(key, (self._world.here.now_s, value))

    def wait(self, keys: Sequence[str], _limit: Any = None) -> None:
        for key in keys:
            self._world.wait(f"the key {key} of the store", lambda key=key: self._set[key][0] if key in self._set else None)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._set[key][1].encode()

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._set and self._set[key][0] <= self._world.here.now_s for key in keys)


class Ranks:
    """As many ranks as `size`, with a card each."""

    def __init__(self, size: int, rules: Rules) -> None:
        self.size = size
        self.world = World(size)
        self.card = Card(self.world, lazy=rules.lazy, retries_at=rules.retries_at)
        self.dist = Distributed(self.world, self.card, rules)
        self.rules = rules
        self.store = Store(self.world)
        #: The number of each group that torch has made on a rank, by its name there.
        self.made: dict[tuple[int, str], int] = {}

    def play(self, program: Callable[[int], None]) -> str:
        """Why the ranks stand still before `program(rank)` has ended on all of them; empty where it has."""

        def run(rank: int) -> None:
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=self.size)
            program(rank)
            self.card.synchronize()

        try:
            self.world.play(run)
        except Deadlock as error:
            return str(error)
        return ""

    @property
    def end_s(self) -> float:
        """When the last one has ended."""
        return max(host.now_s for host in self.world.hosts)

    def number_of(self, group: Any) -> int | None:
        """A group that torch made, or its number."""
        if group is None or isinstance(group, int) or group.group_name == dist.group.WORLD.group_name:
            return group if isinstance(group, int) else None
        return self.made[self.world.here.rank, group.group_name]


def _at_host(world: World, virtual: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """`virtual` where a rank of the world calls, else `real`."""
    return lambda *values: virtual(*values) if world.is_here else real(*values)


@contextlib.contextmanager
def of(size: int, rules: Rules | None = None) -> Iterator[Ranks]:
    """Ranks whose modules meet the stand-in until the end."""
    rules = rules or Rules()
    ranks = Ranks(size, rules)
    with pytest.MonkeyPatch.context() as patch:
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        try:
            patch.setattr(distributed_c10d, "_world", ThreadLocalWorld())
            _replace(patch, ranks)
            yield ranks
        finally:
            torch._C._distributed_c10d._set_thread_isolation_mode(False)


def _replace(patch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    world, card, own = ranks.world, ranks.card, ranks.dist

    def with_number(call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *values, group=None, **options: call(*values, group=ranks.number_of(group), **options)

    for name in _CALLS:
        call = getattr(own, name)
        patch.setattr(dist, name, call if name in ("new_group", "destroy_process_group") else with_number(call))
    patch.setattr(
        dist,
        "broadcast",
        lambda tensor, source, group=None, async_op=False: own.broadcast(tensor, source, ranks.number_of(group), async_op),
    )
    patch.setattr(dist, "get_backend", lambda group=None: own.group(ranks.number_of(group)).backend)
    patch.setattr(process_group, "_stores", [ranks.store])
    for module in _ON_CARD:
        patch.setattr(module, "torch", Torch())
    for module in (_fsdp_collectives, _fsdp_init, _fsdp_param_group, _fsdp_state):
        patch.setattr(module, "_get_device_handle", lambda *_: card)
    for name in ("Event", "current_stream", "default_stream"):
        patch.setattr(torch.cuda, name, getattr(card, name))
    patch.setattr(torch.cuda, "synchronize", lambda *_: card.until_idle("torch.cuda.synchronize"))
    for module in (base, passes, pipeline, trainer):
        patch.setattr(module, "copied", _copied)
    patch.setattr(torch.distributed.device_mesh, "new_group", _mesh_groups(ranks))
    patch.setattr(torch.distributed._functional_collectives, "all_gather_single", _whole(ranks))
    clock = lambda: world.here.now_s  # noqa: E731
    patch.setattr(time, "perf_counter", _at_host(world, clock, time.perf_counter))
    patch.setattr(time, "monotonic", _at_host(world, clock, time.monotonic))
    patch.setattr(time, "sleep", _at_host(world, world.sleep, time.sleep))


def _copied(batches: Sequence[dict[str, Any]], _device: Any, *, pin: bool) -> list[dict[str, Any]]:
    """homelab.worker.data.batches.copied, to a card."""
    assert not (pin and any(isinstance(tensor, OnCard) for batch in batches for tensor in batch.values())), (
        "only dense CPU tensors can be pinned"
    )
    if not pin:
        OnCard.card.synchronize()
    return [{name: value.as_subclass(OnCard) if torch.is_tensor(value) else value for name, value in batch.items()} for batch in batches]


def _mesh_groups(ranks: Ranks) -> Callable[..., Any]:
    """Of a mesh: made by torch for the thread, and by all ranks together in the stand-in (with a card: `split_group`, device_mesh.py of 2.13:564)."""

    def new_group(ranks_of_it: Sequence[int], **options: Any) -> Any:
        made = distributed_c10d.new_group(ranks_of_it, **options)
        number = ranks.dist.new_group(ranks_of_it)
        if ranks.world.here.rank in ranks_of_it:
            ranks.made[ranks.world.here.rank, made.group_name] = number
        return made

    return lambda ranks=None, **options: new_group(ranks, **options)


def _whole(ranks: Ranks) -> Callable[..., torch.Tensor]:
    """`funcol.all_gather_single`, by which a DTensor becomes whole (placement_types.py of 2.13:609): on the group's own stream, and awaited at once."""

    def all_gather_single(tensor: torch.Tensor, gather_dim: int, group: Any) -> torch.Tensor:
        mesh, dimension = group
        one = mesh.get_group(dimension)
        whole = tensor.new_empty(one.size() * tensor.shape[0], *tensor.shape[1:])
        work = ranks.dist.all_gather_into_tensor(whole, tensor, group=ranks.number_of(one), async_op=True)
        assert gather_dim == 0 and isinstance(work, Work)
        work.wait()
        return whole.as_subclass(OnCard)

    return all_gather_single
