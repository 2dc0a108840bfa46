"""NCCL and gloo as torch uses them, as far as the worker meets their rules. Some can be switched off; each names where it is written.

connect      The first message on a connector blocks the HOST until the peer has its call there, too; the first collective of a kind until all have.
             NCCL 2.29.7: enqueue.cc:2541-2556 marks the connector, group.cc:139-147 and 598 prepare it on the host (ncclP2PPreconnectFunc,
             ncclCollPreconnectFunc), transport.cc:179-180 waits for the peer. `new_group` makes no connector.
stream       One stream for each group. An operation begins behind what the current stream held at the call (ProcessGroupNCCL::pointToPoint, syncStream).
             A collective that is not `async_op` runs on the current stream (ProcessGroupNCCL::collective since torch 2.8), and one communicator
             does one thing after the other (NCCL enqueue.cc, ncclLaunchPrepare: the communicator's own stream).
rendezvous   Nothing is buffered: a message takes place when both sides have begun it, a collective when all have.
order        The ranks of a group call the same collectives in the same order. NCCL compares nothing: it would hang, or mix them up.
wait         `Work.wait` blocks the current stream and not the host (WorkNCCL::synchronizeStream). `is_completed` of gloo's work stays false until `wait`.
             A future of NCCL's work is complete at once, and what is chained to it runs then and there, on a stream that waits (ivalue_inl.h,
             Future::invokeCallback).
coalesced    The messages of `batch_isend_irecv` are one kernel: none of them waits for another of the same rank (NCCL user guide, "Group calls").
groups       All ranks make a group of NCCL, members or not (ncclCommSplit of the communicator that is bound to a card). Beside such a communicator, a
             rank outside of a smaller gloo group splits it alone, and waits for ever (distributed_c10d.py of 2.13:2056, pytorch issue 145376).
             With `use_local_synchronization` its members alone meet, under a name that counts the groups that each has (_hash_ranks_to_str).
gloo         Sends memory of the host alone; `wait` blocks the host; it runs beside the card; between two ranks the order of each direction is kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.worker.cards.card import Card, OnCard
from tests.worker.cards.world import Deadlock, Operation, World


@dataclass(frozen=True)
class Rules:
    """Which of the rules count. `retries_at`: rank, kernel and number of the launch before which the allocator finds no room."""

    connect: bool = True
    lazy: bool = True
    retries_at: tuple[int, str, int] | None = None
    backend: str = "nccl"
    message_s: float = 0.0


class Work:
    """An operation that was begun."""

    def __init__(self, card: Card, operation: Operation, value: torch.Tensor | None = None) -> None:
        self._card, self._operation, self._value = card, operation, value
        self._is_awaited = False

    def wait(self) -> bool:
        if self._operation.is_on_card:
            self._card.current_stream().awaited.append(self._operation)
        else:
            self._card.world.wait_for([self._operation], f"the end of {self._operation.name}")
        self._is_awaited = True
        return True

    def is_completed(self) -> bool:
        end_s = self._operation.end_s
        has_ended = end_s is not None and end_s <= self._card.world.here.now_s
        return has_ended if self._operation.is_on_card else self._is_awaited

    def get_future(self) -> Future:
        return Future(self._card, [self._operation], [self._value])


class Future(torch.futures.Future):
    """A future of work on a card: it has a value at once, and the current stream waits for it."""

    def __init__(self, card: Card, held: list[Operation], value: Any) -> None:
        super().__init__()
        self.held, self._card = held, card
        self.set_result(value)

    def wait(self) -> Any:
        self._card.current_stream().awaited.extend(self.held)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Future:
        stream = self._card.Stream()
        stream.awaited.extend(self.held)
        with self._card.stream(stream):
            value = callback(self)
        if isinstance(value, Future):
            return value
        return Future(self._card, stream.held(), value)


@dataclass(frozen=True)
class _Group:
    """What one rank has made."""

    backend: str
    members: tuple[int, ...]
    name: str


@dataclass
class _Call:
    """One collective, as far as ranks have called it: what it is, and their tensors."""

    kind: str
    tensors: dict[int, Sequence[torch.Tensor]]
    meeting: list[Operation]


class Distributed:
    """torch.distributed of all ranks: groups, messages and collectives."""

    def __init__(self, world: World, card: Card, rules: Rules) -> None:
        self._world, self._card, self._rules = world, card, rules
        everyone = tuple(range(len(world.hosts)))
        self._groups = {host.rank: [_Group(rules.backend, everyone, "the first group")] for host in world.hosts}
        self._counted: dict[int, int] = defaultdict(int)  # groups that all ranks were asked for; torch never counts one back
        self._living: dict[int, int] = defaultdict(lambda: 1)  # groups that a rank has now
        self._begun: dict[tuple[Any, ...], list[Operation]] = defaultdict(list)
        self._connecting: dict[tuple[Any, ...], float] = {}
        self._calls: dict[str, list[_Call]] = defaultdict(list)
        self._called: dict[tuple[str, int], int] = defaultdict(int)
        self._met: dict[tuple[Any, ...], dict[int, float]] = defaultdict(dict)

    def group(self, number: int | None) -> _Group:
        """A group of this rank; None: that of all."""
        return self._groups[self._world.here.rank][number or 0]

    def new_group(
        self, ranks: Any = None, *, backend: str | None = None, use_local_synchronization: bool = False, **_options: Any
    ) -> int | None:
        """Its number, in the count of this rank; None for who is outside of a group that its members make alone."""
        rank, everyone = self._world.here.rank, self.group(None).members
        members, backend = tuple(ranks) if ranks is not None else everyone, backend or self._rules.backend
        number = len(self._groups[rank])
        if use_local_synchronization and rank not in members:
            return None
        if use_local_synchronization:
            name = f"group of ranks {members} as no. {self._living[rank]}"
        else:
            self._counted[rank] += 1
            name = f"group no. {self._counted[rank]} of ranks {members}"
        self._living[rank] += rank in members
        self._groups[rank].append(_Group(backend, members, name))
        waits_for = members if use_local_synchronization or (backend == "gloo" and rank in members) else everyone
        is_alone = backend == "gloo" and rank not in members and self._rules.backend == "nccl"
        self._meet(
            (name, "alone" if is_alone else backend),
            waits_for,
            f"{name} ({backend}), {'ncclCommSplit beside it' if is_alone else 'its members'}",
        )
        return number

    def destroy_process_group(self, _number: int) -> None:
        """Only the count of living groups."""
        self._living[self._world.here.rank] -= 1

    def _meet(self, key: tuple[Any, ...], ranks: Sequence[int], reason: str) -> None:
        """The host waits until all of them are here."""
        here = self._met[key]
        here[self._world.here.rank] = self._world.here.now_s
        self._world.wait(reason, lambda: max(here.values()) if here.keys() >= set(ranks) else None)

    # Messages

    def isend(self, tensor: torch.Tensor, peer: int, group: int | None = None) -> Work:
        return self._message("send", tensor, peer, group, None)

    def irecv(self, tensor: torch.Tensor, peer: int, group: int | None = None) -> Work:
        return self._message("recv", tensor, peer, group, None)

    def batch_isend_irecv(self, messages: Sequence[tuple[str, torch.Tensor, int]], group: int | None = None) -> list[Work]:
        """Messages as (send or recv, tensor, peer)."""
        rank, name = self._world.here.rank, self.group(group).name
        for _, _, peer in messages:
            self._connecting.setdefault((name, rank, peer), self._world.here.now_s)
        stream = self._card.named(name)
        works = [self._message(kind, tensor, peer, group, stream.held()) for kind, tensor, peer in messages]
        stream.put(Operation(rank, "the end of the batch", self._world.here.now_s, 0.0, [work._operation for work in works]))
        return works

    def _message(self, kind: str, tensor: torch.Tensor, peer: int, number: int | None, together: list[Operation] | None) -> Work:
        """`together`: what is before all messages of a batch; None for one alone."""
        rank, group, now_s = self._world.here.rank, self.group(number), self._world.here.now_s
        assert {rank, peer} <= set(group.members)
        is_nccl = group.backend == "nccl"
        assert isinstance(tensor, OnCard) == is_nccl, f"{group.backend} cannot {kind} {type(tensor).__name__}"
        if is_nccl and self._rules.connect:
            self._connecting.setdefault((group.name, rank, peer), now_s)
            reason = f"the first {kind} on {group.name} waits for rank {peer} in ncclTransportP2pSetup"
            self._world.wait(reason, lambda: self._connecting.get((group.name, peer, rank)))
        mine = (group.name, rank, peer, kind)
        begun = self._begun[mine]
        after = self._card.current_stream().held() if is_nccl else []
        operation = Operation(
            rank,
            f"{kind} no. {len(begun)} with rank {peer}",
            now_s,
            self._rules.message_s,
            [*after, *(together or [])],
            2,
            is_on_card=is_nccl,
        )
        begun.append(operation)
        theirs = self._begun[group.name, peer, rank, "recv" if kind == "send" else "send"]
        operation.meeting = theirs[len(begun) - 1].meeting if len(theirs) >= len(begun) else []
        operation.meeting.append(operation)
        self._world.enqueue(operation if together is not None else group.name if is_nccl else mine, operation)
        self._world.wait("its turn", lambda: 0.0)
        return Work(self._card, operation)

    # Collectives

    def all_gather_into_tensor(self, into: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Work | None:
        into.view(-1).copy_(tensor.reshape(-1).repeat(into.numel() // tensor.numel()))  # until it takes place: no number that is none
        return self._collective("all_gather", [into, tensor], group, async_op, _gathered)

    def reduce_scatter_tensor(
        self, into: torch.Tensor, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Work | None:
        into.view(-1).copy_(tensor.reshape(-1)[: into.numel()])
        return self._collective("reduce_scatter", [into, tensor], group, async_op, _scattered)

    def all_reduce(self, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> Work | None:
        return self._collective("all_reduce", [tensor], group, async_op, lambda *_: None)

    def broadcast(self, tensor: torch.Tensor, source: int, group: Any = None, async_op: bool = False) -> Work | None:
        return self._collective(f"broadcast from rank {source}", [tensor], group, async_op, lambda _, tensors: _spread(source, tensors))

    def _collective(
        self, kind: str, tensors: Sequence[torch.Tensor], number: Any, async_op: bool, take_place: Callable[[Sequence[int], dict[int, Any]], None]
    ) -> Work | None:  # fmt: skip
        """`take_place` puts the values where they belong, when all have called."""
        rank, group = self._world.here.rank, self.group(number)
        is_nccl, detail = group.backend == "nccl", f"{kind} of {max(tensor.numel() for tensor in tensors)}"
        place = self._called[group.name, rank]
        self._called[group.name, rank] += 1
        calls = self._calls[group.name + str(group.members)]
        if place == len(calls):
            calls.append(_Call(detail, {}, []))
        call = calls[place]
        if call.kind != detail:
            raise Deadlock(
                f"rank {rank}: {detail} is its call no. {place} on {group.name}, and that of rank {min(call.tensors)} is {call.kind}"
            )
        call.tensors[rank] = tensors
        if len(call.tensors) == len(group.members):
            take_place(group.members, call.tensors)
        if is_nccl and self._rules.connect:
            self._meet(
                (group.name, group.members, kind),
                group.members,
                f"the first {kind} on {group.name} prepares its connections (ncclCollPreconnectFunc)",
            )
        name = f"{kind} no. {place} on {group.name}"
        operation = Operation(rank, name, self._world.here.now_s, self._rules.message_s, [], len(group.members), call.meeting, is_nccl)
        call.meeting.append(operation)
        own = self._card.named(group.name)
        if is_nccl and not async_op:
            operation.after = own.held()
            self._card.current_stream().put(operation)
            own.awaited.append(operation)
            return None
        operation.after = self._card.current_stream().held() if is_nccl else []
        own.put(operation)
        work = Work(self._card, operation, tensors[0])
        if not async_op:
            work.wait()
        return work if async_op else None


def _gathered(members: Sequence[int], tensors: dict[int, Any]) -> None:
    for into, _ in tensors.values():
        into.view(-1).copy_(torch.cat([tensors[rank][1].reshape(-1) for rank in members]))


def _scattered(members: Sequence[int], tensors: dict[int, Any]) -> None:
    parts = sum(tensors[rank][1].reshape(len(members), -1) for rank in members)
    for place, rank in enumerate(members):
        tensors[rank][0].view(-1).copy_(parts[place])


def _spread(source: int, tensors: dict[int, Any]) -> None:
    for (tensor,) in tensors.values():
        tensor.copy_(tensors[source][0])
