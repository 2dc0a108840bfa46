"""The metrics of a run of very many steps, fewer of them: a page draws a curve of some hundred points, and is not kept waiting for all lines."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from homelab.controller.features.report.downsampling import thinned
from homelab.controller.features.report.run_report import Curve, CurvePoint, RunReport, Series
from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import files

_SHORT_BYTES = 16_000_000  # that many are read whole in less than a second
_STEPS = 1000
_PLACES, _WINDOW = 600, 16_000  # of a first look
_TRAIN, _STEP, _FIRST_RANK = b'"kind": "train"', b'"step": ', b'"rank": 0,'
_LOSS = re.compile(rb'"loss": (-?[\d.]+(?:e[+-]?\d+)?),')  # finite


@dataclass(frozen=True)
class FewLines:
    """Lines of metrics.jsonl: all, or those of every `every`-th step. `losses`: step -> loss, of all steps; empty where `lines` are all. `every` 0: a glimpse."""

    lines: list[dict[str, Any]]
    every: int = 1
    losses: Mapping[int, float] = field(default_factory=dict)


def lines_of(paths: RunPaths, *, short_bytes: int = _SHORT_BYTES) -> FewLines:
    """All lines of a short file. Of a long one the steps are read from the text: only of those that stay an object is made."""
    try:
        is_short = not os.path.isfile(paths.metrics_jsonl) or os.path.getsize(paths.metrics_jsonl) <= short_bytes
        content = b"" if is_short else paths.metrics_jsonl.read_bytes()
    except OSError:
        is_short, content = True, b""
    if is_short:
        return FewLines(store.read_lines(paths.metrics_jsonl))
    lines = content.split(b"\n")
    last = max((step for line in lines[-200:] if (step := _step(line)) is not None), default=0)
    every = max(1, last // _STEPS)
    kept: list[bytes] = []
    losses: dict[int, float] = {}
    for line in lines:
        step = _step(line)
        if step is None or step % every == 0 or step == last:
            kept.append(line)
        if step is not None and _FIRST_RANK in line and (loss := _LOSS.search(line)) is not None:
            losses[step] = float(loss[1])
    return FewLines(files.json_objects([line.decode("utf-8", "replace") for line in kept]), every, losses)


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
    return FewLines(files.json_objects([line.decode("utf-8", "replace") for line in (*found[0], *found[-1])]), 0, losses)


def first_look(report: RunReport, few: FewLines) -> RunReport:
    """A report without any metrics, with the loss of a `glimpse`."""
    points = thinned([CurvePoint(step=step, value=loss) for step, loss in sorted(few.losses.items())])
    curve = Curve(name="Loss", unit="nats per token", series=(Series(label="training", points=points),))
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
    loss = thinned([CurvePoint(step=step, value=loss) for step, loss in sorted(few.losses.items())])
    curves = []
    for curve in report.curves:
        series = tuple(one.model_copy(update={"points": loss}) if one.label == "training" else one for one in curve.series)
        curves.append(curve.model_copy(update={"series": series}) if curve.name == "Loss" else curve)
    unknown = {"tokens": None, "tokens_per_kwh": None}
    return report.model_copy(update={
        "curves": tuple(curves), "step_count": len(few.losses),
        "missing": (*report.missing, f"the run has many steps: the loss is that of all, all else of one step in {few.every}; `homelab report` counts them all"),
        "shares": tuple(row.model_copy(update={"tokens": None}) for row in report.shares),
        "energy": report.energy.model_copy(update={
            "tokens_per_kwh": None, "cards": tuple(card.model_copy(update=unknown) for card in report.energy.cards),
        }),
    })  # fmt: skip
