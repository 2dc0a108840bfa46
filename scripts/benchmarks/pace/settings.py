"""What both sides train: the rows, and the recipe in the words of each."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import material

from homelab.shared.law import order

SEQ_LEN, GLOBAL_BATCH, MICRO_BATCH = 384, 8, 4
_TEXT = (
    "a network of unequal machines trains one model because the recipe alone decides what is learned and the cluster only who computes "
    "which rows of every batch so that all of them finish together whatever their speed"
)


def write(folder: Path, model: str, steps: int, *, method: str, completion_only: bool, device: str, seed: int = 1) -> Path:
    """A folder with run.json, and the data beside it; the rows have the lengths of chats (log-normal, median 90 words).

    device: cpu or cuda; on CUDA the precision is bf16.
    """
    data = folder.with_name(f"{folder.name}.jsonl")
    draw, vocabulary = random.Random(seed), _TEXT.split()
    with data.open("w", encoding="utf-8") as file:
        for _ in range(GLOBAL_BATCH * steps):
            words = min(int(draw.lognormvariate(4.5, 0.8)) + 8, 300)
            text = [draw.choice(vocabulary) for _ in range(words)]
            cut = min(max(2, words // 3), 40)
            file.write(json.dumps({"prompt": " ".join(text[:cut]), "completion": " " + " ".join(text[cut:])}) + "\n")
    return material.run(
        folder, Path(model), data, data__format="prompt-completion", data__completion_only=completion_only, method__kind=method,
        train__global_batch=GLOBAL_BATCH, train__learning_rate=1e-4, train__warmup_steps=0, train__schedule="constant", train__seq_len=SEQ_LEN,
        train__seed=seed, train__weight_decay=0.0, train__precision=_precision(device), train__fused_loss="auto", checkpoint__keep=1,
    )  # fmt: skip


def plan(folder: Path, device: str, switches: dict[str, bool]) -> None:
    """The plan of one rank, which pads or not, as `switches` say (homelab/worker/runtime/switches.py)."""
    backend = "gloo" if device == "cpu" else "nccl"
    material.plan(
        folder, 1, (GLOBAL_BATCH,), device=device, precision=_precision(device), backend=backend, micro_batch=MICRO_BATCH, switches=switches
    )


def _precision(device: str) -> str:
    return "fp32" if device == "cpu" else "bf16"


def rows_in_order(run: dict[str, Any], tokenizer: Any) -> list[Any]:
    """The rows of the run as homelab's worker encodes them, in the order in which it trains them."""
    from homelab.worker.data.encoding import load_data

    rows = load_data(run, tokenizer).train
    return [rows[index] for index in order.permutation(int(run["recipe"]["train"]["seed"]), 0, len(rows))]
