"""Tensors by name as files: written, copied, and put into the weights of a model."""

from __future__ import annotations

import copy
import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._pytree import tree_map_only

from homelab.worker.errors import WorkerError


def host_tag(storage: torch.UntypedStorage) -> str | None:
    """The place that torch.save writes beside a tensor of a card: host memory.

    Nodes compare a step's files. Copied first or not, from the first card or the second, one state is then one file.
    """
    return "cpu" if storage.device.type not in ("cpu", "meta") else None


torch.serialization.register_package(0, host_tag, lambda _storage, _place: None)  # before torch's own, which begin at 10


def copy_of(state: dict[str, Any], device: str) -> dict[str, Any]:
    """The same content in host memory, which no later step touches. `device`: the plan's. (A card that a plan for CPUs leaves alone gets no context.)"""
    if device == "cuda":
        torch.cuda.synchronize()  # an optimizer's pages may be read from here while the card still writes them

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to("cpu", copy=True)

    return {
        name: tree_map_only(torch.Tensor, copied, content) if isinstance(content, dict) else copy.deepcopy(content)
        for name, content in state.items()
    }


def writers_of(state: dict[str, Any]) -> dict[str, Callable[[Path], None]]:
    """File name -> function that writes it."""
    return {name: functools.partial(_write, content) for name, content in state.items()}


def _write(content: Any, path: Path) -> None:
    if isinstance(content, Path):
        link(content, path)
    elif path.suffix == ".safetensors":
        tensors = {name: tensor.cpu().contiguous() for name, tensor in content.items()}
        save_file(tensors, str(path), metadata={"format": "pt"})
    elif path.suffix == ".pt":
        torch.save(tree_map_only(torch.Tensor, torch.Tensor.detach, content), path)  # without what a library has hung on them
    elif isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif isinstance(content, dict):
        path.write_text(json.dumps(content, indent=2), encoding="utf-8")
    else:
        content.save_to_json(str(path))


def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write these weights."""
    _write(tensors, path)


def names_in(path: Path) -> list[str]:
    """The names of the weights in a file."""
    with safe_open(str(path), "pt") as file:
        return list(file.keys())


def fill(own: dict[str, torch.Tensor], path: Path, *, is_part: bool = False) -> None:
    """Put the weights of this file into those of a model of the same recipe. `is_part`: the file may have more, of other ranks. Raises WorkerError when names or shapes differ."""
    with safe_open(str(path), "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys() if not is_part or name in own}  # noqa: SIM118  # it is no dict
    if set(saved) != set(own) or any(saved[name].shape != own[name].shape for name in own):
        odd = sorted(set(saved) ^ set(own)) or sorted(name for name in own if saved[name].shape != own[name].shape)
        raise WorkerError(
            f"the checkpoint does not fit this model: {odd[0]} is missing or has another shape",
            where=str(path),
            hint="the base model on this node is a different one: copy the same model folder to every node",
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])


def link(source: Path, target: Path) -> None:
    """The same file under a second name, or a copy where the disk has no hard links. Raises OSError."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
