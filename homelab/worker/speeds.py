"""The file of measured speeds: what this node's ranks cost with one model and one method, for the next plan. JSON for people.

One file per model and method in <workdir>/speeds/. It is rewritten at checkpoints and at the end of a run; deleting it only means
that speeds are measured again.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from homelab.worker.balance import Report
from homelab.worker.metrics import replace_text
from homelab.worker.speed import file_name
from homelab.worker.task import Task

_QUANTILES = 32
LEAST_STEPS = 5  # fewer say little


def path_of(task: Task) -> Path:
    """Where this run's model and method keep their speeds on this node."""
    return (
        task.run_dir.parent.parent / "speeds" / file_name(task.section("model")["name"], task.section("method")["kind"])
    )


def content(
    task: Task, reports: Sequence[Report | None], *, steps: int, sync_s: Sequence[float], row_tokens: Sequence[int],
    save_s: float | None, evaluate_s: float | None, torch_version: str, beside_torch_bytes: int | None = None,
) -> dict[str, Any] | None:  # fmt: skip
    """What the file of this node holds; None while too little is measured. `row_tokens` are the lengths of all rows of the data.

    `beside_torch_bytes` was measured on the card of the node's first rank (`card_memory`), and holds for its other cards of the same kind.
    """
    own = [entry for entry in task.plan["ranks"] if entry["node"] == task.node]
    told = [(entry, reports[entry["rank"]]) for entry in own]
    if steps < LEAST_STEPS or any(report is None for _, report in told):
        return None
    method, train = task.section("method"), task.section("train")
    return {
        "schema": 1,
        "model": task.section("model")["name"],
        "method": {"kind": method["kind"], "rank": method["rank"], "targets": method["targets"]},
        "precision": task.precision,
        "device": task.device,
        "gradient_checkpointing": train["gradient_checkpointing"],
        "fused_loss": bool(train.get("fused_loss", False)),
        "backend": "unsloth" if method.get("backend") == "unsloth" else "transformers",
        "compress": task.section("parallel").get("compress", "none"),
        "torch": torch_version,
        "measured_at": time.time(),
        "run": task.run_dir.name,
        "world_size": task.world_size,
        "sync_s": statistics.median(sync_s) if sync_s else None,
        "save_s": save_s,
        "evaluate_s": evaluate_s,
        "rows": len(row_tokens),
        "row_tokens_mean": statistics.fmean(row_tokens),
        "row_tokens_quantiles": _quantiles(row_tokens),
        "data_sha256": task.run["data"]["train"].get("sha256"),
        "seq_len": train["seq_len"],
        "ranks": [
            {
                "local_rank": entry["local_rank"], "device_name": entry.get("device_name", ""), "steps": steps, **asdict(report.speed),
                "beside_torch_bytes": beside_torch_bytes if entry.get("device_name") == own[0].get("device_name") else None,
            }
            for entry, report in told
            if report is not None
        ],
    }  # fmt: skip


def save_s_of(task: Task) -> float | None:
    """How long a save halted this run on this node, as it wrote down in an earlier attempt; None where it did not."""
    try:
        found = json.loads(path_of(task).read_text(encoding="utf-8"))
        return float(found["save_s"]) if found["run"] == task.run_dir.name else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _quantiles(lengths: Sequence[int]) -> list[int]:
    """Lengths from the shortest to the longest at even distances: how they differ decides how well they can be shared out."""
    ordered = sorted(lengths)
    return [ordered[round(part * (len(ordered) - 1) / _QUANTILES)] for part in range(_QUANTILES + 1)]


def write(path: Path, speeds: dict[str, Any]) -> None:
    """Replace the file in one piece. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(speeds, indent=2) + "\n")
