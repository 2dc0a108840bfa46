"""The parts of a report as values: what stands under which heading, for its HTML file and for the page of `homelab web`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from homelab.controller.dashboard import words
from homelab.controller.features.report import number_text as text
from homelab.controller.features.report import page_tables, profile_section
from homelab.controller.features.report.page_tables import ReportTable
from homelab.controller.features.report.run_report import RunReport
from homelab.controller.run import leave

_STATES = {
    "done": "The run is done", "failed": "The run failed", "stopped": "The run was stopped", "lost": "The run is lost", "running": "The run trains",
}  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """One figure that is looked for first, as text with its unit; `note` is said below it."""

    name: str
    value: str
    note: str = ""


def figures(report: RunReport) -> tuple[Figure, ...]:
    """Those of the whole run that are known."""
    happened = {row.what: row.happened for row in report.compared}
    losses = {series.label: series.points for curve in report.curves if curve.name == "Loss" for series in curve.series}
    unit = next((curve.unit for curve in report.curves if curve.name == "Loss"), "")
    last, held_out = losses.get("training", ())[-1:], losses.get("held out", ())
    best = min(held_out, key=lambda point: point.value, default=None)
    energy, count = report.energy, len(report.attempts)
    found = [
        Figure("steps", happened.get("steps", text.UNKNOWN)),
        Figure("duration", happened.get("duration", text.UNKNOWN), f"{count} attempt{'s' if count != 1 else ''}"),
        Figure("last loss", words.loss(last[0].value) if last else text.UNKNOWN, unit if last else ""),
        Figure("best held-out loss", words.loss(best.value) if best else text.UNKNOWN, f"in step {best.step}" if best else ""),
        Figure("speed", happened.get("speed of all ranks", text.UNKNOWN)),
        Figure(
            "energy of the cards",
            text.kwh(energy.kwh),
            "" if energy.is_complete or energy.kwh is None else "some cards or times are missing",
        ),
    ]
    if energy.price_per_kwh is not None:
        found.append(
            Figure("cost", page_tables.cost(energy.cost, energy.currency), f"at {energy.price_per_kwh:g} {energy.currency} per kWh")
        )
    return tuple(figure for figure in found if figure.value != text.UNKNOWN)


def answer(report: RunReport) -> str:
    """The first line: "The run is done: 80 steps in 10 min, last loss 1.085, best held-out loss 1.051." Of a run that failed also why."""
    known = {figure.name: figure.value for figure in figures(report)}
    begins = _STATES.get(report.state, f"The run is {report.state}")
    why = [report.attempts[-1].title] if report.state in ("failed", "lost") and report.attempts and report.attempts[-1].title else []
    done = [f"{known['steps']} steps"] if "steps" in known else []
    done = [" in ".join([*done, known["duration"]])] if "duration" in known else done
    losses = [f"{name} {known[name]}" for name in ("last loss", "best held-out loss") if name in known]
    said = ", ".join([*why, *done, *losses])
    return f"{begins}{': ' if said else ''}{said}."


@dataclass(frozen=True)
class ReportSection:
    """A part of the report: its id, its heading, what is said of it in a sentence, and its tables."""

    name: str
    heading: str
    tables: Sequence[ReportTable]
    note: str = ""


def sections(report: RunReport) -> Iterator[ReportSection]:
    """Those that have something to show, without the curves; of their tables only what is known."""
    for section in _all(report):
        tables = [known for table in section.tables if (known := table.known()).rows]
        if tables:
            yield replace(section, tables=tables)


def _all(report: RunReport) -> Iterator[ReportSection]:
    if report.attempts:
        away = [f"{leave.times_words(row.node, leave.LeaveTimes(row.count, row.seconds))}." for row in report.given_back]
        yield ReportSection("attempts", "Attempts", [page_tables.attempts(report)], " ".join(away))
    if report.timeline:
        yield ReportSection("events", "Faults and rebalances", [page_tables.timeline(report)])
    if report.shares:
        yield ReportSection("shares", "Shares of the work", [page_tables.shares(report)])
    if report.compared:
        yield ReportSection("plan", "Plan and what happened", [page_tables.compared(report)])
    if report.profiled:
        yield ReportSection("profile", "Profile", profile_section.tables(report.profiled), profile_section.note(report.profiled))
    if report.energy.kwh is not None:
        yield ReportSection("energy", "Energy", [page_tables.energy(report)], _energy_note(report))
    if report.answers:
        yield ReportSection("answers", "Questions before and after", [page_tables.answers(report)])
    if report.machines or report.facts:
        facts = [ReportTable("The training and its software", [("figure", ""), ("value", "text")], report.facts)] if report.facts else []
        yield ReportSection("machines", "Machines and versions", [*([page_tables.machines(report)] if report.machines else []), *facts])
    if report.steps:
        yield ReportSection("steps", "Figures by step", [page_tables.steps(report)])


def _energy_note(report: RunReport) -> str:
    said = []
    if report.energy.tokens_per_kwh is not None:
        said.append(f"All cards together: {words.count(report.energy.tokens_per_kwh)} tokens per kWh.")
    if report.energy.price_per_kwh is None:
        said.append("No price is known: put `price_per_kwh` under [energy] in cluster.toml.")
    return " ".join(said)
