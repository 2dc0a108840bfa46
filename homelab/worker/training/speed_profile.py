"""The file of measured speeds: what this node's ranks cost with one model and one method, for the next plan. JSON for people.

One file per model and method in <workdir>/speeds/. It is rewritten at checkpoints and at the end of a run; deleting it only means
that speeds are measured again. A short run measures little on a busy machine: each rank keeps what the runs before have measured, too.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homelab.shared.law.speed import Speed
from homelab.shared.law.wire_bytes import BUCKET_MB
from homelab.shared.protocol import files, layout
from homelab.worker.balancing.balancer import Report
from homelab.worker.balancing.speed_meter import SETTLING_STEPS, WINDOW_STEPS
from homelab.worker.runtime.task import Rank, Task

if TYPE_CHECKING:
    from homelab.worker.runtime.metrics_recorder import Recorder
    from homelab.worker.training.trainer import ShareTrainer

_QUANTILES = 32
_MOST_SYNCS = 30
_MOST_RUNS = 30
_OF_THE_WIRE = ("method", "precision", "device", "backend")
_OF_SPEEDS = (*_OF_THE_WIRE, "gradient_checkpointing", "fused_loss", "torch")
LEAST_STEPS = 5  # fewer say little


def path_of(task: Task) -> Path:
    """Where this run's model and method keep their speeds on this node."""
    return task.run_dir.parent.parent / layout.SPEEDS / layout.speeds_name(task.model.name, task.method.kind, task.method.base)


@dataclass(frozen=True)
class Measurements:
    """What this node has measured in `steps` steps. `row_tokens` are the lengths of all rows of the data, `loss_part` the part of their tokens with a loss.
    `sync_s`: of each step, the wire;
    `wait_s`: what it took beyond that and the seconds of the rank that ends last by its speed, because the speed of a rank varies; NaN where that is not known.

    `beside_torch_bytes` was measured on the card of the node's first rank (`card_memory`), and holds for its other cards of the same kind.
    """

    steps: int
    sync_s: Sequence[float]
    wait_s: Sequence[float]
    row_tokens: Sequence[int]
    save_s: float | None
    evaluate_s: float | None
    torch_version: str
    beside_torch_bytes: int | None = None
    loss_part: float | None = None


def keep(task: Task, trainer: ShareTrainer, recorder: Recorder, save_s: float | None, evaluate_s: float | None) -> None:
    """Write down what was measured, for the next plan, by the first rank of each node. A full disk must not end a training for it."""
    waits = task.streaming is not None or (task.device == "cuda" and trainer.strategy.part.is_gathered)
    if not task.is_keeper or waits:
        return  # a pass that waits for weights, other ranks' or the host's, tells no speed
    import torch

    from homelab.worker.runtime import card_memory

    rows = trainer.train_dataset.rows
    row_tokens = [len(row.tokens) for row in rows]
    measured = Measurements(
        steps=recorder.step - task.resume_step,
        sync_s=trainer.sync_s,
        wait_s=trainer.wait_s,
        row_tokens=row_tokens,
        save_s=save_s,
        evaluate_s=evaluate_s,
        torch_version=torch.__version__,
        loss_part=sum(row.loss_tokens for row in rows) / sum(row_tokens),
        beside_torch_bytes=card_memory.beside_torch_bytes(task),
    )
    profile = content(task, trainer.reports, measured)
    if profile is None:
        return
    path = path_of(task)
    try:
        write(path, profile)
    except OSError as error:
        recorder.note(f"the measured speeds could not be saved in {path}: {error.strerror}")


def content(task: Task, reports: Sequence[Report | None], measured: Measurements) -> dict[str, Any] | None:
    """The content of this node's file; None while too little is measured."""
    own = [rank for rank in task.ranks if rank.node == task.node]
    own_reports = [(rank, reports[rank.rank]) for rank in own]
    if measured.steps < LEAST_STEPS or any(report is None for _, report in own_reports):
        return None
    method, train = task.method, task.train
    steady = [seconds for seconds in measured.wait_s if math.isfinite(seconds)]
    # Lengths from the shortest to the longest at even distances: how they differ decides how well they can be shared out.
    ordered = sorted(measured.row_tokens)
    return {
        "schema": 1,
        "model": task.model.name,
        "method": {"kind": method.kind, "rank": method.rank, "targets": method.targets} | ({"base": method.base} if method.base != "auto" else {}),
        "precision": task.precision,
        "device": task.device,
        "gradient_checkpointing": train.gradient_checkpointing,
        "fused_loss": bool(train.fused_loss),
        "backend": "unsloth" if method.backend == "unsloth" else "transformers",
        "compress": task.parallel.compress,
        "strategy": task.strategy,
        "bucket_mb": task.parallel.bucket_size_mb,
        "torch": measured.torch_version,
        "measured_at": time.time(),
        "run": task.run_dir.name,
        "world_size": task.world_size,
        "sync_s": statistics.median(measured.sync_s) if measured.sync_s and task.world_size > 1 else None,
        "wait_s": max(0.0, statistics.median(steady)) if steady else 0.0,
        "save_s": measured.save_s,
        "evaluate_s": measured.evaluate_s,
        "rows": len(measured.row_tokens),
        "row_tokens_mean": statistics.fmean(measured.row_tokens),
        "row_tokens_quantiles": [ordered[round(part * (len(ordered) - 1) / _QUANTILES)] for part in range(_QUANTILES + 1)],
        "loss_part": measured.loss_part,
        "data_sha256": task.run["data"]["train"].get("sha256"),
        "seq_len": train.seq_len,
        "ranks": [
            {
                "local_rank": rank.local_rank, "device_name": rank.device_name, "steps": measured.steps, **asdict(_of_whole(report.speed, rank)),
                "beside_torch_bytes": measured.beside_torch_bytes if rank.device_name == own[0].device_name else None,
                "runs": [_run(task, measured.steps, report, rank)],
            }
            for rank, report in own_reports
            if report is not None
        ],
    }  # fmt: skip


def save_s_of(task: Task) -> float | None:
    """How long a save halted this run on this node, as it wrote down in an earlier attempt; None where it did not."""
    try:
        profile = json.loads(path_of(task).read_text(encoding="utf-8"))
        return float(profile["save_s"]) if profile["run"] == task.run_dir.name else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write(path: Path, speeds: dict[str, Any]) -> None:
    """Replace the file in one piece. What it knows of the wire with other numbers of ranks and other strategies stays, and what other runs
    have measured of each rank. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = _earlier(path)
    own = {key: speeds[key] for key in ("strategy", "compress", "bucket_mb", "world_size", "sync_s", "wait_s")}
    syncs = ([own] if speeds["sync_s"] is not None else []) + [one for one in _earlier_syncs(earlier, speeds) if _key(one) != _key(own)]
    ranks = [rank | {"runs": [*rank["runs"], *_earlier_runs(earlier, speeds, rank)][:_MOST_RUNS]} for rank in speeds["ranks"]]
    files.replace(path, (json.dumps(speeds | {"ranks": ranks, "syncs": syncs[:_MOST_SYNCS]}, indent=2) + "\n").encode())


def _of_whole(speed: Speed, rank: Rank) -> Speed:
    """The cost of a pass of the whole model, from that of the layers that the rank holds."""
    return speed.slower(1 / rank.stage["work"]) if rank.stage else speed


def _run(task: Task, steps: int, report: Report, rank: Rank) -> dict[str, Any]:
    """What this run has measured of a rank; `steps` are those that its meter remembers."""
    counted = min(steps - SETTLING_STEPS, WINDOW_STEPS)
    return {
        "run": task.run_dir.name,
        "strategy": task.strategy,
        "world_size": task.world_size,
        "steps": counted,
        **asdict(_of_whole(report.speed, rank)),
    }


def _earlier(path: Path) -> dict[str, Any]:
    """The file as it is; nothing where it cannot be read."""
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        return earlier if isinstance(earlier, dict) else {}
    except (OSError, ValueError):
        return {}


def _is_same(earlier: dict[str, Any], speeds: dict[str, Any], keys: Sequence[str]) -> bool:
    return all(key in earlier and earlier[key] == speeds.get(key) for key in keys)


def _earlier_syncs(earlier: dict[str, Any], speeds: dict[str, Any]) -> list[dict[str, Any]]:
    """The wire of the same training on the same kind of device."""
    if not _is_same(earlier, speeds, _OF_THE_WIRE):
        return []
    try:
        return [
            one for one in earlier.get("syncs", []) if isinstance(one, dict) and _key(one) and one["sync_s"] >= 0 and one["world_size"] > 1
        ]
    except (TypeError, KeyError):
        return []


def _earlier_runs(earlier: dict[str, Any], speeds: dict[str, Any], rank: dict[str, Any]) -> list[dict[str, Any]]:
    """What other runs have measured of this rank, the newest first: the same training on the same device."""
    if not _is_same(earlier, speeds, _OF_SPEEDS):
        return []
    try:
        ranks = [one for one in earlier["ranks"] if (one["local_rank"], one["device_name"]) == (rank["local_rank"], rank["device_name"])]
        return [run for one in ranks for run in one["runs"] if run["run"] != speeds["run"] and run["steps"] > 0 and run["token_s"] > 0]
    except (TypeError, KeyError):
        return []


def _key(sync: dict[str, Any]) -> tuple[Any, ...]:
    return sync["strategy"], sync["compress"], sync.get("bucket_mb", BUCKET_MB), sync["world_size"]
