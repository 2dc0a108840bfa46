"""Attempts and what happened in them, from the plans, the events and the diagnoses that were kept. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.features.report.run_report import AttemptRow, Happening, Sort
from homelab.controller.planning.types import Plan
from homelab.controller.run import events
from homelab.shared.protocol.rank_messages import Metric

MOST_LINES = 200
_SORTS: dict[events.Kind, Sort] = {
    "launched": "attempt", "attempt-started": "attempt", "attempt-resumed": "attempt", "restart": "attempt", "state": "attempt", "given-back": "attempt", "came-back": "attempt",
    "trouble": "fault", "left-out": "fault", "given-up": "fault", "waiting": "fault", "attempt-not-started": "fault", "start-failed": "fault",
    "interrupted": "fault", "checkpoint-unused": "fault",
}  # fmt: skip
_ENDS = ("done", "failed", "stopped")


def timeline(lines: Sequence[Mapping[str, Any]], metrics: Sequence[Metric]) -> tuple[tuple[Happening, ...], int]:
    """The lines in the order of their times, and how many were left out in the middle. `lines`: of events.jsonl, each with a time."""
    told = [Happening(time=float(line["time"]), sort=_sort(events.read(line)), text=events.text_of(line)) for line in lines]
    told += [Happening(time=line.time, sort="rebalance", text=line.message) for line in metrics if line.kind == "shares" and line.message]
    told.sort(key=lambda entry: entry.time)
    if len(told) <= MOST_LINES:
        return tuple(told), 0
    half = MOST_LINES // 2
    return (*told[:half], *told[-half:]), len(told) - MOST_LINES


def _sort(event: events.Event) -> Sort:
    if event.is_a_failure:
        return "fault"
    return _SORTS.get(event.kind, "other")


def attempt_rows(
    plans: Mapping[int, Plan], lines: Sequence[Mapping[str, Any]], metrics: Sequence[Metric], diagnoses: Mapping[int, Diagnosis], state: str
) -> tuple[AttemptRow, ...]:
    """One row per attempt that has a plan, in their order. `state` is the run's; `metrics` also those that were undone."""
    began: dict[int, float] = {}
    ended: dict[int, tuple[float, str]] = {}
    current = 1
    for line in lines:
        event, time = events.read(line), float(line["time"])
        if event.begins_an_attempt and event.attempt is not None:
            current = event.attempt
            began.setdefault(current, time)
        elif event.kind == "trouble" or event.ends_all or (event.kind == "state" and event.values.get("state") in _ENDS):
            name = {"trouble": "failed", "stopped": "stopped"}.get(event.kind) or str(event.values["state"])
            ended.setdefault(current, (time, name)) if name != "done" else ended.update({current: (time, name)})
    rows = []
    newest = max(plans, default=0)
    of_attempt: dict[int, list[Metric]] = {}
    for metric in metrics:
        of_attempt.setdefault(metric.attempt, []).append(metric)
    for number, plan in sorted(plans.items()):
        own = of_attempt.get(number, [])
        steps = [line.step for line in own if line.kind == "train"]
        end, how = ended.get(number, (None, "") if number == newest else (began.get(number + 1), "ended"))
        diagnosis = diagnoses.get(number)
        rows.append(
            AttemptRow(
                number=number, started_at=began.get(number, min((line.time for line in own if line.time), default=None)), ended_at=end,
                state=state if number == newest else how, from_step=plan.resume_step, last_step=max(steps, default=None),
                nodes=tuple(node.name for node in plan.nodes),
                left_out=tuple(f"{name}: {plan.left_out_because[name]}" if name in plan.left_out_because else name for name in plan.left_out),
                title=diagnosis.title if diagnosis else "", fix=str(diagnosis.hint) if diagnosis else "",
            )
        )  # fmt: skip
    return tuple(rows)
