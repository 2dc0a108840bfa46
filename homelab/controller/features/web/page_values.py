"""What a page says, as JSON: a snapshot, a report, the logs, the list of runs. Every list in it has an end. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from homelab.controller.base.hint import Options, homelab
from homelab.controller.base.sanitize import shortened
from homelab.controller.dashboard import log_section, words
from homelab.controller.dashboard.run_list import RunRow, ago
from homelab.controller.dashboard.snapshot import Snapshot
from homelab.controller.features.report import line_chart, sections
from homelab.controller.features.report.page_tables import Cell
from homelab.controller.features.report.run_report import Curve, RunReport
from homelab.controller.features.report.sections import ReportSection
from homelab.controller.features.web import act_words, first_sentence

_MOST_ROWS, _MOST_EVENTS, _MOST_NOTES, _MOST_RUNS = 200, 200, 20, 200
_MOST_RANKS = 64
_MOST_LINES, _MOST_LINE = 100, 500  # of a log, of a rank
_MOST_TEXT = 4000


def run(snapshot: Snapshot, *, is_asked: bool, is_mute: bool = False) -> str:
    """How the run is now. `is_asked`: False where it is what this machine has written down, and its nodes were not asked yet.

    `is_mute`: only a program of one's own can ask its model, or it scores answers.
    """
    kept = {"loss_history", "eval_losses", "diagnosis", "checkpoint_steps"}
    document = json.loads(snapshot.model_dump_json(exclude=dict.fromkeys(kept, True) | {"ranks": {"__all__": {"log_tail"}}}))
    diagnosis = snapshot.diagnosis
    return _json({
        **document,
        "answer": first_sentence.of_run(snapshot, is_asked=is_asked), "tone": first_sentence.tone(snapshot), "is_asked": is_asked, "is_mute": is_mute,
        "label": first_sentence.label(snapshot.run),
        "acts": act_words.offered(snapshot), "figures": _figures(snapshot), "ranks": document["ranks"][:_MOST_RANKS], "rank_count": len(snapshot.ranks),
        "events": document["events"][-_MOST_EVENTS:], "are_all_silent": is_asked and not any(row.reachable for row in snapshot.nodes),
        "warnings": [(str(note), list(map(str, note.commands))) for note in snapshot.notes if note.commands][:_MOST_NOTES],
        "notes": [str(note) for note in snapshot.notes if not note.commands][:_MOST_NOTES],
        "diagnosis": diagnosis and {
            "title": diagnosis.title, "because": diagnosis.because[:_MOST_NOTES], "hint": str(diagnosis.hint),
            "commands": [str(command) for command in diagnosis.hint.commands],
        },
    })  # fmt: skip


def _figures(snapshot: Snapshot) -> list[tuple[str, str, str]]:
    """(name, value, note) of what a person looks for first."""
    figures: list[tuple[str, str, str]] = []
    if snapshot.loss is not None:
        found = f"; judged rightly {words.percent(100 * snapshot.accuracy)}" if snapshot.accuracy is not None else ""
        about = found or f"; perplexity {words.perplexity(snapshot.loss)}"
        start = snapshot.loss_history[0].loss if snapshot.loss_history else snapshot.loss
        figures.append(("loss", words.loss(snapshot.loss), f"from {words.loss(start)}{about}"))
    if snapshot.eval_losses:
        best = snapshot.best_eval
        note = f"best {words.loss(best.loss)} in step {best.step}" if best is not None else ""
        if snapshot.eval_accuracy is not None:
            note += f"; judged rightly {words.percent(100 * snapshot.eval_accuracy)}"
        figures.append(("held-out loss", words.loss(snapshot.eval_losses[-1].loss), note))
    is_moving = snapshot.state in ("running", "stopping")
    if is_moving and snapshot.tokens_per_s is not None:
        planned = "" if snapshot.planned_efficiency is None else f", planned {words.percent(100 * snapshot.planned_efficiency)}"
        reached = "" if snapshot.efficiency is None else f"{words.percent(100 * snapshot.efficiency)} of the sum of the cards{planned}"
        figures.append(("speed", f"{words.count(snapshot.tokens_per_s)} tokens/s", reached))
    if is_moving and snapshot.step_s is not None:
        epoch = "" if snapshot.epoch is None else f"epoch {snapshot.epoch:.2f}"
        figures.append(("time of a step", f"{words.seconds(snapshot.step_s)} s", epoch))
    if snapshot.checkpoint_steps:
        age = "" if snapshot.checkpoint_age_s is None else f"saved {words.duration(snapshot.checkpoint_age_s)} ago"
        figures.append(("newest checkpoint", f"step {snapshot.checkpoint_steps[-1]}", age))
    figures.append(("attempt", str(snapshot.attempt), f"{snapshot.restarts} restart{'s' if snapshot.restarts != 1 else ''}"))
    return figures


def logs(snapshot: Snapshot) -> str:
    """The last lines of each rank, and those of all ranks together."""
    together = log_section.log_lines(snapshot, None)[-2 * _MOST_LINES :]
    return _json({
        "attempt": snapshot.attempt, "newest_attempt": snapshot.attempt, "unreachable": {},
        "together": [(line.who(is_short=False), shortened(line.text, _MOST_LINE)) for line in together],
        "ranks": [(row.rank, row.node, _last(row.log_tail)) for row in snapshot.ranks[:_MOST_RANKS]],
    })  # fmt: skip


def logs_of(ranks: Mapping[int, tuple[str, Sequence[str]]], attempt: int, newest: int, unreachable: Mapping[str, str]) -> str:
    """The same of an attempt that was asked for. `ranks`: number -> its node, and its lines."""
    rows = sorted(ranks.items())[:_MOST_RANKS]
    together = log_section.folded({number: _last(lines) for number, (_, lines) in rows})[-2 * _MOST_LINES :]
    return _json({
        "attempt": attempt, "newest_attempt": newest, "unreachable": {name: shortened(why, _MOST_LINE) for name, why in unreachable.items()},
        "together": [(line.who(is_short=False), line.text) for line in together],
        "ranks": [(number, node, _last(lines)) for number, (node, lines) in rows],
    })  # fmt: skip


def _last(lines: Sequence[str]) -> list[str]:
    return [shortened(line, _MOST_LINE) for line in lines[-_MOST_LINES:]]


def report(told: RunReport) -> str:
    """What `homelab report` shows: figures, curves, attempts over time, and its tables."""
    return _json({
        "run": told.run, "state": told.state, "made_at": told.made_at, "created_at": told.created_at, "utc_offset_s": told.utc_offset_s,
        "missing": told.missing, "figures": [asdict(figure) for figure in sections.figures(told)], "curves": [_curve(curve) for curve in told.curves],
        "attempts": [row.model_dump(mode="json") for row in told.attempts[-_MOST_ROWS:]],
        "timeline": [(entry.time, entry.sort, shortened(entry.text, _MOST_LINE)) for entry in told.timeline],
        "sections": [_section(part) for part in sections.sections(told)],
    })  # fmt: skip


def _curve(curve: Curve) -> dict[str, Any]:
    series = [{"label": one.label, "points": [(point.step, float(f"{point.value:.6g}")) for point in one.points]} for one in curve.series]
    return {
        "name": curve.name, "unit": curve.unit, "note": curve.note, "series": series, "described": line_chart.described(curve) if series else "",
    }  # fmt: skip


def _section(part: ReportSection) -> dict[str, Any]:
    """Its tables without the columns that have only pictures: the page draws none."""
    tables = []
    for table in part.tables:
        shown = [number for number in range(len(table.heads)) if not table.rows or any(_text(row[number]) for row in table.rows)]
        rows = [[shortened(_text(row[number]), _MOST_TEXT) for number in shown] for row in table.rows[-_MOST_ROWS:]]
        heads = [table.heads[number] for number in shown]
        tables.append({"caption": table.caption, "heads": heads, "rows": rows, "is_tall": table.is_tall})
    return {"name": part.name, "heading": part.heading, "note": part.note, "tables": tables}


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


def overview(
    rows: Sequence[RunRow], nodes: Sequence[str], silent: Mapping[str, str], now: float, options: Options, *, is_asked: bool
) -> str:
    """All runs, the newest first, and which nodes answer. `is_asked`: the nodes were asked, `silent` are those that did not answer."""
    begin = [] if rows else [homelab("new DATA"), homelab("launch RECIPE"), homelab("demo")]
    return _json({
        "answer": first_sentence.of_runs(rows), "is_asked": is_asked, "run_count": len(rows),
        "runs": [
            {"name": row.name, "label": first_sentence.label(row.name), "state": row.state or "unknown", "attempt": row.attempt, "began": ago(row.created_at, now),
             "nodes": row.nodes}
            for row in rows[:_MOST_RUNS]
        ],
        "nodes": [{"name": name, "why_not": shortened(silent[name], _MOST_LINE) if name in silent else ""} for name in nodes],
        "begin": [str(command.with_options(options)) for command in begin],
    })  # fmt: skip


def compared(curves: Mapping[str, Sequence[Curve]]) -> str:
    """The loss of several runs. `curves`: run -> those of its report."""
    loss = {name: next((curve for curve in told if curve.name == "Loss"), None) for name, told in curves.items()}
    return _json({"runs": {name: _curve(curve) if curve else None for name, curve in loss.items()}})


def failed(message: str, where: str, hint: str, runs: Sequence[str] = ()) -> str:
    """An error in its three parts, and the runs that there are."""
    return _json({"error": {"message": message, "where": where, "hint": hint}, "runs": runs[:_MOST_RUNS]})


def _json(value: Any) -> str:
    """In one line, as a server-sent event wants it: JSON has no line breaks but escaped ones."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
