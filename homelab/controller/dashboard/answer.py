"""The answer of the dashboard: does it train, how far is it, how long will it take, who is well; of a run that failed, what fixes it. Pure."""

from __future__ import annotations

import math

from rich.text import Text

from homelab.controller.dashboard import words
from homelab.controller.dashboard.columns import clip, wrap
from homelab.controller.dashboard.screen import Section
from homelab.controller.dashboard.snapshot import RankRow, Snapshot
from homelab.controller.run import leave

# State -> its sign, its colour, and the word that begins the answer.
STATES = {
    "planned": ("○", "", "planned"),
    "shipping": ("○", "yellow", "starts"),
    "starting": ("○", "yellow", "starts"),
    "running": ("●", "green", "trains"),
    "stopping": ("■", "yellow", "stops"),
    "stopped": ("■", "yellow", "stopped"),
    "done": ("✓", "green", "done"),
    "failed": ("✗", "bold red", "failed"),
    "lost": ("?", "bold red", "lost"),
}
_ENDED = ("failed", "lost", "stopped")  # in these states a diagnosis says why
_BEFORE = ("planned", "shipping", "starting", "lost")
_EVIDENCE = 4
_INDENT, _LINES = 6, 3  # of a text in the box
_SILENT_S = 60.0  # a training rank that was silent for so long is worth a look


def is_silent(row: RankRow) -> bool:
    """Whether a rank that trains has given no sign of life for long."""
    return row.phase == "training" and row.heartbeat_age_s is not None and row.heartbeat_age_s > _SILENT_S


def line(snapshot: Snapshot) -> Text:
    """ "● trains: step 120 of 400, 12 min left, 3 of 3 nodes well"."""
    sign, style, word = STATES[snapshot.state]
    if snapshot.waits_for_owner:
        sign, style, word = "○", "yellow", "waits"
    is_program = not snapshot.step and not any(row.phase for row in snapshot.ranks)  # one's own: it tells no steps
    begins = Text.assemble((f"{sign} {'runs' if is_program and word == 'trains' else word}", style), ": ")
    of = f" of {snapshot.total_steps}" if snapshot.total_steps else ""
    place = f"step {snapshot.step}{of}" if snapshot.step else "no step yet"
    parts = [] if is_program and snapshot.state not in _BEFORE else [Text(place)]
    return begins.append_text(Text(", ").join([*parts, *_what(snapshot)]))


def _what(snapshot: Snapshot) -> list[Text]:
    """Why it ended, or how it ends; of a run that goes on, how long it will take and who is well."""
    away = [Text(leave.sentence(node.name, leave.Away(node.until, node.because)), style="yellow") for node in snapshot.given_back]
    if snapshot.waits_for_owner:
        return away
    count = len(snapshot.nodes)
    nodes = f"{count} node{'s' * (count != 1)}"
    if snapshot.state in _ENDED and snapshot.diagnosis is not None:
        return [Text(snapshot.diagnosis.title, style="bold red")]
    if snapshot.state == "lost":
        return [Text(f"{sum(row.reachable for row in snapshot.nodes)} of {nodes} answered", style="bold red")]
    if snapshot.state in ("done", "stopped"):
        return [Text(f"on {nodes}" if snapshot.loss is None else f"loss {words.loss(snapshot.loss)}")]
    well = sum(row.reachable and not row.needs_action for row in snapshot.nodes)
    parts = [] if snapshot.eta_s is None else [Text(f"{words.duration(snapshot.eta_s)} left")]
    parts += [] if snapshot.loss is None or math.isfinite(snapshot.loss) else [Text("the loss is not a number", style="bold red")]
    parts.append(Text(f"{well} of {nodes} well", style="" if well == count else "bold red"))
    silent = [str(row.rank) for row in snapshot.ranks if is_silent(row)]
    return parts + away + ([Text(f"rank{'s' * (len(silent) > 1)} {', '.join(silent)} silent", style="yellow")] if silent else [])


def fix_section(snapshot: Snapshot, width: int) -> Section | None:
    """The command that fixes it; the evidence and the lines of the box where there is room.

    The box has no sides, so that a command in it can be copied.
    """
    diagnosis = snapshot.diagnosis
    if diagnosis is None or snapshot.state not in _ENDED:
        return None
    need = wrap(Text.assemble((" fix  ", "dim"), (diagnosis.hint, "bold")), width, _INDENT, _LINES)
    # Wrapped, not cut: what is at the end of such a line is often the file and the line number.
    evidence = [Text(" " * _INDENT).append(line) for line in diagnosis.because[:_EVIDENCE]]
    content = need + [part for line in evidence for part in wrap(line, width, _INDENT, _LINES)]
    title = f" ── diagnosis of attempt {snapshot.attempt} " if snapshot.attempt else " ── diagnosis "
    above = clip(Text(title + "─" * max(0, width - len(title) - 1), style="red"), width)
    below = Text(" " + "─" * max(0, width - 2), style="red")

    def draw(room: int) -> list[Text]:
        return [above, *content[: room - 2], below] if room >= len(need) + 2 else content[:room]

    return Section(draw, len(need), len(content) + 2, 1)
