"""Unsloth: its import, which comes before everything else, and its model with adapters.

The recipe decides the training here, too: the same base at the same revision, the same adapters from the same seed, fp32 adapters, the
loss a sum over `num_items_in_batch`. What `ShareTrainer` asserts of the Trainer it asserts of the one that Unsloth has changed
(unsloth/models/_utils.py, patch_gradient_accumulation_fix). Read in unsloth and unsloth_zoo 2026.10.9.

On a machine without a card, Unsloth trains on the CPU with transformers' own layers and a loss in chunks (unsloth_zoo/cpu). That is what our tests run;
its CUDA kernels were never run by them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from homelab.shared.recipe import Train
from homelab.worker.errors import WorkerError
from homelab.worker.runtime.task import Task


def begin(task: Task) -> None:
    """Import it. It replaces parts of transformers, PEFT and TRL, so none of them may be loaded yet (unsloth/_gpu_init.py).

    Raises WorkerError when it is not installed or refuses this machine.
    """
    os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"  # it would fetch a file from the hub at every start, for statistics
    # folder for the code that it writes, otherwise the current folder
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", str(task.rank_dir / "unsloth"))
    if task.device == "cuda":
        from homelab.worker.runtime import process_group

        process_group.claim_device(task)  # it looks at the current card while it is imported
    else:
        import torch

        os.environ["UNSLOTH_FORCE_CPU"] = "1"
        # Its transformers (5.17) reads an optimizer's state back to `args.device`, which accelerate calls cpu:0; torch.load knows only cpu.
        torch.serialization.register_package(
            100, lambda storage: None, lambda storage, location: storage if location.startswith("cpu:") else None
        )
    try:
        import unsloth  # noqa: F401
    except (ImportError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise WorkerError(
            f"Unsloth cannot be imported: {first}",
            where=f"node {task.node}, {sys.executable}",
            hint='homelab preflight RECIPE --only python shows the missing packages; or set [method] backend = "transformers"',
        ) from error


def load(task: Task, path: str, note: Callable[[str], None]) -> Any:
    """The base model with adapters, as `model.load_model` gives one. Raises WorkerError for what Unsloth would silently train otherwise."""
    import torch
    from unsloth import FastLanguageModel

    from homelab.worker.model import adapted, adapter_targets, trained_weights
    from homelab.worker.model.pretrained import DTYPES, from_pretrained

    method, train = task.method, task.train
    is_cpu = task.device == "cpu"
    if is_cpu and train.optimizer != "adamw":
        raise WorkerError(
            f"Unsloth on a CPU uses AdamW instead of {train.optimizer}: that would be a different training",
            where="[train] optimizer in the recipe",
            hint='set [train] optimizer = "adamw", or [method] backend = "transformers"',
            needs_launch=True,
        )
    note(f"backend: unsloth{', on its CPU backend' if is_cpu else ''}; its loss is always computed in chunks, with any [train] fused_loss")
    model, _ = from_pretrained(
        FastLanguageModel,
        path,
        revision=task.model.revision,
        use_exact_model_name=True,  # use this model, not Unsloth's quantised copy of the same name
        max_seq_length=train.seq_len,
        dtype=DTYPES[task.precision],
        load_in_4bit=method.kind == "qlora",
        device_map=None if is_cpu else {"": task.local_rank},
        use_gradient_checkpointing=_checkpointing(train),
    )
    model.config.use_cache = False
    linear = linear_names(model)
    targets = linear if method.targets == "all-linear" else list(method.targets)
    try:
        model = FastLanguageModel.get_peft_model(
            model,
            r=method.rank,
            lora_alpha=method.alpha,
            lora_dropout=method.dropout,
            target_modules=targets,
            bias="none",
            use_gradient_checkpointing=_checkpointing(train),
            random_state=task.train.seed,
        )
    except ValueError as error:
        raise adapter_targets.unfit(error, linear, method.dropout) from error
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            parameter.data = parameter.data.float()
    adapted.refuse_unmergeable(model)
    trained_weights.start_adapters(model, task.train.seed)
    check_loss(model)
    return model


def linear_names(model: Any) -> list[str]:
    """What "all-linear" stands for (`adapter_targets`), as the last parts of the names: Unsloth takes lists of those."""
    from homelab.worker.model import adapter_targets

    return sorted({name.rsplit(".", 1)[-1] for name in adapter_targets.all_linear(model)})


def check_loss(model: Any) -> None:
    """A few tokens: the loss must be the mean of the plain cross entropies of the model's own logits. Raises WorkerError."""
    import torch

    was_training = model.training
    model.eval()
    tokens = torch.arange(1, 9, device=next(model.parameters()).device).unsqueeze(0)
    with torch.no_grad():
        loss = float(model(input_ids=tokens, labels=tokens).loss)
        plain = float(torch.nn.functional.cross_entropy(model(input_ids=tokens).logits[0, :-1].float(), tokens[0, 1:]))
    model.train(was_training)
    if not abs(loss - plain) <= 2e-2 * abs(plain):  # in bf16 the two round in different orders; a loss of another kind is far off
        raise WorkerError(
            f"Unsloth's loss is {loss:.5g} for a few tokens, but cross entropy is {plain:.5g}",
            where='[method] backend = "unsloth" in the recipe',
            hint='set [method] backend = "transformers"',
            needs_launch=True,
        )


def _checkpointing(train: Train) -> Any:
    """Its own kind keeps the layers' inputs in the host's memory on a card, and is plain recomputation on a CPU."""
    return "unsloth" if train.gradient_checkpointing else False
