"""Lines of metrics.jsonl, and a run that two recoveries have cut."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from homelab.controller.run.metrics import Gathered
from homelab.controller.run.paths import RunPaths

RESUMED = {1: 0, 2: 5, 3: 8}
# What the controller gathered, in three looks: attempt 2 repeats 6 and 7, attempt 3 repeats 9 to 11.
STAGES = (range(1, 8), range(6, 12), range(9, 15))


def train(attempt: int, step: int, rank: int = 0) -> dict[str, Any]:
    """The loss of a step that is computed again differs in its last digits, as on other cards."""
    loss = 5.0 - step / 100 + attempt * 1e-6
    return {
        "kind": "train", "attempt": attempt, "rank": rank, "step": step, "time": 1000.0 + 100 * attempt + step, "loss": loss, "perplexity": math.exp(loss),
        "learning_rate": 1e-3, "grad_norm": 1.5, "epoch": step / 10, "step_s": 0.5, "tokens_per_s": 100.0 + attempt, "tokens": 50, "communication_s": 0.1,
        "memory_bytes": 1 << 30,
    }  # fmt: skip


def evaluation(attempt: int, step: int) -> dict[str, Any]:
    return {
        "kind": "eval",
        "attempt": attempt,
        "rank": 0,
        "step": step,
        "time": 1000.0 + 100 * attempt + step,
        "eval_loss": 4.0,
        "eval_perplexity": math.exp(4.0),
    }


def gather(paths: RunPaths, stage: int) -> None:
    """Attempt `stage` + 1 has trained, of two ranks."""
    attempt, steps = stage + 1, STAGES[stage]
    lines = [train(attempt, step, rank) for step in steps for rank in (0, 1)] + [
        evaluation(attempt, step) for step in steps if step % 5 == 0
    ]
    Gathered(paths).add(lines, {number: step for number, step in RESUMED.items() if number <= attempt})


def run_in(folder: Path) -> RunPaths:
    (folder / "run").mkdir()
    return RunPaths(folder / "run")
