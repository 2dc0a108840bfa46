"""One recipe trained by several strategies with ranks that share the card, and how far their losses are from those of another division.

Ranks meet over NCCL, each a host of its own for it (`ranks.group`), as gloo carries neither shards nor what a card holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import material, ranks
from benchmarks.gpu_parts.place import Place

WATCHED = ("-m", "benchmarks.gpu_parts.watched_peer")


@dataclass(frozen=True)
class Division:
    """A way to divide a training. `stages`: the layers of each stage of a pipeline, all of whose ranks compute all rows."""

    name: str
    strategy: str = "ddp"
    shares: tuple[int, ...] = (12,)
    stages: tuple[int, ...] = ()
    per_node: int = 1
    micro_batch: int = 2
    measured: bool = False
    streaming: Mapping[str, Any] | None = None
    recipe: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


def train(place: Place, of: Division, model: Path, data: Path, precision: str, *, limit_s: float, steps: int = 3) -> Path:
    """The run's folder, when all ranks have ended well. Raises RuntimeError with the words of the one that failed first.

    `limit_s`: a training that hangs is ended then.
    """
    every = {
        "train__steps": steps,
        "checkpoint__every_steps": max(1, steps // 2),
        "train__precision": precision,
        "parallel__micro_batch": of.micro_batch,
    }
    run = material.run(place.folder / f"{precision}, {of.name}", model, data, **(every | dict(of.recipe)))
    begin(place, of, run, precision, 1, limit_s=limit_s)
    return run


def begin(place: Place, of: Division, run: Path, precision: str, attempt: int, *, limit_s: float, resume_step: int = 0) -> None:
    """One attempt of a run to its end. Raises as `train`."""
    # In a pipeline the batch is the first stage's, as in a plan.
    size = len(of.stages) or len(of.shares)
    shares = (sum(of.shares), *[0] * (size - 1)) if of.stages else of.shares
    backend = "nccl" if place.is_card and size > 1 else "gloo"
    material.plan(
        run, attempt, shares, device=place.device, precision=precision, backend=backend, micro_batch=of.micro_batch, measured=of.measured,
        strategy="pipeline" if of.stages else of.strategy, stages=of.stages, per_node=of.per_node, resume_step=resume_step,
        streaming=of.streaming,
    )  # fmt: skip
    variables = (ranks.ALLOCATOR_OF_RUNS if place.is_card else {}) | dict(of.environment)
    ranks.checked(ranks.worker(run, attempt, size, variables, WATCHED, of.per_node), limit_s)


def watched(run: Path, rank: int) -> dict[str, Any]:
    """What `watched_peer` has seen of a rank."""
    seen: dict[str, Any] = json.loads((material.folder_of(run, rank) / "watched.json").read_text())
    return seen


def losses(run: Path, attempt: int = 1) -> dict[int, float]:
    """The loss of each step."""
    return {line["step"]: line["loss"] for line in ranks.lines(run, attempt, 0)}


def apart(found: Mapping[int, float], expected: Mapping[int, float]) -> float:
    """The largest difference of a step's loss, relative. A step's loss holds all that the steps before it have made of the weights.

    Raises RuntimeError where `found` has no step, or one that is not expected.
    """
    if not found or not found.keys() <= expected.keys():
        raise RuntimeError(f"steps {sorted(found)} were trained, and {sorted(expected)} were expected")
    return max(abs(loss - expected[step]) / abs(expected[step]) for step, loss in found.items())
