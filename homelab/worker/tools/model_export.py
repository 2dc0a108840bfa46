"""python -m homelab.worker.tools.model_export: a checkpoint in the format of final/, so that it can be fetched, merged and served.

Reads one JSON object from standard input, {"run_dir", "step"}, and prints {"made": {"folder"}} as its last line. The weights are those of
the checkpoint, bit for bit. The base model's own weights are not read (it is built without any), so this takes seconds. Only what a training of all
weights has left as it is comes from them: the tower for images, the scales of layers, the biases of routers.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from homelab.shared.protocol import layout, result_files
from homelab.shared.recipe import Method
from homelab.worker.checkpoints import checkpoint_folder, held
from homelab.worker.checkpoints.curves import FILE, Curves
from homelab.worker.checkpoints.model_card import model_card
from homelab.worker.errors import WorkerError
from homelab.worker.runtime import imports
from homelab.worker.runtime.recipe import section
from homelab.worker.runtime.task import Task
from homelab.worker.tools import run_model


def export(run_dir: Path, step: int) -> str:
    """Write exports/step-N/ in one piece; its name. A run that trains may have removed the checkpoint of `step` by now: then it is its newest.

    Raises WorkerError for a damaged checkpoint, a base that is not here, a full disk.
    """
    run = run_model.read_run(run_dir)
    with held.newest(run_dir / layout.CHECKPOINTS, run["recipe_hash"], least=step) as checkpoint:
        content = checkpoint_folder.read_manifest(checkpoint)
        assert content is not None, "it was verified"
        name = result_files.exported(content["step"])
        if not (run_dir / name / result_files.CARD).is_file():
            task = run_model.task_of(run, run_dir, content["step"])
            with run_model.replaced(run_dir / name) as partial:
                _write(run, task, checkpoint, partial)
    return name


def _write(run: dict[str, Any], task: Task, checkpoint: Path, partial: Path) -> None:
    imports.prepare(run, bitsandbytes=False)
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    from homelab.worker.checkpoints import saving, tensor_files
    from homelab.worker.checkpoints.weights import WEIGHTS, adapter_name
    from homelab.worker.model import adapter_targets, score_head
    from homelab.worker.model.build import add_adapters
    from homelab.worker.model.pretrained import DTYPES, from_pretrained, load_tokenizer, model_path

    imports.quiet()
    path, method = model_path(run), run["recipe"]["method"]
    scores = task.objective is not None and task.objective.scores
    if scores and method["kind"] == "full":
        raise WorkerError(
            "a checkpoint of a reward model with all its weights cannot be fetched", where=str(checkpoint),
            hint=f"let the run end, then homelab fetch {task.run_dir.name}; with [method] kind = \"lora\" it can be fetched at any time",
        )  # fmt: skip
    is_moved = False
    config = from_pretrained(AutoConfig, path, revision=run["recipe"]["model"].get("revision"))
    saved = load_file(str(checkpoint / WEIGHTS))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if method["kind"] == "full":
        saving.forget_quantisation(model)  # of the files that it was trained from
        dtype = DTYPES[task.precision]
        model.load_state_dict({name: tensor.to(dtype) for name, tensor in saved.items()}, strict=False, assign=True)
        model.tie_weights()
        _take_frozen(model, path, run["recipe"]["model"].get("revision"), dtype, checkpoint)
        saving.save_whole(model, partial)
    else:
        with torch.device("meta"):
            adapted = add_adapters(model, section(Method, run["recipe"]), int(run["recipe"]["train"]["seed"]))
        adapted.peft_config["default"].base_model_name_or_path = path
        adapted.save_pretrained(partial, state_dict=saved, save_embedding_layers=False)
        if scores:  # PEFT leaves out what its own model does not have: a head of another name
            named = {adapter_name(name): tensor for name, tensor in score_head.named(saved).items()}
            tensor_files.save(named, partial / "adapter_model.safetensors")
            score_head.describe(partial, model, None)
        is_moved = adapter_targets.is_moved_by_peft(adapted)
    load_tokenizer(run, path).save_pretrained(partial)
    curves = Curves.carried_by(checkpoint, task)
    (partial / FILE).write_text(curves.text(), encoding="utf-8")
    card = model_card(task, curves, task.resume_step, is_moved_by_peft=is_moved)
    (partial / result_files.CARD).write_text(card, encoding="utf-8")


def _take_frozen(model: Any, path: str, revision: str | None, dtype: Any, checkpoint: Path) -> None:
    """Give the model what its training has left as it is in the base: weights in `dtype`, buffers as the training held them. Raises WorkerError where the
    checkpoint lacks another weight."""
    import torch

    from homelab.worker.checkpoints.weights import buffers
    from homelab.worker.model import inspection
    from homelab.worker.model.build import load_base

    left = [name for name, weight in model.named_parameters() if weight.is_meta]
    has_buffers = bool(buffers(model))
    if not left and not has_buffers:
        return
    # A training of all weights holds them in fp32, and final/ has its buffers as they are held.
    base = load_base(path, revision, None, torch.float32 if has_buffers else dtype, None, "this node")
    if left and (lost := sorted({*left} - {*inspection.without_gradient(base)})):
        raise WorkerError(
            f"the checkpoint does not fit this model: {lost[0]} is missing", where=str(checkpoint), hint="copy the model's folder to this node again"
        )  # fmt: skip
    weights = dict(base.named_parameters())
    model.load_state_dict({name: weights[name].detach().to(dtype) for name in left} | buffers(base), strict=False, assign=True)


def main() -> int:
    """Read the question, write the folder, print its name. Returns 0, or an error's code with its three parts on standard error."""
    question = json.load(sys.stdin)
    os.nice(10)
    return run_model.answered(lambda: {"folder": export(Path(question["run_dir"]).expanduser(), int(question["step"]))})


if __name__ == "__main__":
    sys.exit(main())
