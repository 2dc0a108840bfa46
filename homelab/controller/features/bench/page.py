"""One HTML file about a benchmark, with what a stranger needs to repeat it, and its charts. Pure."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from homelab.controller.base.units import gibibytes
from homelab.controller.config.suite import Suite
from homelab.controller.features.bench import table
from homelab.controller.features.bench.cell import ALONE
from homelab.controller.features.bench.result import Result, Summary
from homelab.controller.features.report import line_chart, page_tables
from homelab.controller.features.report import number_text as text
from homelab.controller.features.report.page_style import STYLE
from homelab.controller.features.report.run_report import Curve, CurvePoint, Series

_OVER = "number of nodes"
_READING = (
    "Tokens are counted without padding, after the warm-up, while all ranks train: a step lasts as long as that of its slowest rank. Efficiency is the speed over the sum of "
    "what the same nodes do alone. Input is the time in which batches are made. The plan's column is how far its word before the run was off, where it was made from measured "
    "speeds (the median of the runs). Memory is what a process held at "
    "most on a CPU, and what torch reserved on a card. The rate between host and card is not measured. All cells of a variation train the same global batches, so their losses "
    "after equal steps are those of one training; what differs is rounding."
)


@dataclass(frozen=True)
class About:
    """What the figures were measured with. `commands` repeat it; `made_at` in seconds since 1970, with the reader's offset from UTC."""

    name: str
    suite: Suite
    files: Mapping[str, str]
    commands: Sequence[str]
    made_at: float
    utc_offset_s: int = 0


def render(about: About, cells: Sequence[Summary], results: Sequence[Result]) -> str:
    """The whole file, UTF-8. It loads nothing and runs no script."""
    style = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    drawn = "".join(line_chart.chart(curve, number) for number, curve in enumerate(chart_curves(cells)))
    done = sum(cell.runs >= about.suite.repeats for cell in cells)
    title = escape(f"{about.name} · homelab bench")
    heads: list[tuple[str, page_tables.Look]] = [(name, "" if place == 0 else "n") for place, name in enumerate(table.HEADINGS)]
    lines = table.reasons(cells)
    sections = (
        ("cells", "Cells", page_tables.ReportTable("Medians over the runs of each cell", heads, table.rows(cells)).html()),
        ("charts", "Over the number of nodes", f'<div class="charts">{drawn}</div>'),
        ("reasons", "Missing figures, and why", f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""),
        ("machines", "Machines and versions", _machines(results)),
        ("repeat", "To repeat it", _commands(about)),
    )
    body = "".join(
        f'<section aria-labelledby="{name}"><h2 id="{name}">{heading}</h2>{html}</section>' for name, heading, html in sections if html
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{style}'; img-src data:; base-uri 'none'; form-action 'none'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{STYLE}</style></head><body>'
        f"<header><h1>{escape(about.name)}</h1><p>{done} of {len(cells)} cells have all {about.suite.repeats} runs</p></header>"
        f'<main><p class="note">{escape(_READING)}</p>{body}</main>'
        f"<footer>Made by homelab bench on {text.moment(about.made_at, about.utc_offset_s)}; times are {text.zone(about.utc_offset_s)}. "
        "This file loads nothing.</footer></body></html>\n"
    )


def _machines(results: Sequence[Result]) -> str:
    devices: dict[str, str] = {}
    versions: dict[str, str] = {}
    for result in results:
        devices |= result.devices
        versions |= result.versions
    if not devices:
        return ""
    tables = (
        page_tables.ReportTable("The nodes", [("node", ""), ("devices that took part", "")], list(devices.items())),
        page_tables.ReportTable("On the nodes", [("package", ""), ("version", "")], sorted(versions.items())),
    )
    return "".join(one.html() for one in tables)


def _commands(about: About) -> str:
    shown = "".join(f"<p><code>{escape(command)}</code></p>" for command in about.commands)
    files = "".join(
        f'<details><summary>{escape(name)}</summary><div class="text">{escape(content)}</div></details>'
        for name, content in about.files.items()
    )
    return shown + files


def chart_curves(cells: Sequence[Summary]) -> tuple[Curve, ...]:
    """Where there are several sets of as many nodes, the fastest counts; a node alone belongs to every strategy."""
    return (
        _chart_curve("Speed", "tokens/s", cells, lambda cell: cell.tokens_per_s),
        _chart_curve("Time of a step", "s", cells, lambda cell: cell.step_s),
        _chart_curve(
            "Efficiency", "% of the nodes' speeds alone", cells, lambda cell: None if cell.efficiency is None else 100 * cell.efficiency
        ),
        _chart_curve(
            "Memory",
            "GiB, the rank with the most memory",
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
        f'<line class="line s{place % line_chart.KINDS}" x1="20" x2="46" y1="{y}" y2="{y}"/><text class="tick" x="54" y="{y + 4}">{escape(series.label)}</text>'
        for place, series in enumerate(curve.series) for y in [line_chart.HEIGHT + 44 + 18 * place]
    )  # fmt: skip
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {line_chart.WIDTH:g} {height:g}" width="{line_chart.WIDTH:g}" height="{height:g}"><style>{style}</style>'
        f'<rect width="100%" height="100%" fill="#fff"/><text class="tick" x="20" y="20">{escape(curve.name)}, {escape(curve.unit)}</text>'
        f'<g transform="translate(0 26)">{inner[1] if inner else ""}</g>{legend}</svg>\n'
    )


def _chart_curve(name: str, unit: str, cells: Sequence[Summary], value_of: Callable[[Summary], float | None]) -> Curve:
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
    note = "" if series else "Nothing is known yet."
    return Curve(name=name, unit=unit, series=tuple(series), note=note, over=_OVER)
