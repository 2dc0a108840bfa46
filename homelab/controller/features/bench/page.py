"""One HTML file about a benchmark, with what a stranger needs to repeat it. Pure."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from homelab.controller.config.suite import Suite
from homelab.controller.features.bench import charts, table
from homelab.controller.features.bench.result import Result, Summary
from homelab.controller.features.report import line_chart, page_tables
from homelab.controller.features.report import number_text as text
from homelab.controller.features.report.page_style import STYLE

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
    drawn = "".join(line_chart.chart(curve, number) for number, curve in enumerate(charts.curves(cells)))
    done = sum(cell.runs >= about.suite.repeats for cell in cells)
    title = escape(f"{about.name} · homelab bench")
    sections = (
        ("cells", "Cells", _cells(cells)),
        ("charts", "Over the number of nodes", f'<div class="charts">{drawn}</div>'),
        ("reasons", "What has no figure, and why", _reasons(cells)),
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


def _cells(cells: Sequence[Summary]) -> str:
    heads: list[tuple[str, page_tables.Look]] = [(name, "" if place == 0 else "n") for place, name in enumerate(table.HEADINGS)]
    return page_tables.table("Medians over the runs of each cell", heads, table.rows(cells))


def _reasons(cells: Sequence[Summary]) -> str:
    lines = table.reasons(cells)
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>" if lines else ""


def _machines(results: Sequence[Result]) -> str:
    devices: dict[str, str] = {}
    versions: dict[str, str] = {}
    for result in results:
        devices |= result.devices
        versions |= result.versions
    if not devices:
        return ""
    return page_tables.table("The nodes", [("node", ""), ("devices that took part", "")], list(devices.items())) + page_tables.table(
        "On the nodes", [("package", ""), ("version", "")], sorted(versions.items())
    )


def _commands(about: About) -> str:
    shown = "".join(f"<p><code>{escape(command)}</code></p>" for command in about.commands)
    files = "".join(
        f'<details><summary>{escape(name)}</summary><div class="text">{escape(content)}</div></details>'
        for name, content in about.files.items()
    )
    return shown + files
