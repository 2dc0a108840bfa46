"""A stage, or a whole model, some of whose layers lie on the host: read layer by layer, so that neither the device nor the host ever holds more.

Each streamed layer is read, and quantised, on the device as any other is, and then moved: its bytes are those of a layer that stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from homelab.shared.law import streaming
from homelab.shared.law.stage import Stage
from homelab.worker.model import base_kind, host_layers, stored_weights
from homelab.worker.model.host_layers import HostLayers
from homelab.worker.model.pretrained import See
from homelab.worker.runtime.task import Task
from homelab.worker.strategies.pipeline import stage_model


@dataclass(frozen=True)
class _Resident(Stage):
    """A stage without its streamed layers."""

    without: frozenset[int] = frozenset()

    def holds(self, layer: int) -> bool:
        return super().holds(layer) and layer not in self.without


def reader(task: Task, stage: Stage | None) -> Callable[..., Any]:
    """What reads this rank's model, whole (None) or a stage of it, with the layers on the host that the plan has there."""
    assert task.streaming is not None
    device = torch.device(task.device, task.local_rank) if task.device == "cuda" else torch.device("cpu")
    kind = task.streaming.host
    host = HostLayers(device, task.streaming.places, task.rank_dir / "layers" if kind == streaming.DISK else None, kind == streaming.MEMORY)
    return functools.partial(load, stage=stage, host=host, count=task.streaming.layers)


def load(
    path: str, *, stage: Stage | None, host: HostLayers, count: int, dtype: torch.dtype, see: See | None = None, **options: Any
) -> Any:
    """As `stage_model.load`, with `count` layers on the host. The model is shown to `see` before them, then each of them before it leaves."""
    see = see or (lambda _piece, _more: None)
    if stage is None:
        config = base_kind.config_of(path, options.get("revision"))
        layers = int(config.get_text_config().num_hidden_layers)
        stage = Stage(number=0, count=1, begin=0, end=layers, layers=layers)
    on_host = streaming.streamed(stage.begin, stage.end, count)
    own = {field.name: getattr(stage, field.name) for field in fields(Stage)}
    # transformers cannot quantise a model without any weight: a middle stage, all of whose layers are streamed, is read with its first one.
    is_empty = count == stage.end - stage.begin and not (stage.is_first or stage.is_last)
    later = on_host[1:] if is_empty else on_host
    model = stage_model.load(path, stage=_Resident(**own, without=frozenset(later)), dtype=dtype, **options)
    layers_of = stage_model.decoder_of(model).layers
    stored = stored_weights.of(base_kind.config_of(path, options.get("revision")))
    see(model, 1 if later else 0)
    if is_empty:
        stored_weights.widen(layers_of[stage.begin], stored, dtype)
        host.take(stage.begin, layers_of[stage.begin])
    for place, number in enumerate(later):
        alone = stage_model.load(path, stage=Stage(1, 3, number, number + 1, stage.layers), dtype=dtype, **options)
        left = len(later) - place - 1
        see(alone, left if host.file is None else 2 * left + 1)  # a file of the layers takes as much of the disk once more
        layer = stage_model.decoder_of(alone).layers[number]
        stored_weights.widen(layer, stored, dtype)
        for part in layer.modules():  # the attention of all layers is set in one place
            if hasattr(part, "config"):
                part.config = model.config.get_text_config()
        host.take(number, layer)
        layers_of[number] = layer
    setattr(model, host_layers.ATTRIBUTE, host)
    return model
