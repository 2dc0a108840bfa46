"""Frozen layers that lie in the host's memory, or in a file of its disk, and come to the device one after the other.

A layer's frozen matrices are one block of bytes on the host: pinned memory beside a card, a file that is mapped into memory beside a processor, whose
memory is the one that has no room. Beside a card with a host that has too little, a thread copies from memory that is not pinned, or from a file: such a
copy holds up whoever asks for it. A place on the device holds one block; a layer's parameters look into the place while it lies there, and are
empty otherwise, so that nothing computes with a layer that is not there. What stays on the device: adapters, norms, biases.

bitsandbytes' product keeps the packed matrix outside of what autograd knows, and reads it again in its backward pass (autograd/_functions.py,
MatMul4Bit: ctx.state). So the forward pass that has a graph and its backward pass must both end before the layer leaves its place: `layer_major`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from homelab.shared.law.streaming import PlaceBook
from homelab.worker.model import host_store
from homelab.worker.model.host_store import StoredLayer

ATTRIBUTE = "homelab_host_layers"
_POISON = 255  # NaN in every floating-point type


@dataclass
class _Place:
    block: torch.Tensor
    coming: Future[None] | None = None  # where a thread copies
    arrived: Any = None  # on a card: events
    left: Any = None
    layer: int | None = None


@dataclass
class HostLayers:
    """The streamed layers of a model, and the places on `device`. `file`: a path of the disk that holds the blocks instead of memory; it is gone at once,
    and its room is free when the process ends. `pinned`: whether their memory is to be, beside a card. `bytes_per_s` slows a load down, for benchmarks.
    `in_turn`: each layer comes to another place, and a place that is left is poisoned, for tests."""

    device: torch.device
    places: int = 2
    file: Path | None = None
    pinned: bool = True
    bytes_per_s: float | None = None
    in_turn: bool = False
    layers: dict[int, StoredLayer] = field(default_factory=dict)
    upcoming: list[int] = field(default_factory=list)
    has_graph: bool = False

    def __post_init__(self) -> None:
        self.book = PlaceBook(self.places)
        self._places: list[_Place] = []
        self._current: int | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def host_bytes(self) -> int:
        """What lies in the host's memory or file."""
        return sum(layer.block.numel() for layer in self.layers.values())

    @property
    def unpinned_bytes(self) -> int:
        """Of what lies in the host's memory beside a card, what the system did not pin, though it was asked to."""
        asked = self.pinned and self._stream is not None and self.file is None
        return sum(layer.block.numel() for layer in self.layers.values() if not layer.block.is_pinned()) if asked else 0

    def take(self, number: int, module: Any) -> None:
        """Move the frozen matrices of this layer to the host."""
        layer = host_store.moved(module, self.device, self.file, self.host_bytes, pinned=self.pinned and self._stream is not None)
        self.layers[number] = layer
        module.register_forward_pre_hook(lambda *_: self._called(number))

    def begin(self, upcoming: Sequence[int]) -> None:
        """What computes from now on, in order: of it, the streamed layers."""
        self.upcoming = [layer for layer in upcoming if layer in self.layers]

    @contextlib.contextmanager
    def computing(self, number: int) -> Iterator[None]:
        """Around all passes of a layer: it is there, and the next one is on its way. Nothing for a layer that is always there."""
        if number not in self.layers:
            yield
            return
        place = self._bring(number)
        self._current = number
        try:
            yield
        finally:
            self._current = None
            if self._stream is not None:
                place.left = torch.cuda.Event()
                place.left.record()

    def _called(self, number: int) -> None:
        """A layer is called. Outside of `layer_major` that is a pass without a graph: an evaluation, a small test of the model."""
        if number == self._current:
            return
        if torch.is_grad_enabled() and not self.has_graph:
            raise AssertionError(f"layer {number} is streamed, and its graph would outlive it: gradients are made by layer_major alone")
        if not self.upcoming:  # the layers behind it, and those of the next pass
            order = sorted(self.layers)
            self.upcoming = [*order[order.index(number) :], *order]
        place = self._bring(number)
        if self._stream is not None:  # it may be overwritten after what is asked for now
            place.left = None

    def _bring(self, number: int) -> _Place:
        if self.upcoming and self.upcoming[0] == number:
            self.upcoming.pop(0)
        held = self.book.place_of(number)
        if held is None:
            held = self.book.taken_for(number, self.upcoming)
        place = self._places_now()[held]
        if place.layer != number:  # also where an earlier load has found no room
            self._load(number, held)
        if place.coming is not None:
            place.coming.result()
            place.coming = None
        if place.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(place.arrived)
        following = self.book.next_load(number, self.upcoming)
        if following is not None:
            self._load(*following)
        return place

    def _places_now(self) -> list[_Place]:
        if not self._places:
            size_bytes = max(layer.block.numel() for layer in self.layers.values())
            with torch.inference_mode(False):  # they are filled outside of it too
                self._places = [_Place(torch.empty(size_bytes, dtype=torch.uint8, device=self.device)) for _ in range(self.places)]
            self._thread = ThreadPoolExecutor(1, "layers")  # its first copy starts it
        return self._places

    def _load(self, number: int, held: int) -> None:
        place, layer = self._places_now()[held], self.layers[number]
        if place.layer is not None:
            self.layers[place.layer].leave()
            place.layer = None
        if self.in_turn:  # the bytes of a layer that left are nowhere, and the new one comes to other ones
            place.block.fill_(_POISON)
            place.block = torch.empty_like(place.block)
        there = place.block[: layer.block.numel()]
        if self._stream is not None and place.left is None:
            place.left = torch.cuda.Event()
            place.left.record(torch.cuda.current_stream(self.device))
        if self._stream is not None and layer.block.is_pinned():
            self._to_card(place, there, layer.block)
        else:
            assert self._thread is not None
            copy = self._copy if self._stream is None else functools.partial(self._to_card, place)
            place.coming = self._thread.submit(copy, there, layer.block)
        for piece in layer.pieces:
            piece.look_into(place.block)
        place.layer = number

    def _to_card(self, place: _Place, there: torch.Tensor, block: torch.Tensor) -> None:
        """After what has computed with the place. The caller waits where the block is not pinned."""
        assert self._stream is not None
        self._stream.wait_event(place.left)
        with torch.cuda.stream(self._stream):
            there.copy_(block, non_blocking=True)
            place.arrived = torch.cuda.Event()
            place.arrived.record(self._stream)

    def _copy(self, there: torch.Tensor, block: torch.Tensor) -> None:
        began_s = time.perf_counter()
        there.copy_(block)
        if self.bytes_per_s is not None:
            time.sleep(max(0.0, block.numel() / self.bytes_per_s - (time.perf_counter() - began_s)))

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """While it lasts, the parameters of all streamed layers look into the host: for digests and what else reads without computing."""
        with self._left_after():
            for layer in self.layers.values():
                for piece in layer.pieces:
                    piece.look_into(layer.block)
            yield

    @contextlib.contextmanager
    def shaped(self) -> Iterator[None]:
        """While it lasts, the parameters of all streamed layers have their shapes on the device, and one number for all places: for adapters, which are put on
        by what shape a weight has, and lie where it lies."""
        with self._left_after():
            for layer in self.layers.values():
                layer.shape()
            yield

    @contextlib.contextmanager
    def _left_after(self) -> Iterator[None]:
        """Afterwards, the parameters of each streamed layer are where they were before."""
        held = {place.layer: place.block for place in self._places if place.layer is not None}
        for place in self._places:
            if place.coming is not None:
                place.coming.result()
        try:
            yield
        finally:
            for number, layer in self.layers.items():
                layer.leave()
                for piece in layer.pieces if number in held else ():
                    piece.look_into(held[number])


@contextlib.contextmanager
def shown(model: Any) -> Iterator[None]:
    """`HostLayers.shown` of a model that may have none."""
    host = of(model)
    with host.shown() if host is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def shaped(model: Any) -> Iterator[None]:
    """`HostLayers.shaped` of a model that may have none."""
    host = of(model)
    with host.shaped() if host is not None else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def graph(model: Any) -> Iterator[None]:
    """While it lasts, a pass may have a graph: for one that is looked at and never gone back through."""
    host = of(model)
    if host is None:
        yield
        return
    host.has_graph = True
    try:
        yield
    finally:
        host.has_graph = False


def of(model: Any) -> HostLayers | None:
    """Those of a model, wrapped or with adapters or not; None where all of its layers are on the device."""
    base = getattr(model, "module", model)
    base = base.get_base_model() if hasattr(base, "get_base_model") else base
    found: HostLayers | None = getattr(base, ATTRIBUTE, None)
    return found
