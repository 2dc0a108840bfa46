"""The four pictures of a benchmark: tokens/s, time of a step, efficiency and memory over the number of nodes, a line for each strategy. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from homelab.controller.base.units import gibibytes
from homelab.controller.features.bench.cell import ALONE
from homelab.controller.features.bench.result import Summary
from homelab.controller.features.report import line_chart
from homelab.controller.features.report.page_style import STYLE
from homelab.controller.features.report.run_report import Curve, CurvePoint, Series

_OVER = "number of nodes"


def curves(cells: Sequence[Summary]) -> tuple[Curve, ...]:
    """Where there are several sets of as many nodes, the fastest counts; a node alone belongs to every strategy."""
    return (
        _curve("Speed", "tokens/s", cells, lambda cell: cell.tokens_per_s),
        _curve("Time of a step", "s", cells, lambda cell: cell.step_s),
        _curve(
            "Efficiency", "% of the nodes' speeds alone", cells, lambda cell: None if cell.efficiency is None else 100 * cell.efficiency
        ),
        _curve(
            "Memory",
            "GiB, the rank that held most",
            cells,
            lambda cell: None if cell.memory_bytes is None else gibibytes(cell.memory_bytes),
        ),
    )


def standalone(curve: Curve) -> str:
    """A chart as an SVG file of its own, on white, with its name and its legend inside."""
    figure = line_chart.chart(curve, 0)
    inner = re.search(r"<svg viewBox=[^>]*data-chart[^>]*>(.*?)</svg>", figure, re.DOTALL)
    colours = dict(re.findall(r"--(\w+):(#\w+)", STYLE.split("@media")[0]))
    style = re.sub(
        r"var\(--(\w+)\)", lambda match: colours[match[1]], "\n".join(re.findall(r"^\.(?:tick|grid|line|dot)[^\n]*", STYLE, re.MULTILINE))
    )
    style = re.sub(r"font:12px [^;]*;", "font:12px sans-serif;", style)
    height = line_chart.HEIGHT + 56 + 18 * len(curve.series)
    legend = "".join(
        f'<line class="line s{place % line_chart.KINDS}" x1="20" x2="46" y1="{y}" y2="{y}"/><text class="tick" x="54" y="{y + 4}">{_escaped(series.label)}</text>'
        for place, series in enumerate(curve.series) for y in [line_chart.HEIGHT + 44 + 18 * place]
    )  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {line_chart.WIDTH:g} {height:g}" width="{line_chart.WIDTH:g}" height="{height:g}"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/><text class="tick" x="20" y="20">{_escaped(curve.name)}, {_escaped(curve.unit)}</text>'
        f'<g transform="translate(0 26)">{inner[1] if inner else ""}</g>{legend}</svg>\n'
    )


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _curve(name: str, unit: str, cells: Sequence[Summary], value_of: Callable[[Summary], float | None]) -> Curve:
    series = []
    for variation in dict.fromkeys(cell.variation for cell in cells):
        own = [cell for cell in cells if cell.variation == variation]
        for strategy in dict.fromkeys(cell.strategy for cell in own if cell.strategy != ALONE) or [ALONE]:
            best: dict[int, Summary] = {}
            for cell in own:
                fits = cell.strategy in (strategy, ALONE) and cell.tokens_per_s is not None
                if fits and (cell.tokens_per_s or 0) > (best[len(cell.nodes)].tokens_per_s or 0 if len(cell.nodes) in best else 0):
                    best[len(cell.nodes)] = cell
            points = [CurvePoint(step=count, value=value) for count, cell in sorted(best.items()) if (value := value_of(cell)) is not None]
            if points:
                series.append(Series(label=f"{strategy}, {variation}" if variation else strategy, points=tuple(points)))
    note = "" if series else "Nothing of this is known yet."
    return Curve(name=name, unit=unit, series=tuple(series), note=note, over=_OVER)
