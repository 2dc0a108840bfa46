"""NCCL and a card as torch uses them, as far as the worker meets their rules. Each rule can be switched off, and names where it is written.

connect      The first message on a connector blocks the HOST until the peer has its call there, too. NCCL 2.29.7: enqueue.cc:2541-2556 marks the
             connector, group.cc:139-147 and 598 prepare it on the host, transport.cc:179-180 waits for the peer. `new_group` makes no connector.
stream       One stream for each group. An operation begins behind what the compute stream held at the call (ProcessGroupNCCL::pointToPoint, syncStream).
rendezvous   Nothing is buffered: a message takes place when both sides have begun it.
wait         `Work.wait` blocks the compute stream and not the host (WorkNCCL::synchronizeStream). `is_completed` of gloo's work stays false until `wait`.
lazy         The first launch of a kernel loads it, which waits for what the card runs (CUDA programming guide, 4.7, "Concurrent execution"; lazy
             loading is the default since CUDA 12.2; meta-pytorch/torchcomms pull request 2334 has two programs that hang).
retry        An allocation that finds no room frees cached blocks, and cudaFree waits for the card (c10 CUDACachingAllocator, release_cached_blocks).
pinning      Memory of a card cannot be pinned (ATen/native/Memory.cpp, _pin_memory).
gloo         Sends memory of the host alone; `wait` blocks the host; it runs beside the card; between two ranks the order of each direction is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.worker.cards.world import Operation, World

COMPUTE = "compute"


@dataclass(frozen=True)
class Rules:
    """Which of the rules count. `retries_at`: rank, kernel and number of the launch before which the allocator finds no room."""

    connect: bool = True
    lazy: bool = True
    retries_at: tuple[int, str, int] | None = None
    backend: str = "nccl"
    message_s: float = 0.0


class OnCard(torch.Tensor):
    """Memory of a card. Its values are there at once; only time is that of a card."""

    card: Card

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        self.card.synchronize()
        return self.as_subclass(torch.Tensor)

    def pin_memory(self, *_device: Any) -> torch.Tensor:  # type: ignore[override]
        raise RuntimeError(f"cannot pin 'torch.cuda.{self.dtype}' only dense CPU tensors can be pinned")

    def __float__(self) -> float:
        return float(self.cpu())


class Pinned(torch.Tensor):
    """Memory of the host that a card reads by itself."""

    def to(self, device: Any, **_options: Any) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(OnCard)


class Card:
    """The card of the host that calls, and what torch does with it."""

    type = "cuda"

    def __init__(self, world: World, rules: Rules) -> None:
        self._world, self._rules = world, rules
        self._loaded: set[tuple[int, str]] = set()
        self._launches: dict[tuple[int, str], int] = defaultdict(int)
        #: What the compute stream has to wait for before its next kernel.
        self.awaited: dict[int, list[Operation]] = defaultdict(list)
        OnCard.card = self

    def launch(self, kernel: str, seconds: float) -> None:
        """A kernel on the compute stream."""
        rank = self._world.here.rank
        number = self._launches[rank, kernel]
        self._launches[rank, kernel] += 1
        if self._rules.retries_at == (rank, kernel, number):
            self._until_idle(f"cudaFree before {kernel} no. {number}: the allocator found no room")
        if self._rules.lazy and (rank, kernel) not in self._loaded:
            self._loaded.add((rank, kernel))
            self._until_idle(f"the first launch of {kernel} loads it, and waits for the card")
        after = self.awaited.pop(rank, [])
        self._world.enqueue(COMPUTE, Operation(rank, kernel, self._world.here.now_s, seconds, after))

    def _until_idle(self, reason: str) -> None:
        running = [one for one in self._world.operations[self._world.here.rank] if one.is_on_card and one.end_s is None]
        self._world.wait_for(running, f"{reason}, where {', '.join(one.name for one in running) or 'nothing'} runs")

    def synchronize(self) -> None:
        """cudaStreamSynchronize of the compute stream, with what it has to wait for."""
        self._world.wait_for([*self._world.last(COMPUTE), *self.awaited[self._world.here.rank]], "cudaStreamSynchronize")


class Work:
    """An operation that was begun."""

    def __init__(self, world: World, card: Card, operation: Operation) -> None:
        self._world, self._card, self._operation = world, card, operation
        self._is_awaited = False

    def wait(self) -> bool:
        if self._operation.is_on_card:
            self._card.awaited[self._operation.rank].append(self._operation)
        else:
            self._world.wait_for([self._operation], f"the end of {self._operation.name}")
        self._is_awaited = True
        return True

    def is_completed(self) -> bool:
        end_s = self._operation.end_s
        has_ended = end_s is not None and end_s <= self._world.here.now_s
        return has_ended if self._operation.is_on_card else self._is_awaited


class Distributed:
    """torch.distributed, for the modules under test: groups, messages, and one collective."""

    def __init__(self, world: World, card: Card, rules: Rules) -> None:
        self._world, self._card, self._rules = world, card, rules
        self._groups: dict[int, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
        self._begun: dict[tuple[Any, ...], list[Operation]] = defaultdict(list)
        self._connecting: dict[tuple[int, int, int], float] = {}
        self.most_sent: dict[int, int] = defaultdict(int)

    def new_group(self, ranks: Any = None, *, timeout: Any = None, backend: str | None = None) -> int:
        members = tuple(ranks) if ranks is not None else tuple(range(len(self._world.hosts)))
        mine = self._groups[self._world.here.rank]
        number = len(mine)
        mine.append((backend or self._rules.backend, members))
        self._meet(f"new_group no. {number} of {members}", lambda: all(len(self._groups[host.rank]) > number for host in self._world.hosts))
        assert len({self._groups[host.rank][number] for host in self._world.hosts}) == 1, "the ranks make groups in another order"
        return number

    def _meet(self, reason: str, is_there: Callable[[], bool]) -> None:
        self._world.wait(reason, lambda: 0.0 if is_there() else None)

    def isend(self, tensor: torch.Tensor, peer: int, group: int) -> Work:
        return self._message("send", tensor, peer, group)

    def irecv(self, tensor: torch.Tensor, peer: int, group: int) -> Work:
        return self._message("recv", tensor, peer, group)

    def _message(self, kind: str, tensor: torch.Tensor, peer: int, group: int) -> Work:
        rank = self._world.here.rank
        backend, members = self._groups[rank][group]
        assert {rank, peer} <= set(members)
        is_nccl = backend == "nccl"
        assert isinstance(tensor, OnCard) == is_nccl, f"{backend} cannot {kind} {type(tensor).__name__}"
        if is_nccl and self._rules.connect:
            self._connecting.setdefault((group, rank, peer), self._world.here.now_s)
            reason = f"the first {kind} on group {group} waits for rank {peer} in ncclTransportP2pSetup"
            self._world.wait(reason, lambda: self._connecting.get((group, peer, rank)))
        mine = (group, rank, peer, kind)
        number = len(self._begun[mine])
        stream = ("group", group) if is_nccl else ("wire", *mine)
        after = self._world.last(COMPUTE) if is_nccl else []
        operation = Operation(rank, f"{kind} no. {number} with rank {peer}", self._world.here.now_s, self._rules.message_s, [*after], 2, is_on_card=is_nccl)
        self._begun[mine].append(operation)
        theirs = self._begun[group, peer, rank, "recv" if kind == "send" else "send"]
        operation.meeting = theirs[number].meeting if len(theirs) > number else []
        operation.meeting.append(operation)
        self._world.enqueue(stream, operation)
        self._world.wait("its turn", lambda: 0.0)
        return Work(self._world, self._card, operation)


class Torch:
    """torch, for the modules under test: a device that is a card, memory that says where it is."""

    def __init__(self, card: Card) -> None:
        self.cuda = self
        self._card = card

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def current_stream(self, _device: Any = None) -> Card:
        return self._card

    def empty(self, *shape: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        made = torch.zeros(*shape, **options)
        return made.as_subclass(OnCard) if device is not None else made.as_subclass(Pinned) if pin_memory else made

    def zeros(self, *shape: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return self.empty(*shape, device=device, **options)

    def manual_seed(self, _seed: int) -> None:
        pass
