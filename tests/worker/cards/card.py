"""A card as torch uses it: memory that says where it is, streams, events, and kernels that take a time.

lazy         The first launch of a kernel loads it, which waits for what the card runs (CUDA programming guide, 4.7, "Concurrent execution"; lazy
             loading is the default since CUDA 12.2; meta-pytorch/torchcomms pull request 2334 has two programs that hang).
retry        An allocation that finds no room frees cached blocks, and cudaFree waits for the card (c10 CUDACachingAllocator, release_cached_blocks).
pinning      Memory of a card cannot be pinned (ATen/native/Memory.cpp, _pin_memory).
copies       A copy between card and host that is not `non_blocking` waits for the current stream (ATen/native/cuda/Copy.cu, memcpy_and_sync);
             `torch.tensor(..., device="cuda")` makes one, too (torch/csrc/utils/tensor_new.cpp, internal_new_from_data).
streams      What is put on a stream begins behind what is there, and behind the events for which the stream waits. An event is what its stream
             held when it was recorded.

A kernel does not share the card with another: what is on two streams runs at the same time at full speed.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.worker.cards.world import Operation, World

COMPUTE = "compute"


def is_card(device: Any) -> bool:
    """Whether torch would mean a card by this."""
    return str(getattr(device, "type", device)).startswith("cuda")


class OnCard(torch.Tensor):
    """Memory of a card. Its values are there at once, or when a collective takes place; only time is that of a card."""

    card: Card

    def cpu(self) -> torch.Tensor:
        self.card.synchronize()
        return self.as_subclass(OnHost)

    def to(self, *place: Any, **options: Any) -> torch.Tensor:
        return self.cpu() if "cpu" in place else self if place and is_card(place[0]) else super().to(*place, **options)

    def tolist(self) -> Any:
        return self.cpu().as_subclass(torch.Tensor).tolist()

    def pin_memory(self, *_device: Any) -> torch.Tensor:
        raise RuntimeError(f"cannot pin 'torch.cuda.{self.dtype}' only dense CPU tensors can be pinned")

    def __float__(self) -> float:
        return float(self.cpu().as_subclass(torch.Tensor))


class OnHost(torch.Tensor):
    """Memory of the host, which goes to a card where it is asked to."""

    def to(self, *place: Any, non_blocking: bool = False, **options: Any) -> torch.Tensor:
        if not place or not is_card(place[0]):
            return super().to(*place, **options)
        if not non_blocking:
            OnCard.card.synchronize()
        return self.as_subclass(OnCard)


@dataclass(eq=False)
class CardStream:
    """A stream of the card of one rank."""

    card: Card
    rank: int
    name: str
    awaited: list[Operation] = field(default_factory=list)

    def held(self) -> list[Operation]:
        """What it has to do before what would be put on it now."""
        return [*self.card.world.last(self.name), *self.awaited]

    def put(self, operation: Operation) -> Operation:
        """Behind all else."""
        operation.after.extend(self.awaited)
        self.awaited.clear()
        return self.card.world.enqueue(self.name, operation)

    def wait_event(self, event: Event) -> None:
        self.awaited.extend(event.held)

    def wait_stream(self, other: CardStream) -> None:
        self.awaited.extend(other.held())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.card.world.wait_for(self.held(), f"the {self.name} stream")


class Event:
    """A place in a stream."""

    def __init__(self, **_options: Any) -> None:
        self.held: list[Operation] = []
        self._at_s = 0.0

    def record(self, stream: CardStream | None = None) -> Event:
        card = OnCard.card
        self.held, self._at_s = (stream or card.current_stream()).held(), card.world.here.now_s
        return self

    def synchronize(self) -> None:
        OnCard.card.world.wait_for(self.held, "an event")

    def elapsed_time(self, other: Event) -> float:
        return 1000 * (other.reached_s() - self.reached_s())

    def reached_s(self) -> float:
        """When the stream came here; NaN where it has not."""
        return max([self._at_s, *(float("nan") if one.end_s is None else one.end_s for one in self.held)])


class Card:
    """The card of the host that calls. It is also what torch.cuda is to those who take it as a device handle."""

    type = "cuda"
    Event = Event

    def __init__(self, world: World, *, lazy: bool = True, retries_at: tuple[int, str, int] | None = None) -> None:
        self.world, self._lazy, self._retries_at = world, lazy, retries_at
        self._loaded: set[tuple[int, str]] = set()
        self._launches: dict[tuple[int, str], int] = defaultdict(int)
        self._streams: dict[tuple[int, str], CardStream] = {}
        self._current: dict[int, list[CardStream]] = defaultdict(list)
        self._made = 0
        #: Seconds of the kernels of each rank's compute stream, in truth.
        self.busy_s: dict[int, float] = defaultdict(float)
        OnCard.card = self

    def named(self, name: str) -> CardStream:
        """The stream of this name on this rank's card."""
        key = self.world.here.rank, name
        return self._streams.setdefault(key, CardStream(self, *key))

    def Stream(self, **_options: Any) -> CardStream:  # as torch.cuda has it
        self._made += 1
        return self.named(f"stream no. {self._made}")

    def current_stream(self, _device: Any = None) -> CardStream:
        stack = self._current[self.world.here.rank]
        return stack[-1] if stack else self.default_stream()

    def default_stream(self, _device: Any = None) -> CardStream:
        return self.named(COMPUTE)

    @contextlib.contextmanager
    def stream(self, stream: CardStream) -> Iterator[None]:
        """What is launched inside goes there."""
        stack = self._current[self.world.here.rank]
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()

    def launch(self, kernel: str, seconds: float) -> None:
        """A kernel on the current stream."""
        rank = self.world.here.rank
        number = self._launches[rank, kernel]
        self._launches[rank, kernel] += 1
        if self._retries_at == (rank, kernel, number):
            self.until_idle(f"cudaFree before {kernel} no. {number}: the allocator found no room")
        if self._lazy and (rank, kernel) not in self._loaded:
            self._loaded.add((rank, kernel))
            self.until_idle(f"the first launch of {kernel} loads it, and waits for the card")
        self.current_stream().put(Operation(rank, kernel, self.world.here.now_s, seconds, []))
        self.busy_s[rank] += seconds

    def until_idle(self, reason: str) -> None:
        """The host waits for all that this rank's card has to do."""
        now_s = self.world.here.now_s
        running = [
            one for one in self.world.operations[self.world.here.rank] if one.is_on_card and (one.end_s is None or one.end_s > now_s)
        ]
        self.world.wait_for(running, f"{reason}, where {', '.join(one.name for one in running) or 'nothing'} runs")

    def synchronize(self) -> None:
        """The current stream, with all that it has to wait for."""
        self.current_stream().synchronize()


class Torch:
    """torch, for the modules under test: what is made on a card says so, and what is made on the host can go there."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return torch.zeros(*shape, **options).as_subclass(OnCard if is_card(device) else OnHost)

    zeros = empty

    def arange(self, *numbers: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.arange(*numbers, **options).as_subclass(OnCard if is_card(device) else OnHost)

    def tensor(self, values: Any, device: Any = None, **options: Any) -> torch.Tensor:
        return torch.tensor(values, **options).as_subclass(OnHost).to(device or "cpu")

    def frombuffer(self, buffer: Any, **options: Any) -> torch.Tensor:
        return torch.frombuffer(buffer, **options).as_subclass(OnHost)

    def stack(self, tensors: Any) -> torch.Tensor:
        """Of what lies on a card, which plain tensors do where a real one would do the sum."""
        return torch.stack(tensors).as_subclass(OnCard)

    def equal(self, first: torch.Tensor, second: torch.Tensor) -> bool:
        OnCard.card.synchronize()
        return torch.equal(first.as_subclass(torch.Tensor), second.as_subclass(torch.Tensor))

    def manual_seed(self, _seed: int) -> None:
        pass
