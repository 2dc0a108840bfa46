"""One HTML file made of a Report. Pure.

The file asks nobody for anything: its Content-Security-Policy allows no request at all, and of styles and scripts only the two below, by
their digests. So a name like `<script>` is harmless twice: it is escaped, and it would not run.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from html import escape

from homelab.controller.features.report import line_chart, sections
from homelab.controller.features.report import number_text as text
from homelab.controller.features.report.attempt_chart import attempt_chart
from homelab.controller.features.report.page_style import SCRIPT, STYLE
from homelab.controller.features.report.run_report import Curve, RunReport


def render(report: RunReport) -> str:
    """The whole file, UTF-8."""
    title = escape(f"{report.run} · homelab report")
    parts = list(_sections(report))
    menu = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in parts)
    body = "".join(f'<section aria-labelledby="{name}"><h2 id="{name}">{heading}</h2>{html}</section>' for name, heading, html in parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy()}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<meta name="referrer" content="no-referrer"><link rel="icon" href="data:,"><title>{title}</title><style>{STYLE}</style></head><body>'
        f'<header>{_head(report)}<nav aria-label="sections">{menu}</nav></header><main>{_figures(report)}{_missing(report)}{body}</main>'
        f"<footer>Made by homelab {escape(report.homelab)} on {text.moment(report.made_at, report.utc_offset_s)}; times are {text.zone(report.utc_offset_s)}. "
        "This file sends and loads nothing.</footer>"
        f'<script type="application/json" id="points">{_points(report.curves)}</script><script>{SCRIPT}</script></body></html>\n'
    )


def _policy() -> str:
    def digest(source: str) -> str:
        return base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()

    return f"default-src 'none'; style-src 'sha256-{digest(STYLE)}'; script-src 'sha256-{digest(SCRIPT)}'; img-src data:; base-uri 'none'; form-action 'none'"


def _head(report: RunReport) -> str:
    began = f" · created {text.moment(report.created_at, report.utc_offset_s)}" if report.created_at is not None else ""
    living = " · the run was not finished when this file was made" if report.state in ("starting", "running", "stopping") else ""
    state = escape(report.state)
    recipe = f"{escape(report.recipe_file)}" if report.recipe_file else "a run of homelab"
    return (
        f'<h1>{escape(report.run)}</h1><p class="answer">{escape(sections.answer(report))}</p>'
        f'<p><span class="state {state}">{state}</span> <span class="dim">{recipe}{began}{living}</span></p>'
    )


def _figures(report: RunReport) -> str:
    shown = "".join(
        f"<div><dt>{figure.name}</dt><dd>{escape(figure.value)}{f'<small>{escape(figure.note)}</small>' if figure.note else ''}</dd></div>"
        for figure in sections.figures(report)
    )
    return f'<dl class="figures">{shown}</dl>'


def _missing(report: RunReport) -> str:
    if not report.missing:
        return ""
    return (
        '<div class="missing"><strong>Not known</strong><ul>'
        + "".join(f"<li>{escape(line)}</li>" for line in report.missing)
        + "</ul></div>"
    )


def _sections(report: RunReport) -> Iterator[tuple[str, str, str]]:
    """(id, heading, HTML) of each section that the run has."""
    charts = "".join(line_chart.chart(curve, number) for number, curve in enumerate(report.curves))
    if charts:
        yield "curves", "Curves", f'<div class="charts">{charts}</div>'
    for section in sections.sections(report):
        note = f'<p class="note">{escape(section.note)}</p>' if section.note else ""
        drawn = attempt_chart(report.attempts, report.timeline, report.made_at, report.utc_offset_s) if section.name == "attempts" else ""
        yield section.name, section.heading, drawn + note + "<p></p>".join(table.html() for table in section.tables)


def _points(curves: tuple[Curve, ...]) -> str:
    """What the script shows under the pointer, as JSON in which nothing can end the element."""
    charts = {}
    for number, curve in enumerate(curves):
        steps = [point.step for series in curve.series for point in series.points]
        if steps:
            lone = min(steps) == max(steps)
            charts[number] = {
                "from": min(steps) - lone, "to": max(steps) + lone, "left": line_chart.LEFT, "right": line_chart.WIDTH - line_chart.RIGHT,
                "series": [{"label": one.label, "points": [[point.step, float(f"{point.value:.6g}")] for point in one.points]} for one in curve.series],
            }  # fmt: skip
    return json.dumps(charts, separators=(",", ":")).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
