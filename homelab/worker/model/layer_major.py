"""Passes layer by layer: all micro-batches of a group through one layer, then through the next; and back, where each layer computes again what its gradient needs.

Each layer is there once in each direction for the whole group. The gradients of a weight add up in the order of the micro-batches, so that the
sums are those of one micro-batch after the other to the last bit. Memory is that of activation checkpointing, times the micro-batches of the group:
the input of every layer, which lies in the host's memory beside a card.

The model's own code runs before the first layer and behind the last one: stand-ins take the places of the layers, note what the model gives to each
(masks, positions), and hand the last hidden states over.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from homelab.worker.data import pair_batches
from homelab.worker.errors import WorkerError
from homelab.worker.model.host_layers import HostLayers
from homelab.worker.runtime import host_memory

Batch = dict[str, Any]
OF_THE_LOSS = ("labels", "labelled", *pair_batches.NAMES)


class StandIn(torch.nn.Module):
    """In the place of a layer, a norm or a head: what comes in goes out."""

    def __init__(self, original: torch.nn.Module) -> None:
        super().__init__()
        for name, value in vars(original).items():  # models ask their layers what kind of attention they have
            if not name.startswith("_") and name != "training" and isinstance(value, str | int | bool | None):
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *_arguments: Any, **_named: Any) -> torch.Tensor:
        return hidden_states


@dataclass
class _Given:
    """What the model gives to its layers for a micro-batch: the first hidden states, and each layer's other arguments."""

    entered: torch.Tensor | None = None
    others: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    hidden: torch.Tensor | None = None
    """What the stand-ins hand on; None: what came in."""


@dataclass
class Group:
    """The forward passes of some micro-batches, until their backward passes: seeds, arguments, and the input of each layer, by layer and micro-batch."""

    seeds: Sequence[int]
    given: list[_Given]
    inputs: list[list[torch.Tensor]] = field(default_factory=list)


@dataclass(frozen=True)
class LayerMajor:
    """The layers `numbers` of a decoder, some of which `host` streams. `context` is around every computation (autocast); `seed` sets the random numbers
    of a micro-batch; `after_layer` is called when one is through a layer."""

    decoder: Any
    numbers: Sequence[int]
    host: HostLayers
    context: Callable[[], AbstractContextManager[Any]]
    seed: Callable[[int], None]
    after_layer: Callable[[], None]

    def __post_init__(self) -> None:
        for number in self.numbers:  # each is computed again here, and torch's checkpointing would do it once more
            self.decoder.layers[number].gradient_checkpointing = False

    def train(
        self,
        batches: Sequence[Batch],
        seeds: Sequence[int],
        loss_of: Callable[[Batch], torch.Tensor],
        backward: Callable[[torch.Tensor], None],
    ) -> list[torch.Tensor]:
        """All passes of a group whose loss is computed here: the loss of each micro-batch, after `backward` was called with it."""
        losses, gradients = [], []
        hidden, group = self.forward(batches, seeds)
        for batch, seed, last in zip(batches, seeds, hidden, strict=True):
            leaf = last.detach().requires_grad_(last.requires_grad)
            self.seed(seed)
            with self.behind(leaf), self.context():
                loss = loss_of(batch)
            backward(loss)
            losses.append(loss.detach())
            gradients.append(torch.zeros_like(last) if leaf.grad is None else leaf.grad)
            self.after_layer()
        self.backward(group, gradients)
        return losses

    def forward(self, batches: Sequence[Batch], seeds: Sequence[int]) -> tuple[list[torch.Tensor], Group]:
        """The hidden states behind the last layer, without a graph, and what their backward pass needs.

        A layer computes as in its backward pass and as a resident one: what needs a gradient says so, and the graph of a pass is dropped at its end.
        torch and transformers take other kernels where nothing needs one.
        """
        group = Group(seeds, [self._enter(batch, seed) for batch, seed in zip(batches, seeds, strict=True)])
        hidden = [_plain(given.entered) for given in group.given]
        self.host.begin([*self.numbers, *reversed(self.numbers)])
        for place, number in enumerate(self.numbers):
            group.inputs.append([self._kept(one) for one in hidden])
            with self.host.computing(number):
                for index in range(len(hidden)):
                    hidden[index] = _plain(self._through(number, place, group, index, hidden[index]))
            self.after_layer()
        return hidden, group

    def backward(self, group: Group, gradients: list[torch.Tensor], *, to_input: bool = False) -> list[torch.Tensor | None]:
        """Add the gradients of all weights, from those of the last hidden states; those of the first hidden states, where `to_input` or something before
        the layers is trained, which then gets its own."""
        self.host.begin([*reversed(self.numbers), *self.numbers])
        coming: list[torch.Tensor | None] = list(gradients)
        self.host.has_graph = True
        try:
            for place, number in reversed(list(enumerate(self.numbers))):
                inputs = group.inputs.pop()
                with self.host.computing(number):
                    for index, kept in enumerate(inputs):
                        hidden = kept.detach().to(gradients[index].device, non_blocking=True).requires_grad_(kept.requires_grad)
                        left = self._through(number, place, group, index, hidden)
                        if left.requires_grad:
                            torch.autograd.backward(left, coming[index])
                        coming[index] = hidden.grad
                self.after_layer()
        finally:
            self.host.has_graph = False
        for given, gradient in zip(group.given, coming, strict=True):
            before = given.entered
            if before is not None and before.requires_grad and gradient is not None and not to_input:
                torch.autograd.backward(before, gradient)
        return coming

    @contextlib.contextmanager
    def behind(self, hidden: torch.Tensor) -> Iterator[None]:
        """While it lasts, the model computes with these hidden states behind its last layer: its norm, its head, its loss."""
        with self._stand_ins(_Given(hidden=hidden)):
            yield

    def _enter(self, batch: Batch, seed: int) -> _Given:
        given = _Given()
        self.seed(seed)
        with self._stand_ins(given), self.context():
            self.decoder(**{name: value for name, value in batch.items() if name not in OF_THE_LOSS})
        is_unused = getattr(self.decoder.config, "num_kv_shared_layers", None) == 0  # Gemma 4 hands it on in any case
        for arguments, named in given.others:
            for name, value in (*enumerate(arguments), *named.items()):
                if name == "shared_kv_states" and is_unused:
                    continue
                # What has a gradient, and what a layer can write into for a later one: it would be lost without a word.
                if (isinstance(value, torch.Tensor) and value.requires_grad) or isinstance(value, MutableMapping | MutableSequence):
                    raise WorkerError(
                        f"the layers of {type(self.decoder).__name__} share more than their hidden states (in {name}), so they cannot come from the host one after the other",
                        where="[model] name in the recipe",
                        hint="take another [model]; or run it where all layers have room: `homelab plan` names the nodes whose layers are streamed",
                    )
        return given

    def _through(self, number: int, place: int, group: Group, index: int, hidden: torch.Tensor) -> torch.Tensor:
        arguments, named = group.given[index].others[place]
        self.seed(group.seeds[index])
        with self.context():
            left = self.decoder.layers[number](hidden, *arguments, **named)
        result: torch.Tensor = left[0] if isinstance(left, tuple) else left
        return result

    def _kept(self, hidden: torch.Tensor) -> torch.Tensor:
        """The input of a layer until its backward pass: on the host beside a card."""
        if hidden.device.type != "cuda":
            return hidden
        kept = host_memory.empty(hidden.shape, hidden.dtype, pinned=True)
        kept.copy_(hidden.detach(), non_blocking=True)
        return kept.requires_grad_(hidden.requires_grad)

    @contextlib.contextmanager
    def _stand_ins(self, given: _Given) -> Iterator[None]:
        layers = self.decoder.layers
        real = dict(layers._modules)
        own = {str(number) for number in self.numbers}
        for name, layer in real.items():
            if name in own:
                layers._modules[name] = _Noting(layer, given)
        try:
            yield
        finally:
            layers._modules.update(real)


class _Noting(StandIn):
    """Notes what it is given, and hands on what comes in, or what it is told to. It shows the weights of its layer as the layer does: a thread that
    saves them at a stop may read the model at any moment (`training.parting_save`)."""

    def __init__(self, original: torch.nn.Module, given: _Given) -> None:
        super().__init__(original)
        self.given = given
        for held in ("_parameters", "_buffers", "_modules"):
            self.__dict__[held] = original.__dict__[held]

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:
        if self.given.hidden is not None:
            return self.given.hidden
        if self.given.entered is None:
            self.given.entered = hidden_states
        self.given.others.append((arguments, named))
        return hidden_states


def _plain(hidden: torch.Tensor | None) -> torch.Tensor:
    """The same hidden states without their graph; they still say whether they need a gradient."""
    assert hidden is not None, "the model called no layer"
    return hidden.detach().requires_grad_(hidden.requires_grad)
