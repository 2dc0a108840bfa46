"""The weights of a run on disk: what a checkpoint holds, loading it back, and the final model."""

from __future__ import annotations

import copy
import functools
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils._pytree import tree_map_only

from homelab.worker.checkpoints import checkpoint_folder, saving
from homelab.worker.checkpoints.best_weights import BestWeights, link
from homelab.worker.checkpoints.curves import FILE, Curves
from homelab.worker.checkpoints.model_card import model_card
from homelab.worker.data.row_agreement import LAW
from homelab.worker.errors import WorkerError
from homelab.worker.model import adapter_targets
from homelab.worker.model.pretrained import DTYPES
from homelab.worker.runtime.task import Task

if TYPE_CHECKING:
    from homelab.worker.training.trainer import ShareTrainer

WEIGHTS = "trainable.safetensors"
OPTIMIZER = "optimizer.pt"
_ADAPTER = re.compile(r"\.default(?=\.|$)")  # in the names of PEFT's weights


def checkpoint_state(
    trainer: ShareTrainer, task: Task, curves: Curves, best: BestWeights, rows: dict[str, dict[str, str]]
) -> dict[str, Any]:
    """What a checkpoint holds beside what its strategy saves (`Strategy.state`): file name -> content; `copy_of` keeps it as it is now.

    The Trainer reads all but the weights under these names.
    """
    law = {
        "recipe_hash": task.recipe_hash,
        "data": {name: source and source.get("sha256") for name, source in task.run["data"].items()},
        "rows": rows,
    }
    state = {
        **best.state(),
        "scheduler.pt": trainer.lr_scheduler.state_dict(),
        "trainer_state.json": trainer.state,
        LAW: law,
        FILE: curves.text(),
    }
    if trainer.accelerator.scaler is not None:
        state["scaler.pt"] = trainer.accelerator.scaler.state_dict()
    return state


def trained(model: Any) -> dict[str, torch.Tensor]:
    """The weights that are trained, by name."""
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}


def frozen(model: Any) -> dict[str, torch.Tensor]:
    """The weights that are not trained, by name."""
    return {name: weight.detach() for name, weight in model.named_parameters() if not weight.requires_grad}


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
        torch.save(content, path)
    elif isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif isinstance(content, dict):
        path.write_text(json.dumps(content, indent=2), encoding="utf-8")
    else:
        content.save_to_json(str(path))


def save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write these weights."""
    _write(tensors, path)


def load_weights(model: Any, folder: Path) -> None:
    """Put a checkpoint's weights into a model of the same recipe. Raises WorkerError when names or shapes differ."""
    fill(trained(model), folder / WEIGHTS)


def fill(own: dict[str, torch.Tensor], path: Path, *, is_part: bool = False) -> None:
    """Put the weights of this file into those of a model of the same recipe. `is_part`: the file may have more, of other ranks. Raises WorkerError when names or shapes differ."""
    with safe_open(str(path), "pt") as file:
        saved = {name: file.get_tensor(name) for name in file.keys() if not is_part or name in own}  # noqa: SIM118  # it is no dict
    if set(saved) != set(own) or any(saved[name].shape != own[name].shape for name in own):
        odd = sorted(set(saved) ^ set(own)) or sorted(name for name in own if saved[name].shape != own[name].shape)
        raise WorkerError(
            f"the checkpoint does not fit this model: {odd[0]} is missing or has another shape",
            where=str(path),
            hint="the base model on this node is another one: copy the same model folder to every node",
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])


def adapter_name(name: str) -> str:
    """A trained weight's name as PEFT's files have it: without the name of the adapter."""
    return _ADAPTER.sub("", name)


def load_adapter(model: Any, folder: Path) -> Any:
    """The base with the adapter of this folder, in PEFT's format; every tensor goes to its own name.

    PEFT's own loading renames them by transformers' tables for the base, and leaves out without a word what it then does not find (peft 0.21:
    the shared experts of Laguna). Raises WorkerError when names or shapes differ.
    """
    from peft import PeftConfig, get_peft_model

    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False
    with adapter_targets.as_written():
        adapted = get_peft_model(model, config)
    fill({adapter_name(name): weight for name, weight in trained(adapted).items()}, folder / "adapter_model.safetensors")
    return adapted


def write_final(model: Any, tensors: dict[str, torch.Tensor], tokenizer: Any, task: Task, curves: Curves, step: int) -> None:
    """final/ in one piece: adapter in PEFT's format, or the whole model in the plan's precision; tokenizer; model card.

    `tensors` are the whole weights that were trained, after `step`, and beside them all others of a whole model; the model itself may hold only
    shards of them.

    Raises WorkerError when the disk does not take it.
    """
    partial = task.run_dir / ".final.partial"
    shutil.rmtree(partial, ignore_errors=True)
    model.config.use_cache = True  # the Trainer turned it off for training; generating needs it
    try:
        if task.method.kind == "full":
            dtype = DTYPES[task.precision]
            model.config.dtype = dtype
            saving.save_whole(model, partial, state_dict={name: tensor.to(dtype) for name, tensor in tensors.items()})
        else:
            model.save_pretrained(partial, state_dict=tensors, save_embedding_layers=False)
            if task.stage is not None:  # PEFT leaves out what its own model does not have: the layers of all other stages
                save({adapter_name(name): tensor for name, tensor in tensors.items()}, partial / "adapter_model.safetensors")
        tokenizer.save_pretrained(partial)
        is_moved = task.method.kind != "full" and adapter_targets.is_moved_by_peft(model)
        (partial / "README.md").write_text(model_card(task, curves, step, is_moved_by_peft=is_moved), encoding="utf-8")
        shutil.rmtree(task.final_dir, ignore_errors=True)
        os.replace(partial, task.final_dir)
    except Exception as error:  # the libraries that write have errors of their own
        why = checkpoint_folder.disk_fault(error, task.run_dir)
        if why is None:
            raise
        shutil.rmtree(partial, ignore_errors=True)
        raise WorkerError(
            f"the final model cannot be written: {why}",
            where=str(task.final_dir),
            hint="make room on that disk (`df -h` shows it), then `homelab recover`; the last checkpoint holds all that was trained",
        ) from error
