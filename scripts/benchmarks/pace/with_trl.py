"""The other side of `scripts/bench speed`: TRL's SFTTrainer with its own defaults, on the same rows in the same order, from the same
adapters. python -m benchmarks.pace.with_trl FOLDER [unsloth]: with Unsloth's model in TRL's trainer, as its guides say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.pace import settings
from benchmarks.pace.turns import Turns


def main(folder: str, unsloth: bool) -> int:
    """Train what the folder says, pausing after every step."""
    if unsloth:
        import unsloth  # before transformers, because it must patch it
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    place = Path(folder)
    run = json.loads((place / "run.json").read_text(encoding="utf-8"))
    plan = json.loads((place / "attempts" / "1" / "plan.json").read_text(encoding="utf-8"))
    name, method, train = run["recipe"]["model"]["name"], run["recipe"]["method"], run["recipe"]["train"]
    on_cpu, dtype = plan["device"] == "cpu", torch.float32 if plan["precision"] == "fp32" else torch.bfloat16
    tokenizer = AutoTokenizer.from_pretrained(name)
    rows = settings.rows_in_order(run, tokenizer)
    if unsloth:
        model = _with_unsloth(name, method, train, dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32 if method["kind"] == "full" else dtype)
        if method["kind"] != "full":
            from homelab.shared.recipe import Method
            from homelab.worker.model.build import add_adapters
            from homelab.worker.runtime.recipe import section

            model = add_adapters(model, section(Method, run["recipe"]), int(train["seed"]))
    data = [
        {
            "input_ids": list(row.tokens),
            "labels": [token if counts else -100 for token, counts in zip(row.tokens, row.trained, strict=True)],
        }
        for row in rows
    ]
    assert all(any(label != -100 for label in row["labels"]) for row in data), "TRL would drop such a row"
    config = SFTConfig(
        output_dir=str(place / "trl"),
        per_device_train_batch_size=settings.MICRO_BATCH,
        gradient_accumulation_steps=settings.GLOBAL_BATCH // settings.MICRO_BATCH,
        num_train_epochs=1,
        learning_rate=train["learning_rate"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=train["max_grad_norm"],
        max_length=settings.SEQ_LEN,
        gradient_checkpointing=False,
        bf16=plan["precision"] == "bf16",
        use_cpu=on_cpu,
        seed=int(train["seed"]),
        train_sampling_strategy="sequential",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    turns, losses = Turns(), []

    class Pauses(TrainerCallback):
        """The trainer's own hooks around a step."""

        def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
            turns.begin()

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            loss = sum(float(part) for part in losses)
            losses.clear()
            turns.told(loss)

    class Listening(SFTTrainer):
        """Keeps the losses of a step's passes; each is a part of the mean over the step's tokens."""

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss.detach())
            return loss

    trainer = Listening(model=model, args=config, train_dataset=Dataset.from_list(data), processing_class=tokenizer, callbacks=[Pauses()])
    trainer.train()
    return 0


def _with_unsloth(name: str, method: dict[str, Any], train: dict[str, Any], dtype: Any) -> Any:
    """The model and the adapters as Unsloth's guides make them; the adapters' B begins at zero, so the first loss is that of the others."""
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        model_name=name, max_seq_length=settings.SEQ_LEN, dtype=dtype, load_in_4bit=False, full_finetuning=method["kind"] == "full"
    )
    if method["kind"] == "full":
        return model
    return FastLanguageModel.get_peft_model(
        model, r=method["rank"], lora_alpha=method["alpha"], lora_dropout=0.0, bias="none", use_gradient_checkpointing=False,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], random_state=int(train["seed"]),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], unsloth=sys.argv[2:] == ["unsloth"]))
