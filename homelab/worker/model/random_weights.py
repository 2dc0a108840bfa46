"""A model of a given shape whose weights are random: what measures a card needs no download. Quantised as one that is read from files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from homelab.worker.errors import WorkerError

_PATTERN = 1 << 22  # random numbers that are made; a weight repeats them, which takes a hundredth of the time
_SPREAD = 0.02


def folder(path: Path, shape: dict[str, Any]) -> Path:
    """A model's folder of this config.json, with a file of no weights: the loader refuses a folder without any."""
    from safetensors.torch import save_file

    path.mkdir()
    (path / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    save_file({}, path / "model.safetensors")
    return path


def read(path: str, *, dtype: torch.dtype, revision: str | None = None, **options: Any) -> Any:
    """The model of the config.json in the folder `path`, as `build.load_base` reads one; `options` are those of `from_pretrained`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in AutoModelForCausalLM.from_config(config, dtype=dtype).named_parameters()}
    try:
        weights = _weights(shapes, dtype)
        return _class_of(config).from_pretrained(None, config=config, state_dict=weights, dtype=dtype, **options)
    except MemoryError as error:
        raise WorkerError("this machine has no memory for the test model of its card", where=path, hint="free RAM on this node") from error


def _weights(shapes: dict[str, torch.Size], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A tensor for each name: matrices random around 0, scales 1."""
    draw = torch.Generator().manual_seed(0)
    pattern = (torch.randn(_PATTERN, generator=draw) * _SPREAD).to(dtype)
    made = {}
    for name, shape in shapes.items():
        size = shape.numel()
        made[name] = torch.ones(shape, dtype=dtype) if len(shape) < 2 else pattern.repeat(math.ceil(size / _PATTERN))[:size].view(shape)
    return made


def _class_of(config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM._model_mapping[type(config)]
