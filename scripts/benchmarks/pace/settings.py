"""What both sides train: the rows, and the recipe in the words of each."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

SEQ_LEN, GLOBAL_BATCH, MICRO_BATCH = 384, 8, 4
_TEXT = (
    "a network of unequal machines trains one model because the recipe alone decides what is learned and the cluster only who computes "
    "which rows of every batch so that all of them finish together whatever their speed"
)


def write(folder: Path, model: str, steps: int, *, method: str, completion_only: bool, device: str, seed: int = 1) -> Path:
    """A folder with run.json, the plan of one rank and the data; the rows have the lengths of chats (log-normal, median 90 words).

    device: cpu or cuda; on CUDA the precision is bf16.
    """
    folder.mkdir(parents=True)
    data = folder / "rows.jsonl"
    draw, vocabulary = random.Random(seed), _TEXT.split()
    with data.open("w", encoding="utf-8") as file:
        for _ in range(GLOBAL_BATCH * steps):
            words = min(int(draw.lognormvariate(4.5, 0.8)) + 8, 300)
            text = [draw.choice(vocabulary) for _ in range(words)]
            cut = min(max(2, words // 3), 40)
            file.write(json.dumps({"prompt": " ".join(text[:cut]), "completion": " " + " ".join(text[cut:])}) + "\n")
    recipe: dict[str, Any] = {
        "model": {"name": model, "revision": None},
        "data": {
            "train": data.name, "eval": None, "eval_fraction": 0.0, "format": "prompt-completion", "completion_only": completion_only,
            "packing": False, "split": "train", "text_column": "text",
        },
        "method": {"kind": method, "rank": 16, "alpha": 32, "dropout": 0.0, "targets": "all-linear", "backend": "auto"},
        "train": {
            "global_batch": GLOBAL_BATCH, "epochs": 1, "steps": None, "learning_rate": 1e-4, "warmup_steps": 0, "schedule": "constant",
            "seq_len": SEQ_LEN, "seed": seed, "weight_decay": 0.0, "max_grad_norm": 1.0, "optimizer": "adamw",
            "precision": "fp32" if device == "cpu" else "bf16", "gradient_checkpointing": False, "fused_loss": "auto",
            "lr_scale": "none", "reference_batch": None,
        },
        "parallel": {"strategy": "auto", "shares": "auto", "micro_batch": "auto", "compress": "none", "port": 29500},
        "checkpoint": {"every_steps": 10**6, "keep": 1},
        "recovery": {"max_restarts": 0, "min_nodes": 1},
        "tracking": {"tensorboard": False, "eval_every_steps": 0},
        "script": None,
    }  # fmt: skip
    source = {"path": str(data), "sha256": hashlib.sha256(data.read_bytes()).hexdigest(), "kind": "file"}
    run = {"schema": 1, "name": "speed", "recipe": recipe, "recipe_hash": "speed", "data": {"train": source, "eval": None}, "versions": {}}
    (folder / "run.json").write_text(json.dumps(run, indent=1), encoding="utf-8")
    return folder


def plan(folder: Path, device: str, switches: dict[str, bool]) -> None:
    """The plan of one rank, which pads or not, as `switches` say (homelab/worker/switches.py)."""
    content = {
        "world_size": 1, "backend": "gloo" if device == "cpu" else "nccl", "device": device,
        "precision": "fp32" if device == "cpu" else "bf16", "attempt": 1, "resume_step": 0, "balance": "fixed", "nodes": ["here"],
        "ranks": [
            {
                "rank": 0, "node": "here", "local_rank": 0, "device_name": device, "share": GLOBAL_BATCH, "micro_batch": MICRO_BATCH,
                "token_cap": None, "speed": None,
            }
        ],
        "switches": switches,
    }  # fmt: skip
    attempt = folder / "attempts" / "1"
    attempt.mkdir(parents=True)
    (attempt / "plan.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def rows_in_order(run: dict[str, Any], tokenizer: Any) -> list[Any]:
    """The rows of the run as homelab's worker encodes them, in the order in which it trains them."""
    from homelab.worker import sampler
    from homelab.worker.data import load_data

    rows = load_data(run, tokenizer).train
    return [rows[index] for index in sampler.permutation(int(run["recipe"]["train"]["seed"]), 0, len(rows))]
