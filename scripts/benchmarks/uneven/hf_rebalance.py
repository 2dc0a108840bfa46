"""Baseline, started as a [script]: the plain Hugging Face Trainer with train_sampling_strategy="batch_rebalance".

    hf_rebalance.py MODEL DATA SETTINGS

SETTINGS: JSON with seq_len, pass_rows, accumulate, learning_rate, seed, rank, alpha.

Its sampler (transformers 5.23, trainer_pt_utils.BatchRebalanceSampler) cuts every global batch into groups of equal padded cost,
one for each rank and accumulation step. It takes all ranks to be equally fast. What each step trained on and when it was done is
written as homelab's worker writes it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments


class Rows(Dataset):
    """Token ids of every row, with its number."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": self.rows[index], "row": index}


class Collator:
    """Pads a pass, and remembers which rows were in it. One call is one pass of this rank, in order."""

    def __init__(self, pad: int) -> None:
        self.pad = pad
        self.passes: list[list[int]] = []

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.passes.append([row["row"] for row in rows])
        longest = max(len(row["input_ids"]) for row in rows)
        tokens = torch.full((len(rows), longest), self.pad)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for index, row in enumerate(rows):
            tokens[index, : len(row["input_ids"])] = torch.tensor(row["input_ids"])
            mask[index, : len(row["input_ids"])] = 1
        return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


class Records(TrainerCallback):
    """heartbeat.json, metrics.jsonl and samples.jsonl of this rank."""

    def __init__(self, collator: Collator, accumulate: int) -> None:
        self.collator = collator
        self.accumulate = accumulate
        self.rank = int(os.environ.get("RANK", "0"))
        self.folder = Path(os.environ["HOMELAB_RUN_DIR"], "attempts", os.environ["HOMELAB_ATTEMPT"], "ranks", str(self.rank))
        self.folder.mkdir(parents=True, exist_ok=True)

    def on_train_begin(self, *_arguments: Any, **_more: Any) -> None:
        self._beat(0)

    def on_step_end(self, _arguments: Any, state: Any, _control: Any, **_more: Any) -> None:
        step = state.global_step
        passes = self.collator.passes[(step - 1) * self.accumulate : step * self.accumulate]
        self._append("metrics.jsonl", {"kind": "train", "time": time.time(), "rank": self.rank, "step": step})
        self._append("samples.jsonl", {"step": step, "ids": [row for rows in passes for row in rows]})
        self._beat(step)

    def _beat(self, step: int) -> None:
        partial = self.folder / ".heartbeat"
        partial.write_text(json.dumps({"time": time.time(), "rank": self.rank, "pid": os.getpid(), "phase": "training", "step": step}))
        partial.replace(self.folder / "heartbeat.json")

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self.folder / name).open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    """Train until somebody stops it."""
    model_path, data_path, text = sys.argv[1:]
    settings = json.loads(text)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    texts = [json.loads(line)["text"] for line in Path(data_path).read_text(encoding="utf-8").splitlines()]
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    rows = Rows([[*tokens, tokenizer.eos_token_id][: settings["seq_len"]] for tokens in encoded])
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.config.use_cache = False
    lora = LoraConfig(r=settings["rank"], lora_alpha=settings["alpha"], target_modules="all-linear", task_type="CAUSAL_LM")
    collator = Collator(tokenizer.pad_token_id)
    arguments = TrainingArguments(
        output_dir=os.environ["HOMELAB_RUN_DIR"],
        train_sampling_strategy="batch_rebalance",
        per_device_train_batch_size=settings["pass_rows"],
        gradient_accumulation_steps=settings["accumulate"],
        max_steps=100_000,
        learning_rate=settings["learning_rate"],
        lr_scheduler_type="constant",
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        ddp_broadcast_buffers=False,
        dataloader_drop_last=True,
        remove_unused_columns=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=settings["seed"],
    )
    Trainer(
        model=get_peft_model(model, lora),
        args=arguments,
        train_dataset=rows,
        data_collator=collator,
        callbacks=[Records(collator, settings["accumulate"])],
    ).train()


if __name__ == "__main__":
    main()
