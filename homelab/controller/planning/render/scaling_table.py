"""A scaling curve for people: a table with a bar for each number of machines, and where it turns."""

from __future__ import annotations

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from homelab.controller.planning.alternatives.scaling import ScalingCurve, ScalingPoint
from homelab.controller.planning.render.time_table import duration, rate

_LONGEST_BAR = 20  # cells, where the terminal has them


def table(curve: ScalingCurve) -> RenderableType:
    """One line for each number of machines. A column stands only where it says something."""
    strategies = list(dict.fromkeys(point.strategy for point in curve.points if point.strategy))
    has_hours = any(point.hours is not None for point in curve.points)
    best = max((point.tokens_per_s or 0.0 for point in curve.points), default=0.0) or 1.0
    drawn = Table(box=None, pad_edge=False)
    drawn.add_column("n", justify="right", no_wrap=True)
    drawn.add_column("the last is", no_wrap=True)
    if len(strategies) > 1:
        drawn.add_column("strategy", no_wrap=True)
    for heading in ("step", "wire", "tokens/s"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    drawn.add_column("", max_width=_LONGEST_BAR)
    for heading in ("adds", "of the\nsum", *(["to the\nend"] if has_hours else [])):
        drawn.add_column(heading, justify="right", no_wrap=True)
    drawn.add_column("", no_wrap=True)
    for point in curve.points:
        row: list[RenderableType] = [str(point.machines), f"copy of {curve.like}" if point.copies else point.nodes[-1]]
        row += [point.strategy or ""] if len(strategies) > 1 else []
        drawn.add_row(*row, *_figures(point, best, has_hours=has_hours), style="bold" if point.machines == curve.turn else "")
    lines = [f"- {point.machines}: {point.error}" for point in curve.points if point.error]
    lines += [f"{curve.because[:1].upper()}{curve.because[1:]}."]
    lines += [f"The strategy is {strategies[0]} everywhere."] if len(strategies) == 1 else []
    lines += [f"Further machines are copies of {curve.like} ({curve.like_because})."] if any(point.copies for point in curve.points) else []
    meaning = (
        "wire: the network's part of a step; adds: tokens/s for each further machine; of the sum: tokens/s as a part of what all do alone. measured: on these machines; "
        "scaled: from what was measured on others or with another number of ranks; guess: by data sheets, an assumed network or assumed lengths of rows"
    )
    return Group(drawn, *map(Text, lines), *(Text(f"! {note}", style="yellow") for note in curve.notes), Text(meaning, style="dim"))


def _figures(point: ScalingPoint, best: float, *, has_hours: bool) -> list[RenderableType]:
    if point.tokens_per_s is None or point.step_s is None or point.efficiency is None:
        return [*[""] * (7 if has_hours else 6), "no plan" if point.error else "not known"]
    hours = ["" if point.hours is None else duration(point.hours * 3600)] if has_hours else []
    return [
        duration(point.step_s), f"{(point.wire_s or 0) / point.step_s:.0%}", rate(point.tokens_per_s).split()[0], Bar(best, 0, point.tokens_per_s),
        "" if point.gain is None else f"{point.gain:+.0%}", f"{point.efficiency:.0%}", *hours, f"{point.basis}{', no room' if point.fits is False else ''}",
    ]  # fmt: skip
