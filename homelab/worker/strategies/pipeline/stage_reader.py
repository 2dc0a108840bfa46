"""Reads a stage, or a whole model whose layers are not all on the device: what stays there at once, each streamed layer alone.

So neither the device nor the host ever holds more than in the training. Each streamed layer is read, and quantised, on the device as any other is, and
then moved: its bytes are those of a layer that stays. Layers that were quantised before come from the node's disk (`kept_layers`), all others from the
model's files.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from homelab.shared.law import streaming
from homelab.shared.law.stage import Stage
from homelab.worker.model import base_kind, host_layers, stored_weights
from homelab.worker.model.host_layers import HostLayers
from homelab.worker.model.kept_layers import KeptLayers
from homelab.worker.runtime.task import Task
from homelab.worker.strategies.pipeline import stage_model


@dataclass(frozen=True)
class _Some(Stage):
    """A stage with some of its layers."""

    only: frozenset[int] = frozenset()

    def holds(self, layer: int) -> bool:
        return layer in self.only


def reader(task: Task, stage: Stage | None, *, scores: bool = False) -> Callable[..., Any]:
    """What reads this rank's model, whole (None) or a stage of it, with the layers on the host that the plan has there."""
    streamed = task.streaming
    if streamed is None:
        return functools.partial(load, stage=stage, scores=scores)
    device = torch.device(task.device, task.local_rank) if task.device == "cuda" else torch.device("cpu")
    file = task.rank_dir / "layers" if streamed.host == streaming.DISK else None
    host = HostLayers(device, streamed.places, file, streamed.host == streaming.MEMORY)
    return functools.partial(load, stage=stage, scores=scores, host=host, count=streamed.layers)


def load(
    path: str, *, stage: Stage | None, host: HostLayers | None = None, count: int = 0, kept: KeptLayers | None = None, **options: Any
) -> Any:
    """As `stage_model.load`, with `count` layers on the host. `kept`: the layers that are quantised already, and take in those that are not."""
    if stage is None:
        config = base_kind.config_of(path, options.get("revision"))
        layers = int(config.get_text_config().num_hidden_layers)
        stage = Stage(number=0, count=1, begin=0, end=layers, layers=layers)
    reading = _Reading(path, stage, host, streaming.streamed(stage.begin, stage.end, count), kept, options)
    if kept is None:
        return reading.model(frozenset())
    with kept.used():
        while True:
            try:
                return reading.model(kept.there(range(stage.begin, stage.end)))
            except _Damaged as damaged:  # there are fewer now
                kept.forget(damaged.layers, damaged.error)


class _Damaged(Exception):
    """Kept layers that cannot be read, or are not what was kept."""

    def __init__(self, layers: Collection[int], error: Exception) -> None:
        super().__init__(str(error))
        self.layers, self.error = layers, error


@dataclass(frozen=True)
class _Reading:
    """One load. `on_host`: the layers that go there; `options` are those of `from_pretrained`."""

    path: str
    stage: Stage
    host: HostLayers | None
    on_host: tuple[int, ...]
    kept: KeptLayers | None
    options: dict[str, Any]

    def model(self, before: frozenset[int]) -> Any:
        """The model; the layers `before` are kept. Raises what reading raises."""
        stage = self.stage
        resident = frozenset(range(stage.begin, stage.end)) - frozenset(self.on_host)
        own = resident - before
        streamed = self.on_host
        if own or stage.is_first or stage.is_last:
            model = self._read(own, has_ends=True)
            self._put(model, resident & before)
        elif resident:
            model = self._read_kept(resident)
        else:  # transformers cannot quantise a model without any weight: it is read with its first layer
            first, *others = streamed
            streamed = tuple(others)
            model = self._one(first, before)
            self._move(model, first)
        for layer in sorted(own):
            self._keep(model, layer)
        for layer in streamed:
            alone = self._one(layer, before)
            self._take_over(model, alone, layer)
            self._move(model, layer)
        if self.host is not None:
            setattr(model, host_layers.ATTRIBUTE, self.host)
        return model

    def _one(self, layer: int, before: frozenset[int]) -> Any:
        """A model with this layer alone."""
        if layer in before:
            return self._read_kept((layer,))
        alone = self._read((layer,))
        self._keep(alone, layer)
        return alone

    def _read(self, layers: Collection[int], *, has_ends: bool = False) -> Any:
        """From the model's own files; `has_ends`: with what the stage has beside layers."""
        model = stage_model.load(self.path, stage=self._of(layers, has_ends=has_ends), **self.options)
        stored_weights.widen(model, stored_weights.of(base_kind.config_of(self.path, self.options.get("revision"))), self.options["dtype"])
        return model

    def _read_kept(self, layers: Collection[int]) -> Any:
        assert self.kept is not None
        of_source = ("revision", "quantization_config")  # kept files say how they are quantised
        others = {name: value for name, value in self.options.items() if name not in of_source}
        try:
            with self.kept.as_model(layers) as folder:
                model = stage_model.load(folder, stage=self._of(layers), **others)
            self.kept.compare(model, layers)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a damaged file can raise any error in its readers
            raise _Damaged(layers, error) from error
        model.name_or_path = model.config._name_or_path = self.path
        return model

    def _of(self, layers: Collection[int], *, has_ends: bool = False) -> Stage:
        number, count = (self.stage.number, self.stage.count) if has_ends else (1, 3)
        return _Some(number, count, self.stage.begin, self.stage.end, self.stage.layers, only=frozenset(layers))

    def _put(self, model: Any, layers: frozenset[int]) -> None:
        """Kept layers at their places."""
        if layers:
            other = self._read_kept(layers)
            for layer in layers:
                self._take_over(model, other, layer)

    def _take_over(self, model: Any, other: Any, number: int) -> None:
        layer = stage_model.decoder_of(other).layers[number]
        for part in layer.modules():  # the attention of all layers is set in one place
            if hasattr(part, "config"):
                part.config = model.config.get_text_config()
        stage_model.decoder_of(model).layers[number] = layer

    def _move(self, model: Any, number: int) -> None:
        assert self.host is not None
        self.host.take(number, stage_model.decoder_of(model).layers[number])

    def _keep(self, model: Any, layer: int) -> None:
        if self.kept is None:
            return
        waiting = len(self.on_host) - self.on_host.index(layer) if layer in self.on_host else 0
        is_in_file = self.host is not None and self.host.file is not None
        with _alone(model, layer):
            self.kept.add(model, layer, room_for=waiting if is_in_file else 0, flushes=self.host is not None)


@contextlib.contextmanager
def _alone(model: Any, number: int) -> Iterator[None]:
    """While it lasts, the model has this layer and nothing else."""
    decoder = stage_model.decoder_of(model)
    parts = {"embed_tokens": decoder.embed_tokens, "norm": decoder.norm}
    layers, head = dict(decoder.layers.named_children()), model.lm_head
    try:
        for name, layer in layers.items():
            if name != str(number):
                decoder.layers._modules[name] = stage_model.Elsewhere(layer)
        for name, part in parts.items():
            setattr(decoder, name, stage_model.Elsewhere(part))
        model.lm_head = stage_model.Elsewhere(head)
        yield
    finally:
        decoder.layers._modules.update(layers)
        for name, part in parts.items():
            setattr(decoder, name, part)
        model.lm_head = head
