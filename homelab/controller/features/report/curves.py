"""The curves of a run and their table, from the lines of metrics.jsonl. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from homelab.controller.base.units import gibibytes
from homelab.controller.features.report.downsampling import rows_of, thinned
from homelab.controller.features.report.run_report import Curve, CurvePoint, Series, StepRow
from homelab.controller.planning.types import Plan, RankPlan
from homelab.shared.protocol.rank_messages import Metric

MOST_ROWS = 120
_MOST = 1e300  # of a figure: a scale beyond it has ends that are no floats. `abs(value) <= _MOST` is false of what is not a number, too
_MOST_EVALUATIONS = 40  # of the rows


Device = tuple[str, str]
"""A node, and one of its cards or processes: every plan numbers its ranks anew."""


def device_of(rank: RankPlan) -> Device:
    """What stays the same of a rank from one plan to the next."""
    return rank.node, rank.card or f"{rank.local_rank} {rank.device_name}"


def devices(plans: Mapping[int, Plan], lines: Iterable[Metric]) -> list[Device]:
    """Of each line, through the plan of its attempt; where that cannot be read, by the rank that the line names."""
    of_rank = {(number, rank.rank): device_of(rank) for number, plan in plans.items() for rank in plan.ranks}
    return [of_rank.get((line.attempt, line.rank), (line.node, f"rank {line.rank}")) for line in lines]


def curves(lines: Sequence[Metric], plans: Mapping[int, Plan]) -> tuple[Curve, ...]:
    """The charts that have a value. `plans`: by attempt; the memory is that of each device, under its rank in the newest."""
    steps = by_step(lines)
    evaluations = _evaluations(lines)
    losses = {step: loss for step, ranks in steps.items() if (loss := _loss(ranks)) is not None}
    found = _of_first(steps, lambda line: line.accuracy)
    charts = (
        _curve("Loss", loss_unit(of_pairs=bool(found)), {"training": losses, "held out": evaluations}),
        _curve(
            "Judged rightly",
            "of the pairs or answers",
            {"training": found, "held out": _evaluations(lines, lambda line: line.eval_accuracy)},
        ),
        _curve(
            "Speed",
            "tokens/s, all ranks",
            {"all ranks": {step: speed for step, ranks in steps.items() if (speed := speed_of(ranks)) is not None}},
        ),
        _curve("Memory", "GiB, most so far", _memory(lines, plans)),
        _curve("Learning rate", "per step", {"learning rate": _of_first(steps, lambda line: line.learning_rate)}),
    )
    return tuple(chart for chart in charts if chart.series or chart.note)


def loss_unit(*, of_pairs: bool) -> str:
    """What a loss is measured in. Objectives have units of their own."""
    return "of a row" if of_pairs else "nats per token"


def step_rows(lines: Sequence[Metric]) -> tuple[StepRow, ...]:
    """At most MOST_ROWS steps, evenly; those with an evaluation come first."""
    steps, evaluations = by_step(lines), _evaluations(lines)
    rates = _of_first(steps, lambda line: line.learning_rate)
    chosen = rows_of(sorted({*steps, *evaluations}), MOST_ROWS, list(evaluations)[-_MOST_EVALUATIONS:])
    rows = []
    for step in chosen:
        ranks = steps.get(step, [])
        loss, held_out = _loss(ranks), evaluations.get(step)
        rows.append(
            StepRow(
                step=step, attempt=max((line.attempt for line in ranks), default=0), loss=_finite(loss), eval_loss=_finite(held_out),
                tokens_per_s=speed_of(ranks), memory_bytes=max((line.memory_bytes for line in ranks if line.memory_bytes), default=None),
                learning_rate=rates.get(step),
            )
        )  # fmt: skip
    return tuple(rows)


def by_step(lines: Iterable[Metric]) -> dict[int, list[Metric]]:
    """Step -> the line of each rank, in the order of the steps."""
    steps: dict[int, list[Metric]] = defaultdict(list)
    for line in lines:
        if line.kind == "train":
            steps[line.step].append(line)
    return {step: steps[step] for step in sorted(steps)}


def speed_of(ranks: Sequence[Metric]) -> float | None:
    """Tokens per second of all ranks together; None where a rank does not tell."""
    speeds = [line.tokens_per_s for line in ranks]
    return sum(speed or 0.0 for speed in speeds) if speeds and None not in speeds else None


def _loss(ranks: Sequence[Metric]) -> float | None:
    """All ranks write the same global loss."""
    return next((line.loss for line in ranks if line.loss is not None), None)


def _evaluations(lines: Iterable[Metric], read: Callable[[Metric], float | None] = lambda line: line.eval_loss) -> dict[int, float]:
    by_step = {line.step: value for line in lines if line.kind == "eval" and (value := read(line)) is not None}
    return {step: by_step[step] for step in sorted(by_step)}


def _of_first(steps: Mapping[int, Sequence[Metric]], read: Callable[[Metric], float | None]) -> dict[int, float]:
    values = {step: next((value for line in ranks if (value := read(line)) is not None), None) for step, ranks in steps.items()}
    return {step: value for step, value in values.items() if value is not None}


def _memory(lines: Sequence[Metric], plans: Mapping[int, Plan]) -> dict[str, dict[int, float]]:
    """Name of a device -> its memory by step, in GiB; those of the newest plan in the order of their ranks."""
    held: dict[Device, dict[int, float]] = defaultdict(dict)
    last: dict[Device, int] = {}
    for device, line in zip(devices(plans, lines), lines, strict=True):
        if line.kind == "train" and line.memory_bytes is not None:
            held[device][line.step] = gibibytes(line.memory_bytes)
            last[device] = line.rank
    newest = {device_of(rank): rank.rank for rank in plans[max(plans)].ranks} if plans else {}
    named: dict[str, dict[int, float]] = {}
    for device in sorted(held, key=lambda device: (device not in newest, newest.get(device, last[device]))):
        name = f"rank {newest.get(device, last[device])}" + (f" on {device[0]}" if device[0] else "")
        named.setdefault(name if device in newest or not plans else f"{name}, earlier", {}).update(held[device])
    return named


def _curve(name: str, unit: str, values: Mapping[str, Mapping[int, float]]) -> Curve:
    """What is not a number is in no picture; the note says how often, and from which step."""
    series, broken = [], []
    for label, value_of in values.items():
        points = [CurvePoint(step=step, value=value) for step, value in sorted(value_of.items()) if abs(value) <= _MOST]
        broken += [step for step, value in value_of.items() if not abs(value) <= _MOST]
        if points:
            series.append(Series(label=label, points=thinned(points)))
    note = f"not a number in {len(broken)} steps, first in step {min(broken)}: the training diverged" if broken else ""
    return Curve(name=name, unit=unit, series=tuple(series), note=note)


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) <= _MOST else None
