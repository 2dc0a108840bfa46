"""What `homelab verify` has found, as a table for the terminal and as one HTML file. Pure."""

from __future__ import annotations

import base64
import hashlib
from html import escape

from rich.table import Table
from rich.text import Text

from homelab.controller.features.report import number_text as text
from homelab.controller.features.report import page_tables
from homelab.controller.features.report.page_style import STYLE
from homelab.controller.features.verify.verification import Verification
from homelab.controller.features.verify.window_verdict import WindowResult

_HEADS = ("steps", "nodes", "strategy", "loss", "may be", "weights", "may be", "verdict")
_READING = (
    "Each window was computed again from a kept checkpoint to the next one. Loss: the largest difference of a step, relative to the record's loss. Weights: the distance of "
    "all trained weights from the kept ones, as a part of the way that these went in the window. A bound was measured: it is the most that other machines and another "
    "division may differ by rounding."
)


def table(found: Verification) -> Table:
    """A row for each window. 80 columns hold it."""
    drawn = Table(box=None, pad_edge=False, header_style="dim")
    for place, head in enumerate(_HEADS):
        drawn.add_column(head, justify="right" if place in range(3, 7) else "left", overflow="fold", no_wrap=place == 0)
    for result in found.windows:
        drawn.add_row(*map(Text, _cells(result)))
    return drawn


def _cells(result: WindowResult) -> list[str]:
    return [
        str(result.window), ", ".join(result.nodes), result.strategy, _distance(result.loss_apart), _distance(result.loss_bound),
        _distance(result.weights_apart), _distance(result.weights_bound), result.verdict,
    ]  # fmt: skip


def _distance(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.0e}"


def page(found: Verification, made_at: float, utc_offset_s: int, homelab: str) -> str:
    """The whole file, UTF-8. It loads nothing and runs no script. `made_at` in seconds since 1970, with the reader's offset from UTC."""
    style = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    heads: list[tuple[str, page_tables.Look]] = [(head, "n" if place in range(3, 7) else "") for place, head in enumerate(_HEADS)]
    windows = page_tables.ReportTable("Windows that were computed again", heads, [_cells(result) for result in found.windows]).html()
    why = "".join(f"<li>{escape(str(result.window))}: {escape(result.because)}</li>" for result in found.windows if result.because)
    faults = "".join(f"<li>{escape(fault.text)}</li>" for fault in found.faults)
    facts: list[tuple[str, str]] = [
        ("steps in the record", str(found.last_step)), ("end of the chain", found.chain), ("in the model card", found.card_end or "no card yet"),
        ("precision", found.precision), ("windows", f"{len(found.windows)} of {found.window_count}"), ("read from", found.node),
        *((f"run of {result.window}", result.run) for result in found.windows if result.run),
    ]  # fmt: skip
    record = page_tables.ReportTable("The record", [("", ""), ("", "text")], facts).html()
    title = escape(f"{found.run} · homelab verify")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{style}'; img-src data:; base-uri 'none'; form-action 'none'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{STYLE}</style></head><body>'
        f'<header><h1>{escape(found.run)}</h1><p class="answer">{escape(found.answer)}</p></header><main><p class="note">{escape(_READING)}</p>'
        + (f"<section><h2>What is wrong with the record</h2><ul>{faults}</ul></section>" if faults else "")
        + (f"<section><h2>Windows</h2>{windows}{f'<ul>{why}</ul>' if why else ''}</section>" if found.windows else "")
        + f"<section><h2>Record</h2>{record}</section>"
        + f"<section><h2>Notes</h2><ul>{''.join(f'<li>{escape(note)}</li>' for note in found.notes)}</ul></section></main>"
        f"<footer>Made by homelab {escape(homelab)} on {text.moment(made_at, utc_offset_s)}; times are {text.zone(utc_offset_s)}. This file loads nothing.</footer>"
        "</body></html>\n"
    )
