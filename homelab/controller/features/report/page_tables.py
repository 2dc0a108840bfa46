"""The tables of a report as values, and as HTML: every text is escaped here, and every table scrolls by itself where the screen is narrow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal

from homelab.controller.dashboard import words
from homelab.controller.features.report import number_text as text
from homelab.controller.features.report.run_report import RunReport


@dataclass(frozen=True)
class Markup:
    """HTML that is made here, and is not escaped again. `text` is the same for a reader that shows no HTML."""

    html: str
    text: str = ""


_FITS_A_PHONE = 4  # columns
Cell = str | Markup
Look = Literal["", "n", "t", "text"]
"""Class of a column: numbers, times, texts of several lines."""


@dataclass(frozen=True)
class ReportTable:
    """One table; the first cell of a row is its header. `is_tall`: it may be long, and scrolls downwards, too."""

    caption: str
    heads: Sequence[tuple[str, Look]]
    rows: Sequence[Sequence[Cell]]
    is_tall: bool = False

    def known(self) -> ReportTable:
        """Without the columns and the rows of which nothing is known; the first column only names the rows."""
        kept = [0, *(place for place in range(1, len(self.heads)) if any(_is_known(row[place]) for row in self.rows))]
        rows = [[row[place] for place in kept] for row in self.rows if any(map(_is_known, row[1:]))]
        return replace(self, heads=[self.heads[place] for place in kept], rows=rows)

    def html(self) -> str:
        """Every text in it is escaped. Where the screen is narrow, each row of a wide table stands as a block, with its heads before the cells."""
        is_wide = len(self.heads) > _FITS_A_PHONE and not self.is_tall
        body = "".join(
            f"<tr{' role=row' * is_wide}>"
            + "".join(
                _cell(cell, look, head=name, is_first=place == 0, is_wide=is_wide)
                for place, (cell, (name, look)) in enumerate(zip(row, self.heads, strict=True))
            )
            + "</tr>"
            for row in self.rows
        )
        head = "".join(f'<th scope="col"{_class(look)}>{escape(name)}</th>' for name, look in self.heads)
        caption = escape(self.caption)
        return (
            f'<div class="scroll{" tall" if self.is_tall else ""}{" blocks" if is_wide else ""}" tabindex="0" role="region" aria-label="{caption}">'
            f"<table{' role=table' * is_wide}><caption>{caption}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
        )


def _is_known(cell: Cell) -> bool:
    return (cell.html if isinstance(cell, Markup) else cell) not in ("", text.UNKNOWN, text.NONE)


def _cell(cell: Cell, look: Look, *, head: str, is_first: bool, is_wide: bool) -> str:
    inner = cell.html if isinstance(cell, Markup) else escape(cell)
    named = f' data-head="{escape(head)}"' if is_wide else ""
    if is_first:
        return f'<th scope="row"{_class(look)}{named}{" role=rowheader" * is_wide}>{inner}</th>'
    return f"<td{_class(look)}{named}{' role=cell' * is_wide}>{inner}</td>"


def _class(look: Look) -> str:
    return f' class="{look}"' if look else ""


def attempts(report: RunReport) -> ReportTable:
    """Every start of the run."""
    rows = [
        (
            str(row.number), text.moment(row.started_at, report.utc_offset_s),
            words.duration(row.ended_at - row.started_at) if row.ended_at is not None and row.started_at is not None else text.UNKNOWN,
            row.state, str(row.from_step), text.NONE if row.last_step is None else str(row.last_step),
            ", ".join(row.nodes) + (f"; without {'; '.join(row.left_out)}" if row.left_out else ""), row.title + (f"\nfix: {row.fix}" if row.fix else ""),
        )
        for row in report.attempts
    ]  # fmt: skip
    heads: list[tuple[str, Look]] = [
        ("attempt", ""), ("began", "t"), ("took", "t"), ("end", ""), ("after step", "n"), ("last step that counts", "n"), ("nodes", ""), ("why it failed", "text"),
    ]  # fmt: skip
    return ReportTable("Attempts: each start of the training on all its nodes", heads, rows)


def timeline(report: RunReport) -> ReportTable:
    """What happened, in order."""
    heads: list[tuple[str, Look]] = [("time", "t"), ("kind", "t"), ("what", "text")]
    rows: list[Sequence[Cell]] = [
        (
            text.moment(entry.time, report.utc_offset_s),
            Markup(f'<span class="sort-{entry.sort}">{entry.sort}</span>', entry.sort),
            entry.text,
        )
        for entry in report.timeline
    ]
    if report.timeline_left_out:
        rows.insert(len(rows) // 2, ("…", "", f"{report.timeline_left_out} events are not shown; events.jsonl of the run has all"))
    return ReportTable("Faults, rebalances and other events", heads, rows, is_tall=True)


def shares(report: RunReport) -> ReportTable:
    """Each rank's part of the tokens."""
    heads: list[tuple[str, Look]] = [
        ("rank", "n"), ("node", ""), ("card or processor", ""), ("planned", "n"), ("done", "n"), ("planned above, done below", ""), ("tokens", "n"),
        ("tokens/s while it computes", "n"), ("memory planned", "n"), ("memory held", "n"),
    ]  # fmt: skip
    rows = [
        (
            text.NONE if row.rank is None else str(row.rank), row.node, row.device, text.percent(row.planned), text.percent(row.done), _share(row.planned, row.done),
            text.count(row.tokens), text.count(row.tokens_per_s), text.memory(row.memory_planned_bytes), text.memory(row.memory_bytes),
        )
        for row in report.shares
    ]  # fmt: skip
    return ReportTable("Shares of the work by rank", heads, rows)


def _share(planned: float | None, done: float | None) -> Markup:
    if planned is None and done is None:
        return Markup("")
    bars = "".join(
        f'<rect class="{kind}" x="0" y="{y}" width="{100 * part:.1f}" height="4"/>'
        for kind, part, y in (("p", planned, 0), ("d", done, 5))
        if part is not None
    )
    return Markup(f'<svg class="share" viewBox="0 0 100 9" preserveAspectRatio="none" aria-hidden="true">{bars}</svg>')


def compared(report: RunReport) -> ReportTable:
    """The plan beside what happened."""
    heads: list[tuple[str, Look]] = [("figure", ""), ("planned", "n"), ("happened", "n")]
    return ReportTable(
        "Speeds are of the newest attempt: its plan, and the median of its steps",
        heads,
        [(row.what, row.planned, row.happened) for row in report.compared],
    )


def energy(report: RunReport) -> ReportTable:
    """What each card used."""
    heads: list[tuple[str, Look]] = [
        ("node", ""), ("card", ""), ("energy", "n"), ("cost", "n"), ("measured", "t"), ("tokens", "n"), ("tokens per kWh", "n"), ("note", "text"),
    ]  # fmt: skip
    price, currency = report.energy.price_per_kwh, report.energy.currency
    rows = [
        (
            card.node, card.card, text.kwh(card.kwh), cost(card.kwh * price if card.kwh is not None and price is not None else None, currency),
            words.duration(card.measured_s) if card.kwh is not None else text.NONE, text.count(card.tokens), text.count(card.tokens_per_kwh), card.because,
        )
        for card in report.energy.cards
    ]  # fmt: skip
    return ReportTable("Energy of the graphics cards only, without processors, memory and power supplies", heads, rows)


def cost(value: float | None, currency: str) -> str:
    """12.34 EUR"""
    if value is None:
        return text.UNKNOWN
    return f"{value:.2f} {currency}".rstrip() if value >= 1 else f"{value:.2g} {currency}".rstrip()


def answers(report: RunReport) -> ReportTable:
    """Questions, and what the model said before and after its training."""
    heads: list[tuple[str, Look]] = [("question", "text"), ("before training", "text"), ("after training", "text")]
    return ReportTable(
        "Answers of `homelab chat`", heads, [(row.question, row.before or "not asked", row.after or "not asked") for row in report.answers]
    )


def machines(report: RunReport) -> ReportTable:
    """Nodes with their cards and packages."""
    heads: list[tuple[str, Look]] = [("node", ""), ("cards or processors", ""), ("versions", "text")]
    return ReportTable(
        "Machines at the launch",
        heads,
        [(row.node, ", ".join(row.devices), ", ".join(row.versions) or text.UNKNOWN) for row in report.machines],
    )


def steps(report: RunReport) -> ReportTable:
    """The figures of the curves."""
    heads: list[tuple[str, Look]] = [
        ("step", "n"),
        ("attempt", "n"),
        ("loss", "n"),
        ("held-out loss", "n"),
        ("tokens/s", "n"),
        ("memory", "n"),
        ("learning rate", "n"),
    ]
    rows = [
        (
            str(row.step), str(row.attempt) if row.attempt else text.NONE, text.figure(row.loss), text.figure(row.eval_loss), text.figure(row.tokens_per_s),
            text.NONE if row.memory_bytes is None else text.memory(row.memory_bytes), text.figure(row.learning_rate),
        )
        for row in report.steps
    ]  # fmt: skip
    return ReportTable(
        f"{len(report.steps)} of {words.count(report.step_count)} steps, evenly, and those with an evaluation", heads, rows, is_tall=True
    )
