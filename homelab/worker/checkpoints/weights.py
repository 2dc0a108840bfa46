"""The weights of a run on disk: what a checkpoint holds, loading it back, and the final model."""

from __future__ import annotations

import copy
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from homelab.shared.protocol import files
from homelab.shared.protocol.digest import file_sha256
from homelab.worker.checkpoints import saving
from homelab.worker.checkpoints.best_weights import BestWeights
from homelab.worker.checkpoints.curves import FILE, Curves
from homelab.worker.checkpoints.model_card import model_card
from homelab.worker.checkpoints.tensor_files import fill, names_in, save
from homelab.worker.data.row_agreement import LAW
from homelab.worker.errors import WorkerError, disk_fault
from homelab.worker.model import adapter_targets, host_layers, inspection, score_head
from homelab.worker.model.pretrained import DTYPES
from homelab.worker.runtime.task import Task

WEIGHTS = "trainable.safetensors"
OPTIMIZER = "optimizer.pt"
_ADAPTER = re.compile(r"\.default(?=\.|$)")  # in the names of PEFT's weights


def state_of_run(task: Task, curves: Curves, best: BestWeights, rows: dict[str, dict[str, str]]) -> dict[str, Any]:
    """What a checkpoint holds beside what the strategy and the Trainer give it: file name -> content; `copy_of` keeps it as it is now."""
    law = {
        "recipe_hash": task.recipe_hash,
        "data": {name: source and source.get("sha256") for name, source in task.run["data"].items()},
        "rows": rows,
    }
    return {**best.state(), LAW: law, FILE: curves.text()}


def trained(model: Any) -> dict[str, torch.Tensor]:
    """The weights that are trained, by name."""
    return {name: weight.detach() for name, weight in model.named_parameters() if weight.requires_grad}


def frozen(model: Any) -> dict[str, torch.Tensor]:
    """The weights that are not trained, by name."""
    return {name: weight.detach() for name, weight in model.named_parameters() if not weight.requires_grad}


def buffers(model: Any) -> dict[str, torch.Tensor]:
    """What the files of a model have beside its weights, by name, in the types in which the model holds them: the scale of a layer, the biases of a router."""
    saved = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in saved}


def load_weights(model: Any, folder: Path) -> None:
    """Put a checkpoint's weights into a model of the same recipe. Raises WorkerError when names or shapes differ."""
    fill(trained(model), folder / WEIGHTS)


def adapter_name(name: str) -> str:
    """A trained weight's name as PEFT's files have it: without the name of the adapter."""
    return _ADAPTER.sub("", name)


def load_adapter(model: Any, folder: Path) -> Any:
    """The base with the adapter of this folder, in PEFT's format; every tensor goes to its own name.

    PEFT's own loading renames them by transformers' tables for the base, and leaves out without a word what it then does not find (peft 0.21:
    the shared experts of Laguna). Raises WorkerError when names or shapes differ.
    """
    from peft import PeftConfig

    from homelab.worker.model import experts_adapter

    config, file = PeftConfig.from_pretrained(str(folder)), folder / "adapter_model.safetensors"
    config.inference_mode = False
    adapter_targets.reach(config, names_in(file))
    with adapter_targets.as_written(), host_layers.shaped(model):
        adapted = experts_adapter.put_on(model, config)
    fill({adapter_name(name): weight for name, weight in trained(adapted).items()}, file)
    return adapted


def _name_all_layers(stage: Any, task: Task) -> None:
    """Let the settings of a stage's adapters name those of the whole model, as one process does: what reads them puts adapters nowhere else. A model with
    layers from the host lacks a part for images, as a stage does."""
    from transformers import AutoModelForCausalLM

    from homelab.worker.model.build import add_adapters

    config = copy.deepcopy(inspection.base_of(stage).config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    named = add_adapters(whole, task.method, task.train.seed).peft_config["default"]
    own = stage.peft_config["default"]
    own.target_modules, own.target_parameters, own.exclude_modules = named.target_modules, named.target_parameters, named.exclude_modules


def begin_with(model: Any, task: Task, note: Callable[[str], None], *, is_stage: bool) -> None:
    """Let the adapters of the model, or of a stage, begin where those of an earlier training ended, where the recipe names them ([model] adapter).

    Raises WorkerError for a file that is gone or changed, and for adapters of another base or other targets.
    """
    if task.model.adapter is None:
        return
    source = task.run["data"]["adapter"]
    file = Path(source["path"]).expanduser()
    if not file.is_file() or file_sha256(file) != source["sha256"]:
        raise WorkerError(
            "the adapter that this run began with is gone, or has changed", where=f"node {task.node}: {file}",
            hint=f"homelab recover {task.run_dir.name} ships it again",
        )  # fmt: skip
    own = {adapter_name(name): weight for name, weight in trained(model).items() if ".lora_" in name}
    try:
        fill(own, file, is_part=is_stage)
    except WorkerError as error:
        raise WorkerError(
            error.message.replace("the checkpoint does not fit", "the adapter to begin with does not fit"), where="[model] adapter in the recipe",
            hint="take the [model] name, and the targets and rank of [method], with which it was trained", needs_launch=True,
        ) from error  # fmt: skip
    note(f"adapters: they begin as those of {source['name']}, sha256 {source['sha256'][:12]}")


def write_final(
    model: Any, tensors: dict[str, torch.Tensor], beside: dict[str, torch.Tensor], tokenizer: Any, task: Task, curves: Curves, step: int
) -> None:
    """final/ in one piece: adapter in PEFT's format, or the whole model in the plan's precision; tokenizer; model card.

    `tensors` are the whole weights that were trained, after `step`, and with them all others of a whole model; the model itself may hold only
    shards of them, or the layers of a stage. `beside`: the `buffers` of a whole model, which keep their types: a router's biases need all of their digits.

    Raises WorkerError when the disk does not take it.
    """
    partial = task.run_dir / ".final.partial"
    shutil.rmtree(partial, ignore_errors=True)
    inspection.let_cache(model, True)  # the Trainer turned it off for training; generating needs it
    scores = task.objective is not None and task.objective.scores
    tensors = score_head.named(tensors) if scores else tensors
    try:
        if task.method.kind == "full":
            dtype = DTYPES[task.precision]
            model.config.dtype = dtype
            saving.save_whole(model, partial, state_dict={name: tensor.to(dtype) for name, tensor in tensors.items()} | beside)
        else:
            if task.stage is not None or host_layers.of(model) is not None:
                _name_all_layers(model, task)
            model.save_pretrained(partial, state_dict=tensors, save_embedding_layers=False)
            if (
                task.stage is not None or scores
            ):  # PEFT leaves out what its own model does not have: the layers of all other stages, a head of another name
                save({adapter_name(name): tensor for name, tensor in tensors.items()}, partial / "adapter_model.safetensors")
        if scores:
            score_head.describe(partial, inspection.base_of(model), tokenizer.pad_token_id)
        tokenizer.save_pretrained(partial)
        is_moved = task.method.kind != "full" and adapter_targets.is_moved_by_peft(model)
        (partial / FILE).write_text(curves.text(), encoding="utf-8")
        (partial / "README.md").write_text(model_card(task, curves, step, is_moved_by_peft=is_moved), encoding="utf-8")
        # On the disk before the name is: a run that is done has nothing else that a person would go back to after a power cut.
        for path in (*partial.iterdir(), partial):
            files.sync(path)
        shutil.rmtree(task.final_dir, ignore_errors=True)
        os.replace(partial, task.final_dir)
        files.sync(task.run_dir)
    except Exception as error:  # the libraries that write have errors of their own
        why = disk_fault(error, task.run_dir)
        if why is None:
            raise
        shutil.rmtree(partial, ignore_errors=True)
        raise WorkerError(
            f"the final model cannot be written: {why}",
            where=str(task.final_dir),
            hint="make room on that disk (`df -h` shows it), then `homelab recover`; the last checkpoint holds all that was trained",
        ) from error
