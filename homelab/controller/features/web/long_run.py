"""The metrics of a run of very many steps, fewer of them: a page draws a curve of some hundred points, and is not kept waiting for all lines."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from homelab.controller.dashboard.snapshot import LossPoint
from homelab.controller.dashboard.step_curve import StepCurve
from homelab.controller.features.report.curves import loss_unit
from homelab.controller.features.report.downsampling import thinned
from homelab.controller.features.report.run_report import Curve, CurvePoint, RunReport, Series
from homelab.controller.run.followed_file import FollowedFile
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import files

_SHORT_BYTES = 16_000_000  # that many are read whole in less than a second
_STEPS = 1000
_PLACES, _WINDOW = 600, 16_000  # of a first look
_TRAIN, _STEP, _FIRST_RANK = b'"kind": "train"', b'"step": ', b'"rank": 0,'
_LOSS = re.compile(rb'"loss": (-?[\d.]+(?:e[+-]?\d+)?),')  # finite


@dataclass(frozen=True)
class FewLines:
    """Lines of metrics.jsonl: all, or those of every `every`-th step. `every` 0: a glimpse.

    `losses` draw the loss of all steps, `step_count` is how many these are; both are empty where `lines` are all.
    """

    lines: list[dict[str, Any]]
    every: int = 1
    losses: tuple[LossPoint, ...] = ()
    step_count: int = 0


class LineSample:
    """The metrics of one run, read on as they grow. Of a short file all lines are kept, of a long one those of a step in 2, 4, 8 ...

    The steps are read from the text: only of lines that stay an object is made.
    """

    def __init__(self, paths: RunPaths, *, short_bytes: int = _SHORT_BYTES) -> None:
        self._short_bytes = short_bytes
        self._file = FollowedFile(paths.metrics_jsonl)
        self._restart()

    def _restart(self) -> None:
        self._size, self._every, self._last = 0, 1, 0
        self._kept: list[tuple[int | None, bytes]] = []
        self._newest: list[bytes] = []  # of the last step
        self._losses = StepCurve()

    @property
    def bytes_read(self) -> int:
        """Of the file, by all reads together."""
        return self._file.bytes_read

    def read(self) -> FewLines:
        """What is there now."""
        for text in self._file.new_lines(self._restart):
            self._take(text)
        if self._size <= self._short_bytes:
            return FewLines(_objects(line for _, line in self._kept))
        self._thin()
        newest = self._newest if self._last % self._every else []
        return FewLines(_objects([*(line for _, line in self._kept), *newest]), self._every, self._losses.points, self._losses.count)

    def _thin(self) -> None:
        """At once, so that never more lines are held than needed."""
        if self._last // self._every > _STEPS:
            while self._last // self._every > _STEPS:
                self._every *= 2
            self._kept = [(step, line) for step, line in self._kept if step is None or step % self._every == 0]

    def _take(self, text: bytes) -> None:
        self._size += len(text) + 1
        step = _step(text)
        if step is None or step % self._every == 0:
            self._kept.append((step, text))
        if step is None:
            return
        if step != self._last:
            self._last, self._newest = step, []
        self._newest.append(text)
        if self._size > self._short_bytes:
            self._thin()
        if _FIRST_RANK in text and (loss := _LOSS.search(text)) is not None:
            self._losses.put(step, float(loss[1]), 0, 0.0)


def glimpse(paths: RunPaths, *, short_bytes: int = _SHORT_BYTES) -> FewLines | None:
    """Of a long file, at once: lines of its beginning and its end, and losses from places in between; None of a short one."""
    try:
        size = os.path.getsize(paths.metrics_jsonl) if os.path.isfile(paths.metrics_jsonl) else 0
        if size <= short_bytes:
            return None
        with open(paths.metrics_jsonl, "rb") as stream:
            pieces = []
            for number in range(_PLACES + 1):
                start = stream.seek(max(0, number * (size - _WINDOW) // _PLACES))
                pieces.append(stream.read(_WINDOW).split(b"\n")[1 if start else 0 : -1])  # the lines that are whole
    except OSError:
        return None
    found = [[line for line in piece if _step(line) is not None] for piece in pieces]
    losses = {
        step: float(loss[1]) for lines in found for line in lines if (step := _step(line)) is not None and (loss := _LOSS.search(line))
    }
    return FewLines(_objects([*found[0], *found[-1]]), 0, tuple(LossPoint(step=step, loss=loss) for step, loss in sorted(losses.items())))


def _objects(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    return files.json_objects(line.decode("utf-8", "replace") for line in lines)


def _drawn(losses: Iterable[LossPoint]) -> tuple[CurvePoint, ...]:
    return thinned([CurvePoint(step=point.step, value=point.loss) for point in losses])


def first_look(report: RunReport, few: FewLines) -> RunReport:
    """A report without any metrics, with the loss of a `glimpse`."""
    points = _drawn(few.losses)
    unit = loss_unit(of_pairs=any("accuracy" in line for line in few.lines))
    curve = Curve(name="Loss", unit=unit, series=(Series(label="training", points=points),))
    return report.model_copy(
        update={
            "curves": (curve,) if points else (),
            "missing": ("the metrics of this long run are still being read",),
            "shares": (),
            "compared": (),
        }
    )


def _step(line: bytes) -> int | None:
    """Of a line of training as `json.dumps` writes it; None of any other. The key is looked for from the end, where it stands."""
    at = line.rfind(_STEP)
    if at < 0 or _TRAIN not in line:
        return None
    try:
        return int(line[at + len(_STEP) : line.find(b",", at)])
    except ValueError:
        return None


def whole(report: RunReport, few: FewLines) -> RunReport:
    """The report of these lines with the loss of all steps, and without the sums that only all lines would give."""
    if few.every == 1:
        return report
    loss = _drawn(few.losses)
    curves = []
    for curve in report.curves:
        series = tuple(one.model_copy(update={"points": loss}) if one.label == "training" else one for one in curve.series)
        curves.append(curve.model_copy(update={"series": series}) if curve.name == "Loss" else curve)
    unknown = {"tokens": None, "tokens_per_kwh": None}
    return report.model_copy(update={
        "curves": tuple(curves), "step_count": few.step_count,
        "missing": (*report.missing, f"the run has many steps: the loss is that of all, all else of one step in {few.every}; `homelab report` counts them all"),
        "shares": tuple(row.model_copy(update={"tokens": None}) for row in report.shares),
        "energy": report.energy.model_copy(update={
            "tokens_per_kwh": None, "cards": tuple(card.model_copy(update=unknown) for card in report.energy.cards),
        }),
    })  # fmt: skip
