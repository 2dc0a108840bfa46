"""Messages to the stage before and the stage behind: activations go one way, their gradients the other. Nothing is awaited before it is needed.

Receives are posted ahead, so that a message is on its way while the pass before it is computed; torch's own `Schedule1F1B` (2.13) waits for
each send together with the next receive. Messages go through the host's memory and gloo, on cards too. There, a receive of NCCL is a kernel that
occupies the card until its message comes. Whatever waits for the card meanwhile would wait for a message that needs this very rank: the first
message of a connection, the first launch of a kernel, an allocator that gives memory back (tests/worker/cards has the rules and their sources).
Between machines NCCL goes through the host's memory as well.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from homelab.shared.law.pipeline_schedule import POSTED, UNDER_WAY
from homelab.worker.runtime import host_memory, process_group


@dataclass
class Channel:
    """One direction of one boundary: the other rank, the group of all stages, and what is under way, in the host's memory."""

    peer: int
    group: Any
    sent: deque[tuple[Any, torch.Tensor]] = field(default_factory=deque)

    def make_room(self) -> None:
        """Wait until another message may be on its way."""
        while len(self.sent) >= UNDER_WAY:  # work of gloo is not completed before somebody waits for it
            self.sent.popleft()[0].wait()

    def send(self, tensor: torch.Tensor) -> int:
        """Begin to send, where there is room; the bytes. The tensor must not change any more."""
        self.make_room()
        message = tensor.cpu()
        self.sent.append((dist.isend(message, self.peer, group=self.group), message))
        return int(tensor.nbytes)

    def drain(self) -> None:
        """Wait until everything is sent."""
        while self.sent:
            self.sent.popleft()[0].wait()


class Inbox:
    """The messages of a step in their order, each received into memory of its own."""

    def __init__(self, channel: Channel, shapes: list[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        self._channel, self._dtype, self._device = channel, dtype, device
        self._left = iter(shapes)
        self._posted: deque[tuple[Any, torch.Tensor]] = deque()
        self._post(POSTED)

    def take(self) -> torch.Tensor:
        """The next message, when it is here."""
        work, tensor = self._posted.popleft()
        work.wait()
        self._post(1)
        return tensor.to(self._device, non_blocking=True)  # torch keeps pinned memory until a card has read it

    def _post(self, count: int) -> None:
        for shape in itertools.islice(self._left, count):
            tensor = host_memory.empty(shape, self._dtype, pinned=self._device.type == "cuda")
            self._posted.append((dist.irecv(tensor, self._channel.peer, group=self._channel.group), tensor))


@dataclass(frozen=True)
class Neighbours:
    """The channels of a stage; None at the ends. `before_in`: activations from the stage before, `before_out`: their gradients to it. `group`: that of
    all stages, in which the channels are."""

    before_in: Channel | None = None
    before_out: Channel | None = None
    behind_in: Channel | None = None
    behind_out: Channel | None = None
    group: Any = None

    @classmethod
    def of(cls, rank: int, stages: Sequence[int]) -> Neighbours:
        """`stages`: the rank of each stage, from the first to the last. Collective."""
        channels: dict[str, Channel] = {}
        # One group for all boundaries. Beside NCCL, torch splits its communicator for a smaller group on the ranks outside of it (pytorch issue
        # 145376). Between two ranks gloo keeps the order of the messages in each direction.
        group = dist.new_group(timeout=process_group.patience(), backend="gloo")
        for before, behind in itertools.pairwise(stages):
            if rank == before:
                channels |= {"behind_out": Channel(behind, group), "behind_in": Channel(behind, group)}
            elif rank == behind:
                channels |= {"before_in": Channel(before, group), "before_out": Channel(before, group)}
        return cls(**channels, group=group)

    def drain(self) -> None:
        """Wait until everything of a step is sent."""
        for channel in (self.before_out, self.behind_out):
            if channel is not None:
                channel.drain()
