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

from homelab.controller.dashboard import words
from homelab.controller.features.report import line_chart, page_tables, profile_section
from homelab.controller.features.report import number_text as text
from homelab.controller.features.report.attempt_chart import attempt_chart
from homelab.controller.features.report.page_style import SCRIPT, STYLE
from homelab.controller.features.report.run_report import Curve, RunReport


def render(report: RunReport) -> str:
    """The whole file, UTF-8."""
    title = escape(f"{report.run} · homelab report")
    sections = [(name, heading, html) for name, heading, html in _sections(report) if html]
    menu = "".join(f'<a href="#{name}">{heading}</a>' for name, heading, _ in sections)
    body = "".join(f'<section aria-labelledby="{name}"><h2 id="{name}">{heading}</h2>{html}</section>' for name, heading, html in sections)
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
        f'<h1>{escape(report.run)}</h1><p><span class="state {state}">{state}</span> <span class="dim">{recipe}{began}{living}</span></p>'
    )


def _figures(report: RunReport) -> str:
    """The figures that are looked for first."""
    happened = {row.what: row.happened for row in report.compared}
    losses = [
        point
        for curve in report.curves
        if curve.name == "Loss"
        for series in curve.series
        if series.label == "training"
        for point in series.points[-1:]
    ]
    held_out = [
        point
        for curve in report.curves
        if curve.name == "Loss"
        for series in curve.series
        if series.label == "held out"
        for point in series.points
    ]
    best = min(held_out, key=lambda point: point.value, default=None)
    energy = report.energy
    cards = [
        ("steps", happened.get("steps", text.UNKNOWN), ""),
        ("duration", happened.get("duration", text.UNKNOWN), f"{len(report.attempts)} attempt{'s' if len(report.attempts) != 1 else ''}"),
        ("last loss", words.loss(losses[-1].value) if losses else text.UNKNOWN, "nats per token" if losses else ""),
        ("best held-out loss", words.loss(best.value) if best else text.UNKNOWN, f"in step {best.step}" if best else ""),
        ("speed", happened.get("speed of all ranks", text.UNKNOWN), ""),
        (
            "energy of the cards",
            text.kwh(energy.kwh),
            "" if energy.is_complete or energy.kwh is None else "some cards or times are missing",
        ),
    ]
    if energy.price_per_kwh is not None:
        cards.append(
            ("cost", page_tables.cost(energy.cost, energy.currency), f"at {energy.price_per_kwh:g} {escape(energy.currency)} per kWh")
        )
    shown = [
        f"<div><dt>{name}</dt><dd{' class=none' if value == text.UNKNOWN else ''}>{escape(value)}{f'<small>{note}</small>' if note else ''}</dd></div>"
        for name, value, note in cards
    ]
    return f'<dl class="figures">{"".join(shown)}</dl>'


def _missing(report: RunReport) -> str:
    if not report.missing:
        return ""
    return (
        '<div class="missing"><strong>Not known</strong><ul>'
        + "".join(f"<li>{escape(line)}</li>" for line in report.missing)
        + "</ul></div>"
    )


def _sections(report: RunReport) -> Iterator[tuple[str, str, str]]:
    """(id, heading, HTML) of each section; empty HTML where the run has none of it."""
    charts = "".join(line_chart.chart(curve, number) for number, curve in enumerate(report.curves))
    yield "curves", "Curves", f'<div class="charts">{charts}</div>' if charts else ""
    attempts = attempt_chart(report.attempts, report.timeline, report.made_at, report.utc_offset_s) + (
        page_tables.attempts(report) if report.attempts else ""
    )
    yield "attempts", "Attempts", attempts
    yield "events", "Faults and rebalances", page_tables.timeline(report) if report.timeline else ""
    yield "shares", "Shares of the work", page_tables.shares(report) if report.shares else ""
    yield "plan", "Plan and what happened", page_tables.compared(report) if report.compared else ""
    yield "profile", "Profile", profile_section.html(report.profiled) if report.profiled else ""
    yield "energy", "Energy", _energy(report)
    yield "answers", "Questions before and after", page_tables.answers(report) if report.answers else ""
    yield "machines", "Machines and versions", (page_tables.machines(report) if report.machines else "") + _facts(report)
    yield "steps", "Figures by step", page_tables.steps(report) if report.steps else ""


def _energy(report: RunReport) -> str:
    if not report.energy.cards:
        return ""
    said = []
    if report.energy.tokens_per_kwh is not None:
        said.append(f"All cards together: {words.count(report.energy.tokens_per_kwh)} tokens per kWh.")
    if report.energy.price_per_kwh is None:
        said.append("No price is known: put `price_per_kwh` under [energy] in cluster.toml.")
    return page_tables.energy(report) + (f'<p class="note">{escape(" ".join(said))}</p>' if said else "")


def _facts(report: RunReport) -> str:
    if not report.facts:
        return ""
    return "<p></p>" + page_tables.table("The training and its software", [("figure", ""), ("value", "text")], report.facts)


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
