"""Messages to the stage before and the stage behind: activations go one way, their gradients the other. Nothing is awaited before it is needed.

Receives are posted ahead, so that a message is on its way while the pass before it is computed; torch's own `Schedule1F1B` (2.13) waits for
each send together with the next receive. With NCCL every boundary has a group for each direction, made at the start: groups that are made in
the middle of a step, and one stream for both directions, can wait for each other.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from homelab.worker.runtime import process_group

_AHEAD = 2  # receives that are posted before their message is needed


@dataclass
class Channel:
    """One direction of one boundary: the other rank, the group of both, and what is under way."""

    peer: int
    group: Any
    sent: deque[tuple[Any, torch.Tensor]] = field(default_factory=deque)

    def send(self, tensor: torch.Tensor) -> int:
        """Begin to send; the bytes. The tensor must not change any more."""
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()
        self.sent.append((dist.isend(tensor, self.peer, group=self.group), tensor))
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
        self._post(_AHEAD)

    def take(self) -> torch.Tensor:
        """The next message, when it is here."""
        work, tensor = self._posted.popleft()
        work.wait()
        self._post(1)
        return tensor

    def _post(self, count: int) -> None:
        for shape in itertools.islice(self._left, count):
            tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
            self._posted.append((dist.irecv(tensor, self._channel.peer, group=self._channel.group), tensor))


@dataclass(frozen=True)
class Neighbours:
    """The channels of a stage; None at the ends. `before_in`: activations from the stage before, `before_out`: their gradients to it."""

    before_in: Channel | None = None
    before_out: Channel | None = None
    behind_in: Channel | None = None
    behind_out: Channel | None = None

    @classmethod
    def of(cls, rank: int, stages: Sequence[int]) -> Neighbours:
        """`stages`: the rank of each stage, from the first to the last. Collective."""
        channels: dict[str, Channel] = {}
        for before, behind in itertools.pairwise(stages):
            forward, backward = (dist.new_group([before, behind], timeout=process_group.patience()) for _ in range(2))
            if rank == before:
                channels |= {"behind_out": Channel(behind, forward), "behind_in": Channel(behind, backward)}
            elif rank == behind:
                channels |= {"before_in": Channel(before, forward), "before_out": Channel(before, backward)}
        return cls(**channels)

    def drain(self) -> None:
        """Wait until everything of a step is sent."""
        for channel in (self.before_out, self.behind_out):
            if channel is not None:
                channel.drain()
