"""A run that learns from pairs of answers: its losses have another unit, and how often it finds the better answer is a curve."""

from __future__ import annotations

from homelab.controller.features.report import curves
from homelab.shared.protocol.rank_messages import Metric


def lines(accuracy: float | None) -> list[Metric]:
    trained = [Metric(kind="train", step=step, rank=0, loss=0.7 / step, accuracy=accuracy) for step in (1, 2)]
    return [*trained, Metric(kind="eval", step=2, eval_loss=0.4, eval_accuracy=None if accuracy is None else 0.9)]


def test_the_unit_and_the_curve() -> None:
    charts = {chart.name: chart for chart in curves.curves(lines(0.75), {})}
    assert charts["Loss"].unit == "of a row" and "Judged rightly" in charts
    assert {series.label: [point.value for point in series.points] for series in charts["Judged rightly"].series} == {
        "training": [0.75, 0.75],
        "held out": [0.9],
    }
    charts = {chart.name: chart for chart in curves.curves(lines(None), {})}
    assert charts["Loss"].unit == "nats per token" and "Judged rightly" not in charts
