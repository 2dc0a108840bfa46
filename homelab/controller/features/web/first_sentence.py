"""The first sentence of a page: how the run is, or how all of them are. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Literal

from homelab.controller.base.units import listed
from homelab.controller.dashboard import words
from homelab.controller.dashboard.run_list import RunRow
from homelab.controller.dashboard.snapshot import Snapshot

Tone = Literal["well", "waits", "trouble"]

_ENDED = {"done": "is done", "failed": "has failed", "stopped": "was stopped", "lost": "cannot be seen"}
_DATE = re.compile(r"^\d{4}-\d\d-\d\d-\d{4}-(?=.)")


def label(run: str) -> str:
    """The run's name without the minute of its launch."""
    return _DATE.sub("", run)


def of_run(snapshot: Snapshot, *, is_asked: bool) -> str:
    """How the run is. `is_asked`: its nodes were asked for it; else it is what this machine has written down."""
    name, state = label(snapshot.run), snapshot.state
    step = f"step {words.count(snapshot.step)}" + (f" of {words.count(snapshot.total_steps)}" if snapshot.total_steps else "")
    if state in ("planned", "shipping"):
        return f"{name} is being sent to its nodes."
    if state == "starting":
        phases = listed(sorted({row.phase for row in snapshot.ranks if row.phase}))
        return f"{name} starts: {f'its ranks are {phases}' if phases else 'no rank has said anything yet'}."
    if state == "stopping":
        return f"{name} is being stopped at {step}."
    if state == "stopped":
        return f"{name} was stopped at {step}."
    if state == "done":
        return f"{name} is done{_done(snapshot)}."
    if state == "failed":
        why = f": {snapshot.diagnosis.title.rstrip('.')}" if snapshot.diagnosis else ""
        supervised = f" Its supervisor: {snapshot.supervisor.rstrip('.')}." if snapshot.supervisor else ""
        return f"{name} failed at {step}{why}.{supervised}"
    if state == "lost":
        answering = sum(row.reachable for row in snapshot.nodes)
        return f"{name} cannot be seen: {answering} of {len(snapshot.nodes)} nodes answer. It may still train, after {step}."
    if not is_asked:
        return f"{name} was training at {step} when it was seen last."
    left = [] if snapshot.eta_s is None else [f"about {words.duration(snapshot.eta_s)} left"]
    lost = [] if snapshot.loss is None or math.isfinite(snapshot.loss) else ["the loss is not a number"]
    bad = [row.name for row in snapshot.nodes if not row.reachable or row.needs_action]
    well = f"{len(snapshot.nodes) - len(bad)} of {len(snapshot.nodes)} nodes well" + (f" (not {listed(bad)})" if bad else "")
    return f"{name} trains: {', '.join([step, *left, *lost, well])}."


def tone(snapshot: Snapshot) -> Tone:
    """Whether a person has to act, to wait, or neither."""
    if snapshot.state == "done":
        return "well"
    if snapshot.state in ("failed", "lost"):
        return "waits" if snapshot.supervisor else "trouble"
    if snapshot.stopped_owner or any(row.needs_action for row in snapshot.nodes):
        return "trouble" if snapshot.state == "running" else "waits"
    return "well" if snapshot.state == "running" else "waits"


def of_runs(rows: Sequence[RunRow]) -> str:
    """How all runs are: those that train, else the newest."""
    training = [label(row.name) for row in rows if row.state in ("running", "starting", "stopping")]
    if len(training) == 1:
        return f"{training[0]} trains now."
    if training:
        return f"{len(training)} runs train now: {listed(training)}."
    if rows:
        return f"Nothing trains now. The newest run, {label(rows[0].name)}, {_ENDED.get(rows[0].state, 'has not begun')}."
    return "There is no run yet."


def _done(snapshot: Snapshot) -> str:
    if not snapshot.step:
        return ""
    history = snapshot.loss_history
    losses = f", loss {words.loss(history[0].loss)} to {words.loss(history[-1].loss)}" if len(history) > 1 else ""
    return f": {words.count(snapshot.step)} steps{losses}"
