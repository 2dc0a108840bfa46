"""The picture of a Snapshot. Pure: the same snapshot, width and height give the same lines, never more than fit.

Colour has a meaning: green is well, yellow deserves attention, red needs action.
"""

from __future__ import annotations

import math
import time

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from homelab.dashboard import chart, tables, words
from homelab.dashboard.columns import clip, ends
from homelab.dashboard.screen import Section, fitted, fixed, joined
from homelab.dashboard.snapshot import Snapshot

_STATES = {
    "planned": ("○", ""),
    "shipping": ("○", ""),
    "starting": ("○", ""),
    "running": ("●", "green"),
    "stopping": ("■", "yellow"),
    "stopped": ("■", "yellow"),
    "done": ("✓", "green"),
    "failed": ("✗", "bold red"),
    "lost": ("?", "bold red"),
}
_LOG_LINES_UNBOUNDED = 5  # per rank, where no height is given
_EVENTS = 6
_EVIDENCE = 4
_TALL = 34  # from here on three lines for commands are not missed elsewhere
_CURVE_LEAST, _CURVE_MOST = 8, 60
_LARGE = 30  # lines from which on there is room for more than what everybody needs
_CURVE_FROM, _CURVE_LINES = 38, 14
_HARMLESS = "hostname of the client socket cannot be retrieved"


def render(snapshot: Snapshot, width: int, height: int | None) -> RenderableType:
    """The dashboard, `width` cells wide and `height` lines high (the footer at the bottom); None: as long as it is."""
    return Group(*lines(snapshot, width, height))


def lines(snapshot: Snapshot, width: int, height: int | None) -> list[Text]:
    """The same as lines, for a terminal of at least 40 x 8."""
    head = _header(snapshot, width)
    progress = _progress(snapshot, width, is_large=height is None or height >= _LARGE)
    foot = _footer(snapshot, width, height)
    cause = _cause(snapshot, width)
    sections = [
        fixed(head, 0),
        fixed(progress, 2),
        *([cause] if cause else []),
        tables.nodes(snapshot.nodes, width, 3, snapshot.left_out),
        tables.ranks(snapshot.ranks, width, 4),
        _curve(snapshot, width, height),
        _events(snapshot, width),
        _logs(snapshot, width, bounded=height is not None),
    ]
    sections = [section for section in sections if section.most]
    if height is None:
        return joined([section.draw(section.most) for section in sections] + [foot])
    room = max(1, height - len(foot))
    drawn = joined([part for part in fitted(sections, room - 1) if part])[:room]
    return (drawn + [Text()] * (room - len(drawn)) + foot)[:height]


def one_line(snapshot: Snapshot) -> str:
    """The run in one line, for a log or a pipe."""
    parts: list[str] = [snapshot.state]
    if snapshot.step or snapshot.total_steps:
        parts.append(f"step {snapshot.step}/{snapshot.total_steps or '?'}")
    if snapshot.loss is not None:
        parts.append(f"loss {words.loss(snapshot.loss)}")
    if snapshot.tokens_per_s is not None and snapshot.state == "running":
        parts.append(f"{round(snapshot.tokens_per_s)} tokens/s")
    if snapshot.eta_s is not None:
        parts.append(f"ETA {words.duration(snapshot.eta_s)}")
    parts += [f"{row.name}: {row.why_not or row.torchrun}" for row in snapshot.nodes if row.needs_action]
    return "  ".join(parts)


def _header(snapshot: Snapshot, width: int) -> list[Text]:
    symbol, style = _STATES[snapshot.state]
    right = Text.assemble((f"{symbol} {snapshot.state}", style))
    if snapshot.running_s is not None and snapshot.state in ("starting", "running", "stopping", "lost"):
        right.append(f"  {words.duration(snapshot.running_s)}", style="dim")
    count = len(snapshot.ranks)
    parts = [
        snapshot.recipe,
        f"{count} rank{'s' * (count != 1)} on {len(snapshot.nodes)} node{'s' * (len(snapshot.nodes) != 1)}",
    ]
    if snapshot.attempt > 1:
        parts.append(f"attempt {snapshot.attempt}")
    lines = [" · ".join(part for part in parts if part)]
    if snapshot.supervisor:
        supervisor = f"supervisor: {snapshot.supervisor}"
        fits = len(lines[0]) + len(supervisor) + 4 <= width
        lines = [f"{lines[0]} · {supervisor}"] if fits else [*lines, supervisor]
    return [
        ends(Text(" ").append(snapshot.run, style="bold"), right.append(" "), width),
        *(clip(Text(f" {line}", style="dim"), width) for line in lines),
    ]


def _progress(snapshot: Snapshot, width: int, *, is_large: bool) -> list[Text]:
    content = [_bar(snapshot, width)]
    if snapshot.loss is not None:
        content.append(_losses(snapshot, snapshot.loss, width))
    facts = _facts(snapshot) + (_more_facts(snapshot) if is_large else [])
    return content + _side_by_side([Text.assemble((f"{label} " if label else "", "dim"), value) for label, value in facts], width)


def _side_by_side(pieces: list[Text], width: int) -> list[Text]:
    """As many to a line as fit; none is cut that would fit into a line of its own."""
    content: list[Text] = []
    for piece in pieces:
        if content and cell_len(content[-1].plain) + 3 + cell_len(piece.plain) <= width:
            content[-1].append("   ").append_text(piece)
        else:
            content.append(Text(" ").append_text(piece))
    return [clip(line, width) for line in content]


def _losses(snapshot: Snapshot, now: float, width: int) -> Text:
    """Loss at the start and now, its curve in the room that is left, perplexity and evaluations."""
    start = snapshot.loss_history[0].loss if snapshot.loss_history else now
    style = "bold" if math.isfinite(now) else "bold red"
    left = Text.assemble((" loss ", "dim"), words.loss(start), " → ", (words.loss(now), style))
    right = Text.assemble(("perplexity ", "dim"), words.perplexity(now))
    if snapshot.eval_losses:
        ends_ = dict.fromkeys((snapshot.eval_losses[0], snapshot.eval_losses[-1]))
        right.append("   eval ", style="dim").append(" → ".join(words.loss(point.loss) for point in ends_))
    room = width - len(left.plain) - len(right.plain) - 6
    if room >= _CURVE_LEAST:
        curve = words.sparkline([point.loss for point in snapshot.loss_history], min(room, _CURVE_MOST))
        left.append(f"  {curve}")
    return clip(left.append("   ").append_text(right), width)


def _facts(snapshot: Snapshot) -> list[tuple[str, str]]:
    pairs = []
    if snapshot.tokens_per_s is not None and snapshot.state in ("running", "stopping"):
        pairs.append(("", f"{words.count(snapshot.tokens_per_s)} tokens/s"))
    if snapshot.eta_s is not None:
        eta = words.duration(snapshot.eta_s)
        if 0 <= snapshot.eta_s < 86400:
            eta += time.strftime(", at %H:%M", time.localtime(snapshot.now + snapshot.eta_s))
        pairs.append(("ETA", eta))
    if snapshot.checkpoint_steps:
        pairs.append(("newest checkpoint", f"step {snapshot.checkpoint_steps[-1]}"))
    return pairs


def _more_facts(snapshot: Snapshot) -> list[tuple[str, str]]:
    """What is worth a look where there is room."""
    pairs = []
    if snapshot.checkpoint_age_s is not None:
        pairs.append(("saved", f"{words.duration(snapshot.checkpoint_age_s)} ago"))
    if snapshot.step_s is not None and snapshot.state in ("running", "stopping"):
        pairs.append(("", f"{words.seconds(snapshot.step_s)} s per step"))
    if snapshot.epoch is not None:
        pairs.append(("epoch", f"{snapshot.epoch:.2f}"))
    if snapshot.efficiency is not None and snapshot.planned_efficiency is not None:
        pairs.append(("efficiency", f"{snapshot.efficiency:.2f}, planned {snapshot.planned_efficiency:.2f}"))
    if snapshot.restarts:
        pairs.append(("restarts", str(snapshot.restarts)))
    return pairs


def _bar(snapshot: Snapshot, width: int) -> Text:
    total = snapshot.total_steps
    label = (
        f"  step {snapshot.step}/{total}  {100 * snapshot.step // total:3d} % " if total else f"  step {snapshot.step} "
    )
    room = max(4, width - len(label) - 1)
    done = min(room, room * snapshot.step // total) if total else 0
    _, style = _STATES[snapshot.state]
    return clip(Text(" ").append("━" * done, style=style).append("─" * (room - done), style="dim").append(label), width)


def _cause(snapshot: Snapshot, width: int) -> Section | None:
    """Why it failed and what fixes it; the evidence where there is room."""
    diagnosis = snapshot.diagnosis
    if diagnosis is None or snapshot.state not in ("failed", "lost", "stopped"):
        return None
    need = _wrapped(Text.assemble((" why  ", "dim"), (diagnosis.title, "bold red")), width)
    need += _wrapped(Text.assemble((" fix  ", "dim"), (diagnosis.hint, "bold")), width)
    # Wrapped, not cut: what is at the end of such a line is often the file and the line number.
    evidence = [Text("      ").append(line) for line in diagnosis.because[:_EVIDENCE]]
    content = need + [part for line in evidence for part in _wrapped(line, width)]
    return Section(lambda room: content[:room], len(need), len(content), 1)


def _wrapped(line: Text, width: int) -> list[Text]:
    """The line in at most three, the later ones under the text of the first."""
    if len(line.plain) <= width:
        return [line]
    cut = line.plain.rfind(" ", 6, width)
    cut = cut if cut > 6 else width
    rest = Text(" " * 6).append_text(line[cut:].copy() if line.plain[cut] != " " else line[cut + 1 :].copy())
    return [line[:cut], *_wrapped(rest, width)] if len(line.plain) < 3 * width else [line[:cut], clip(rest, width)]


def _events(snapshot: Snapshot, width: int) -> Section:
    happened = [
        Text(" ").append(time.strftime("%H:%M:%S", time.localtime(event.time)), style="dim").append(f"  {event.text}")
        for event in snapshot.events[-_EVENTS:]
    ]
    notes = [Text.assemble((" note      ", "dim"), note.replace("\n", " · ")) for note in snapshot.notes[-3:]]
    content = [clip(line, width) for line in notes + happened]
    return Section(lambda room: content[-room:], min(1, len(content)), len(content), 5, is_optional=True)


def _curve(snapshot: Snapshot, width: int, height: int | None) -> Section:
    """The loss with its axes: from the lines that a tall terminal has over what all else needs."""
    most = min(_CURVE_LINES, (height or 0) - _CURVE_FROM)
    content = chart.lines(snapshot.loss_history, snapshot.eval_losses, width, most)
    return Section(lambda room: chart.lines(snapshot.loss_history, snapshot.eval_losses, width, room), chart.LEAST_LINES, len(content), 6, is_optional=True)


def _is_told_elsewhere(line: str, snapshot: Snapshot) -> bool:
    """A note stands in the panel above; what gloo says of a name that it does not need means nothing."""
    return line.removeprefix("note: ") in snapshot.notes or _HARMLESS in line


def _logs(snapshot: Snapshot, width: int, *, bounded: bool) -> Section:
    """The last lines of every rank that said something new, as many of each as there is room for."""
    tails = {row.rank: tuple(line for line in row.log_tail if not _is_told_elsewhere(line, snapshot)) for row in snapshot.ranks}
    rows = [row.model_copy(update={"log_tail": tails[row.rank]}) for row in snapshot.ranks if tails[row.rank]]
    most = sum(1 + len(row.log_tail[-(10_000 if bounded else _LOG_LINES_UNBOUNDED) :]) for row in rows)

    def draw(room: int) -> list[Text]:
        left, content = room, []
        for place, row in enumerate(rows):
            share = left // (len(rows) - place)
            if share < 2:
                continue
            tail = row.log_tail[-(share - 1) :]
            content.append(clip(Text(f" log of rank {row.rank} on {row.node}", style="dim"), width))
            content += [clip(Text(f"   {line}"), width) for line in tail]
            left -= 1 + len(tail)
        return content

    return Section(draw, min(2, most), most, 7, is_optional=True)


def _footer(snapshot: Snapshot, width: int, height: int | None) -> list[Text]:
    """The next commands side by side, or below each other so that they can be copied; where lines are dear and the
    names long, as the alternatives of one: homelab status|stop RUN."""
    pieces = [
        Text.assemble((f" {command.purpose:<7}  ", "dim"), f"{command.command}  ") for command in snapshot.next_commands
    ]
    if sum(len(piece.plain) for piece in pieces) <= width + 2:
        return [clip(Text().join(pieces), width)] if pieces else []
    if height is None or height >= _TALL:
        return [clip(piece, width) if height else piece for piece in pieces]
    parts = [command.command.split(" ", 2) for command in snapshot.next_commands]
    rest = parts[0][-1]
    verbs = "|".join(part[1] for part in parts if part[-1] == rest)
    return [clip(Text.assemble((" next  ", "dim"), f"homelab {verbs} {rest}"), width)]
