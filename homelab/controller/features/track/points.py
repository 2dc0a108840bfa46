"""The points of a run's curves: of every step one, however often recoveries computed it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

Kind = Literal["train", "eval"]
Key = tuple[Kind, int]
# Tag of a curve -> the key of a line in metrics.jsonl. Rank 0 speaks: the first four are the same on every rank, "rank0/" is its own share.
_TAGS: Mapping[Kind, Mapping[str, str]] = {
    "train": {
        "train/loss": "loss", "train/perplexity": "perplexity", "train/learning_rate": "learning_rate", "train/grad_norm": "grad_norm", 
        "train/margin": "margin", "train/accuracy": "accuracy", "train/kl": "kl",
        "train/epoch": "epoch", "train/step_s": "step_s", "rank0/tokens_per_s": "tokens_per_s", "rank0/communication_s": "communication_s",
        "rank0/memory_bytes": "memory_bytes",
    },
    "eval": {
        "eval/loss": "eval_loss", "eval/perplexity": "eval_perplexity", "eval/margin": "eval_margin", "eval/accuracy": "eval_accuracy", "eval/kl": "eval_kl",
    },
}  # fmt: skip


@dataclass(frozen=True)
class TrackedPoint:
    """The figures of one optimizer step, or of one evaluation after it. `time` in seconds since 1970; `attempt` computed it last."""

    kind: Kind
    step: int
    attempt: int
    time: float
    values: Mapping[str, float] = field(compare=False)

    @property
    def key(self) -> Key:
        """What is there once."""
        return (self.kind, self.step)


class PointsTaker:
    """Takes lines of metrics.jsonl one by one (`homelab.controller.run.metrics`), and keeps their points.

    Of a step that two attempts computed, the newest counts. A figure that is unknown or not finite is left out.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget all."""
        self._newest: dict[Key, TrackedPoint] = {}
        self.saves: list[Mapping[str, Any]] = []
        """The lines that say that a checkpoint was written."""

    def take(self, line: Mapping[str, Any], _: object = None) -> None:
        """One line more."""
        kind = line.get("kind")
        if kind == "save":
            self.saves.append(line)
        if kind not in get_args(Kind) or line.get("rank", 0) != 0 or not isinstance(line.get("step"), int):
            return
        kind = cast("Kind", kind)
        figures = {tag: line.get(name) for tag, name in _TAGS[kind].items()}
        values = {tag: float(value) for tag, value in figures.items() if isinstance(value, int | float) and math.isfinite(value)}
        point = TrackedPoint(kind, line["step"], line.get("attempt") or 0, float(line.get("time") or 0.0), values)
        if point.key not in self._newest or point.attempt >= self._newest[point.key].attempt:
            self._newest[point.key] = point

    @property
    def points(self) -> list[TrackedPoint]:
        """By step, a step before the evaluation after it."""
        return sorted(self._newest.values(), key=lambda point: (point.step, point.kind != "train"))


def points_of(lines: Iterable[Mapping[str, Any]]) -> list[TrackedPoint]:
    """The points of all these lines."""
    taker = PointsTaker()
    for line in lines:
        taker.take(line)
    return taker.points


def first_changed(points: Sequence[TrackedPoint], sent: Mapping[Key, int]) -> int | None:
    """The first step from which what was sent is not what is there now; None where the new points only follow. `sent`: key -> attempt.

    A recovery computes steps again, and drops those that it has not reached yet.
    """
    attempts = {point.key: point.attempt for point in points}
    last = {kind: max((step for of_kind, step in sent if of_kind == kind), default=-1) for kind in get_args(Kind)}
    changed = [step for (kind, step), attempt in sent.items() if attempts.get((kind, step)) != attempt]
    late = [point.step for point in points if point.key not in sent and point.step < last[point.kind]]
    return min([*changed, *late], default=None)
