"""Runs side by side: how fast each was, whether they are one training, and which has learned most. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from homelab.controller.base.models import Value
from homelab.controller.base.units import gibibytes
from homelab.controller.config.cluster import EnergyPrice
from homelab.controller.features.bench.measurement import Measurement, measure
from homelab.controller.features.report.report_builder import Sources, counted, energy_of
from homelab.controller.planning.types import Plan

_HEADINGS = (
    "run",
    "nodes",
    "strategy",
    "tokens/s",
    "speed-up",
    "efficiency",
    "step",
    "wire",
    "memory",
    "loss",
    "held-out loss",
    "per 1M tokens",
)
_MOST_SHOWN, _GAP = 4, 2
# What decides which rows are held out, and what a loss on them means: the seed draws them, a longer row is cut, and each objective has a loss of its own.
_OF_HELD_OUT_ROWS = ("model.", "data.", "objective.", "train.seed", "train.seq_len")
# The order of a sum over ranks changes its last digits, and a training makes more of them (measured: 2e-6 in fp32 after 30 steps, 3e-3 in bf16 after 10).
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2, "fp16": 2e-2}


class Side(Value):
    """One run. `losses`: step -> loss over the global batch. `held_out`: step -> loss on the rows that are never trained on.

    `measured`: of its last attempt after the warm-up; None where steps are missing.
    `alone_tokens_per_s`: the sum of what its ranks do alone, where that was measured. `kwh_per_million_tokens`: of the ranks' cards, None where
    one does not tell, or not always.
    """

    run: str
    state: str
    recipe_hash: str
    settings: dict[str, str]
    strategy: str
    nodes: tuple[str, ...]
    precision: str
    measured: Measurement | None
    alone_tokens_per_s: float | None
    kwh_per_million_tokens: float | None
    losses: dict[int, float]
    held_out: dict[int, float] = {}

    @property
    def best_step(self) -> int | None:
        """The step with the lowest held-out loss; None where nothing is held out."""
        return min(self.held_out, key=lambda step: (self.held_out[step], step), default=None)


class RunComparison(Value):
    """A run beside the first one. `speed_up`: tokens/s over the first one's; `efficiency`: over the sum of what its ranks do alone.

    `differs`: settings that decide the training and are others, with both values. `curve_difference`: largest relative difference of the losses
    over the steps that both have, None without such a step; `is_same`: whether that is rounding.
    """

    side: Side
    speed_up: float | None
    efficiency: float | None
    differs: tuple[str, ...]
    common_steps: int
    curve_difference: float | None
    is_same: bool | None


def side_of(sources: Sources, warmup: int) -> Side:
    """What is known of a run."""
    lines = counted(sources.metrics, {number: plan.resume_step for number, plan in sources.plans.items()})
    plan = sources.plans[max(sources.plans)] if sources.plans else None
    trained = [line for line in lines if line.kind == "train"]
    tokens = sum(line.tokens or 0 for line in trained)
    used = energy_of(sources, lines)
    return Side(
        run=sources.run, state=sources.state, recipe_hash=sources.about.recipe_hash, settings=_settings(sources), strategy=plan.strategy if plan else "",
        nodes=tuple(node.name for node in plan.nodes) if plan else (), precision=plan.precision if plan else "",
        measured=measure([line for line in lines if line.attempt == plan.attempt], plan.world_size, plan.resume_step + warmup) if plan else None, alone_tokens_per_s=_alone(plan),
        kwh_per_million_tokens=used.kwh / (tokens / 1e6) if used.kwh is not None and used.is_complete and tokens else None,
        losses={line.step: line.loss for line in trained if line.rank == 0 and line.step is not None and line.loss is not None},
        # One that diverges has others than numbers, which are neither the lowest nor comparable.
        held_out={
            line.step: line.eval_loss for line in lines if line.kind == "eval" and line.eval_loss is not None and math.isfinite(line.eval_loss)
        },
    )  # fmt: skip


def compare(sides: Sequence[Side]) -> list[RunComparison]:
    """Every run beside the first."""
    return [_beside(side, sides[0]) for side in sides]


def _beside(side: Side, first: Side) -> RunComparison:
    speed, reference = (one.measured.tokens_per_s if one.measured else None for one in (side, first))
    steps = sorted(side.losses.keys() & first.losses.keys())
    difference = max((abs(side.losses[step] - first.losses[step]) / max(abs(first.losses[step]), 1e-12) for step in steps), default=None)
    differs = tuple(
        f"{key}: {first.settings.get(key, 'not set')} there, {side.settings.get(key, 'not set')} here"
        for key in sorted(side.settings.keys() | first.settings.keys())
        if side.settings.get(key) != first.settings.get(key)
    )
    if not differs and side.recipe_hash != first.recipe_hash:
        differs = ("the content of its data",)
    limit = max(TOLERANCE.get(one.precision, max(TOLERANCE.values())) for one in (side, first))
    return RunComparison(
        side=side, speed_up=speed / reference if speed and reference else None,
        efficiency=speed / side.alone_tokens_per_s if speed and side.alone_tokens_per_s else None, differs=differs, common_steps=len(steps),
        curve_difference=difference, is_same=None if difference is None or differs else difference <= limit,
    )  # fmt: skip


def _alone(plan: Plan | None) -> float | None:
    if plan is None or plan.time is None or not plan.time.is_measured:
        return None
    return sum(rank.alone_tokens_per_s for rank in plan.time.ranks)


def _settings(sources: Sources) -> dict[str, str]:
    """What decides the training, as `section.key` -> words, and what its data files hold."""
    if sources.recipe is None:
        return {}
    content = {f"data.{role} (content)": entry.sha256[:12] for role, entry in (sources.about.data or {}).items() if entry and entry.sha256}
    return {
        **dict(_flat(sources.recipe.model_dump(mode="json", include={"model", "data", "objective", "method", "train", "script"}))),
        **content,
    }


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        elif value is not None:
            yield f"{before}{key}", str(value)


def tables(compared: Sequence[RunComparison], price: EnergyPrice, width: int) -> Iterator[Table]:
    """A column for each run, as many side by side as have room in `width` characters; figures that no run has are left out."""
    rows = [_row(one, price) for one in compared]
    known = [number for number in range(1, len(_HEADINGS)) if any(row[number] for row in rows)]
    labels = max(len(heading) for heading in _HEADINGS)
    widest = max(len(cell) for row in rows for cell in row)
    beside = max(1, (width - labels) // (widest + _GAP))
    for start in range(0, len(rows), beside):
        shown = rows[start : start + beside]
        drawn = Table(box=None, pad_edge=False)
        drawn.add_column("")
        for row in shown:
            drawn.add_column(row[0], justify="right", overflow="fold")
        for number in known:
            drawn.add_row(_HEADINGS[number], *(row[number] for row in shown))
        yield drawn


def sentences(compared: Sequence[RunComparison]) -> list[str]:
    """Which run has learned most, where several were judged by the same rows; then what each run is to the first one."""
    return [*_best([one.side for one in compared]), *(_sentence(one, compared[0].side.run) for one in compared[1:])]


def _best(sides: Sequence[Side]) -> Iterator[str]:
    """The lowest held-out loss. The same rows of the same model: else their losses say nothing about each other."""
    judged = sorted((side.held_out[step], side.run, side) for side in sides if (step := side.best_step) is not None)
    if len(judged) < 2:
        return
    rows = [{key: value for key, value in side.settings.items() if key.startswith(_OF_HELD_OUT_ROWS)} for _, _, side in judged]
    if any(one != rows[0] for one in rows):
        yield "Their held-out losses cannot be compared, because the model, the objective or the held-out rows are others"
        return
    (loss, run, side), (next_loss, next_run, _) = judged[:2]
    own = [key for key in sorted(side.settings) if any(side.settings.get(key) != other.settings.get(key) for _, _, other in judged)]
    settings = f" with {', '.join(f'{key} = {side.settings[key]}' for key in own[:_MOST_SHOWN])}" if own else ""
    yield f"{run} has learned most{settings}: its held-out loss is {loss:.4f} in step {side.best_step}; {next_run} follows with {next_loss:.4f}, {next_loss / loss - 1:+.1%}"


def _row(one: RunComparison, price: EnergyPrice) -> tuple[str, ...]:
    measured = one.side.measured
    last = one.side.losses[max(one.side.losses)] if one.side.losses else None
    figures = ("", "", "", "", "", "") if measured is None else (
        f"{measured.tokens_per_s:.0f}", "" if one.speed_up is None else f"{one.speed_up:.2f}x", "" if one.efficiency is None else f"{one.efficiency:.0%}",
        f"{measured.step_s:.3g} s", f"{measured.wire:.0%}", f"{gibibytes(max(measured.memory_bytes.values(), default=0)):.2f} GiB",
    )  # fmt: skip
    held_out = "" if one.side.best_step is None else f"{one.side.held_out[one.side.best_step]:.4f}"
    return (
        one.side.run,
        ", ".join(one.side.nodes),
        one.side.strategy,
        *figures,
        "" if last is None else f"{last:.4f}",
        held_out,
        _cost(one, price),
    )


def _cost(one: RunComparison, price: EnergyPrice) -> str:
    used = one.side.kwh_per_million_tokens
    if used is None:
        return ""
    return f"{used:.3g} kWh" + ("" if (cost := price.cost(used)) is None else f", {cost:.3g} {price.currency}".rstrip())


def _sentence(one: RunComparison, first: str) -> str:
    if one.differs:
        more = f" and {len(one.differs) - _MOST_SHOWN} more" if len(one.differs) > _MOST_SHOWN else ""
        return f"{one.side.run} is a different training from {first}: {'; '.join(one.differs[:_MOST_SHOWN])}{more}"
    if one.curve_difference is None:
        return f"{one.side.run} and {first} have no step in common yet"
    words = f"over {one.common_steps} common steps their losses differ by at most {one.curve_difference:.2g} of the loss"
    if one.is_same:
        return f"{one.side.run} is the same training as {first}: {words}, which is rounding"
    return f"{one.side.run} HAS A DIFFERENT CURVE from {first}: {words}, although the recipe is the same; that is more than rounding"
