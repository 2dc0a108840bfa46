"""Whether a window that was computed again agrees with the record: by the losses of its steps, and by the weights at its end. Pure.

The weights are compared as one vector, and their distance counts beside the way that they went in the window: a rate of 1 % more is 1 % of the way,
however small the rate is. A loss counts relative to itself.

In bf16 the same passes on processors of one kind come out again nearly to the bit; other passes, other processors or another torch round so differently that
a small forgery would not show. What lies between is "unclear", and never held against the author.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from homelab.controller.base.models import Value, WireModel
from homelab.controller.base.sanitize import plain
from homelab.controller.base.units import listed
from homelab.controller.features.verify.step_record import RecordStart, StepRecord, Window
from homelab.controller.planning.advice.reproducibility import LawLimit

Verdict = Literal["agrees", "unclear", "differs", "not computed"]
_Distance = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_NAMED = ("torch", "transformers", "peft", "bitsandbytes")


class Bounds(Value):
    """Of a loss, relative to it, and of the weights, relative to their way. Up to `loss` and `weights` a window agrees. Beyond them it differs where the same
    passes were computed on the same kind of processor; else it differs beyond `loss_at_all` and `weights_at_all`.
    """

    loss: float
    weights: float
    loss_at_all: float
    weights_at_all: float


# Measured on CPUs (homelab/docs/evidence.md, "Parts of a run computed again"). Weights: the largest honest distance is 2e-6 in fp32; in bf16 3e-7 with the passes
# of the record and 9e-2 with others; a rate of 1 % more is 8e-3 or farther. Honest losses: 2e-7; 0, and 5e-3. fp16 was not measured; it has more digits than bf16.
_FP32 = Bounds(loss=1e-5, weights=1e-4, loss_at_all=1e-5, weights_at_all=1e-4)
_BF16 = Bounds(loss=2e-4, weights=5e-3, loss_at_all=2e-2, weights_at_all=3e-1)
BOUNDS = {"fp32": _FP32, "bf16": _BF16, "fp16": _BF16}
WORDS = {"fp32": "fp32 rounding", "bf16": "bf16", "fp16": "fp16"}


class Apart(WireModel):
    """What the window says of its weights: their distance from the kept ones, the way of those from the start of the window, and the largest difference
    of a single weight."""

    node: Annotated[str, Field(max_length=200)]
    apart: _Distance
    way: _Distance
    most: _Distance

    @property
    def part(self) -> float:
        """The distance as a part of the way; where there was no way, any distance is all of it."""
        return self.apart / self.way if self.way else float(self.apart > 0)


class WindowCompared(WireModel):
    """compared.json of a window."""

    weights: Apart | None = None
    devices: Annotated[tuple[Annotated[str, Field(max_length=200)], ...], Field(max_length=1000)] = ()
    versions: Annotated[dict[str, Annotated[str, Field(max_length=100)]], Field(max_length=50)] = {}


class WindowMachines(Value):
    """What computed the window. `run`: its name."""

    run: str
    nodes: tuple[str, ...]
    strategy: str
    precision: str


class WindowResult(Value):
    """One window. Distances are None where nothing was compared; `because` says what does not agree, or why nothing was computed."""

    window: Window
    verdict: Verdict
    because: str = ""
    run: str = ""
    nodes: tuple[str, ...] = ()
    strategy: str = ""
    loss_apart: float | None = None
    loss_bound: float | None = None
    weights_apart: float | None = None
    weights_bound: float | None = None
    weights_most: float | None = None
    same_passes: bool | None = None
    notes: tuple[str, ...] = ()


def judged(
    record: StepRecord, window: Window, again: StepRecord, compared: WindowCompared, machines: WindowMachines, limit: LawLimit | None = None
) -> WindowResult:
    """`again`: the record of the window's own run; `limit`: of its recipe. The first step that differs is named, and the weights where all steps agree."""
    bounds = BOUNDS.get(machines.precision, _BF16)
    steps = range(window.begin + 1, window.end + 1)
    missing = next((step for step in steps if step not in record.steps), None)
    undone = next((step for step in steps if step not in again.steps), None)
    because = (
        f"the record has no step {missing}" if missing is not None else f"step {undone} was not computed" if undone is not None else ""
    ) or _other_inputs(record, window, again)
    losses = {
        step: _relative(again.steps[step].loss, record.steps[step].loss) for step in steps if step in again.steps and step in record.steps
    }
    rates = {step: _relative(again.steps[step].learning_rate, record.steps[step].learning_rate) for step in losses}
    other = other_versions(record.start, compared.versions)
    same_passes = all(again.steps[step].passes == record.steps[step].passes for step in losses)
    attempts = {record.steps[step].attempt for step in losses}
    is_repeated = (
        same_passes
        and not other
        and len(attempts) == 1
        and len(compared.devices) == 1
        and compared.devices == record.devices.get(window.end)
    )
    most_loss, most_part = (bounds.loss, bounds.weights) if is_repeated else (bounds.loss_at_all, bounds.weights_at_all)
    if limit and not (is_repeated and limit.is_repeatable):
        most_loss = most_part = math.inf
    else:
        limit = None
    for step in losses:
        if because:
            break
        if again.steps[step].batch != record.steps[step].batch:
            because = f"step {step} does not: the recipe gives it other rows"
        elif rates[step] > _SAME_RATE:
            because = f"step {step} does not: the recipe gives it another learning rate"
        elif losses[step] > most_loss:
            because = f"step {step} does not: its loss is {losses[step]:.1g} apart, {most_loss:.0e} may be rounding"
    apart = compared.weights
    is_uncompared = not because and apart is None
    if is_uncompared:
        because = f"the weights after step {window.end} were not compared: no node of this window has that checkpoint"
    elif not because and apart is not None and apart.part > most_part:
        because = (
            f"the weights after step {window.end} do not: they are {apart.part:.1g} of their way apart, {most_part:.0e} may be rounding"
        )
    verdict: Verdict = "not computed" if is_uncompared else "differs" if because else "agrees"
    if not because and (max(losses.values(), default=0.0) > bounds.loss or (apart is not None and apart.part > bounds.weights)):
        verdict = "unclear"
        reason = limit.text if limit else f"other passes or processors than the record's may round so in {machines.precision}"
        because = f"{reason}, and a {'' if limit else 'small '}change may hide there"
    return WindowResult(
        window=window, verdict=verdict, because=because, run=machines.run, nodes=machines.nodes, strategy=machines.strategy,
        loss_apart=max(losses.values(), default=None), loss_bound=bounds.loss, weights_apart=apart.part if apart else None, weights_bound=bounds.weights,
        weights_most=apart.most if apart else None, same_passes=same_passes, notes=tuple(other),
    )  # fmt: skip


_SAME_RATE = 1e-9  # both are computed by the same formula from the same numbers


def _other_inputs(record: StepRecord, window: Window, again: StepRecord) -> str:
    """A window from the beginning has a first line of its own: what it says of recipe and rows must be the same. A later one goes on with the record's."""
    before, now = record.start, again.start
    if window.begin or before is None or now is None:
        return ""
    if before.recipe_hash != now.recipe_hash:
        return "the recipe is another one than the record names"
    if before.rows != now.rows:
        return "the rows are other ones than the record names: the data, the tokenizer or its chat template has changed"
    if before.model and now.model and before.model != now.model:
        return "the base model is another one than the record names"
    return ""


def other_versions(start: RecordStart | None, now: Mapping[str, str]) -> list[str]:
    """A note for each package that another release computes with now."""
    before = start.versions if start is not None else {}
    return [
        f"{name} is {plain(now[name])} now, and was {plain(before[name])}: compared all the same"
        for name in _NAMED if before.get(name) and now.get(name) and before[name] != now[name]
    ]  # fmt: skip


def answer(run: str, faults: Sequence[str], results: Sequence[WindowResult], precision: str) -> str:
    """The first line: what is known now. It says what agrees, and never that a training is proven."""
    if faults:
        return f"{run}: {faults[0]}"
    bad = [result for result in results if result.verdict == "differs"]
    if bad:
        return f"{run} does not agree: {bad[0].because}"
    unclear = [result for result in results if result.verdict == "unclear"]
    if unclear:
        return f"{run}: steps {listed(str(result.window) for result in unclear)} are unclear: {unclear[0].because}"
    done = [result for result in results if result.verdict == "agrees"]
    missing = [str(result.window) for result in results if result.verdict == "not computed"]
    if missing:
        return f"{run}: steps {listed(missing)} were not computed again: {next(result.because for result in results if result.verdict == 'not computed')}"
    if not done:
        return f"{run}: the record is whole; nothing of it was computed again"
    return f"{run} agrees within {WORDS.get(precision, precision)}: steps {listed(str(result.window) for result in done)}"


def _relative(now: float | None, before: float | None) -> float:
    if now is None or before is None:
        return 0.0 if now == before else 1.0
    return abs(now - before) / max(abs(before), 1e-12) if now != before else 0.0
