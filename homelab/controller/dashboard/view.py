"""The picture of a Snapshot. Pure: the same snapshot, width and height give the same lines, never more than fit.

Colour has a meaning, and a sign or a word beside it that says the same: green is well, yellow waits or deserves attention, red is trouble.
Only colours of the terminal's own theme are used, so that its owner can read them on any background.
"""

from __future__ import annotations

import math
import time

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.text import Text

from homelab.controller.dashboard import answer, chart, log_section, tables, view_state, words
from homelab.controller.dashboard.columns import clip, ends, wrap
from homelab.controller.dashboard.plain_characters import ascii_line
from homelab.controller.dashboard.screen import Section, fitted, fixed, joined
from homelab.controller.dashboard.snapshot import EventRow, Snapshot
from homelab.controller.dashboard.view_state import ViewState
from homelab.controller.run.events import Tone

_TALL = 34  # from here on three lines for commands are not missed elsewhere
_LOW = 12  # below it, one line for the keys is enough
_TONES: dict[Tone, tuple[str, str]] = {"": (" ", ""), "good": ("✓", "green"), "waiting": ("!", "yellow"), "trouble": ("✗", "bold red")}
_EVENTS, _EVENTS_TALL = 6, 10
_EVENT_INDENT = 12  # cells before the text of an event
_CURVE_LEAST, _CURVE_MOST = 8, 60
_LARGE = 30  # lines from which on there is room for more than what everybody needs
_CURVE_FROM, _CURVE_LINES = 38, 14


def render(snapshot: Snapshot, width: int, height: int | None, state: ViewState | None = None, *, is_ascii: bool = False) -> RenderableType:
    """The dashboard, `width` cells wide and `height` lines high (the footer at the bottom); None: as long as it is."""
    drawn = lines(snapshot, width, height, state)
    return Group(*(map(ascii_line, drawn) if is_ascii else drawn))


def lines(snapshot: Snapshot, width: int, height: int | None, state: ViewState | None = None) -> list[Text]:
    """The same as lines, for a terminal of at least 40 x 8. `state`: what was chosen by keys; None where there are none."""
    chosen = state or ViewState()
    head = _header(snapshot, width)
    progress = _progress(snapshot, width, is_large=height is None or height >= _LARGE)
    foot = footer_lines(snapshot, width, height, state)
    cause = answer.fix_section(snapshot, width)
    sections = [
        fixed(head, 0),
        *([fixed(help_lines(width), 1)] if chosen.is_help else []),
        fixed(progress, 2),
        *([cause] if cause else []),
        tables.nodes(snapshot.nodes, width, 3, snapshot.left_out),
        tables.ranks(snapshot.ranks, width, 4, chosen.rank),
        _curve(snapshot, width, height),
        _events(snapshot, width, height),
        log_section.section(snapshot, width, chosen, is_bounded=height is not None),
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
    parts += [str(snapshot.stopped_owner)] if snapshot.stopped_owner else []
    return "  ".join(parts)


def _header(snapshot: Snapshot, width: int) -> list[Text]:
    """The answer; below it what runs here: its name, recipe, ranks and supervisor."""
    is_under_way = snapshot.running_s is not None and snapshot.state in ("starting", "running", "stopping", "lost")
    since = Text(f"for {words.duration(snapshot.running_s)} " if is_under_way else "", style="dim")
    said = Text(" ").append_text(answer.line(snapshot))
    has_room = is_under_way and cell_len(said.plain) + cell_len(since.plain) + 2 <= width
    first = [ends(said, since, width)] if has_room else wrap(said, width, 3)
    count = len(snapshot.ranks)
    parts = [snapshot.recipe, f"{count} rank{'s' * (count != 1)} on {len(snapshot.nodes)} node{'s' * (len(snapshot.nodes) != 1)}"]
    if snapshot.attempt > 1:
        parts.append(f"attempt {snapshot.attempt}")
    lines = [" · ".join(["", *(part for part in parts if part)])]
    if snapshot.supervisor:
        supervisor = f"supervisor: {snapshot.supervisor}"
        fits = len(snapshot.run + lines[0]) + len(supervisor) + 4 <= width
        lines = [f"{lines[0]} · {supervisor}"] if fits else [*lines, supervisor]
    named = Text.assemble(" ", (snapshot.run, "bold"), (lines[0], "dim"))
    return first + [part for line in (named, *(Text(f" {line}", style="dim") for line in lines[1:])) for part in wrap(line, width, 3, 2)]


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
    if snapshot.accuracy is not None:
        right = Text.assemble(("judged rightly ", "dim"), words.percent(100 * snapshot.accuracy))
    if snapshot.eval_losses:
        ends_ = dict.fromkeys((snapshot.eval_losses[0], snapshot.eval_losses[-1]))
        held_out = Text.assemble(("eval ", "dim"), " → ".join(words.loss(point.loss) for point in ends_))
        if snapshot.eval_accuracy is not None:
            held_out.append(f", {words.percent(100 * snapshot.eval_accuracy)}")
        best = snapshot.best_eval
        is_inside = best is not None and best not in ends_
        if best is not None and is_inside:  # with keep_best it is the result
            held_out.append(f", best {words.loss(best.loss)} in step {best.step}")
        both = right + Text("   ") + held_out
        right = both if not is_inside or len(left.plain) + 3 + len(both.plain) <= width else held_out
    room = width - len(left.plain) - len(right.plain) - 6
    if room >= _CURVE_LEAST:
        curve = words.sparkline([point.loss for point in snapshot.loss_history], min(room, _CURVE_MOST))
        left.append(f"  {curve}")
    return clip(left.append("   ").append_text(right), width)


def _facts(snapshot: Snapshot) -> list[tuple[str, str]]:
    pairs = []
    if snapshot.tokens_per_s is not None and snapshot.state in ("running", "stopping"):
        pairs.append(("", f"{words.count(snapshot.tokens_per_s)} tokens/s"))
    if snapshot.efficiency is not None:
        machines = "cards" if any(row.gpus for row in snapshot.nodes) else "machines"
        guessed = "" if snapshot.is_efficiency_measured else ", guessed"
        planned = "" if snapshot.planned_efficiency is None else f" (planned {100 * snapshot.planned_efficiency:.0f} %{guessed})"
        pairs.append(("", f"{100 * snapshot.efficiency:.0f} % of the sum of the {machines}{planned}"))
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
    if snapshot.restarts:
        pairs.append(("restarts", str(snapshot.restarts)))
    return pairs


def _bar(snapshot: Snapshot, width: int) -> Text:
    total = snapshot.total_steps
    label = f"  step {snapshot.step}/{total}  {100 * snapshot.step // total:3d} % " if total else f"  step {snapshot.step} "
    room = max(4, width - len(label) - 1)
    done = min(room, room * snapshot.step // total) if total else 0
    _, style, _ = answer.STATES[snapshot.state]
    return clip(Text(" ").append("━" * done, style=style).append("─" * (room - done), style="dim").append(label), width)


def _events(snapshot: Snapshot, width: int, height: int | None) -> Section:
    """The newest notes and events, each whole: what has no room is the oldest."""
    shown = snapshot.events[-(_EVENTS if height is None or height < _CURVE_FROM else _EVENTS_TALL) :]
    notes = [Text.assemble((" note       ", "dim"), note.replace("\n", " · ")) for note in snapshot.notes[-3:]]
    blocks = [wrap(line, width, _EVENT_INDENT) for line in (*notes, *map(_event, shown))]

    def draw(room: int) -> list[Text]:
        first = next((number for number in range(len(blocks)) if sum(map(len, blocks[number:])) <= room), None)
        return blocks[-1][:room] if first is None else [line for block in blocks[first:] for line in block]

    return Section(draw, min(1, len(blocks)), sum(map(len, blocks)), 5, is_optional=True)


def _event(event: EventRow) -> Text:
    sign, style = _TONES[event.tone]
    word, colon, rest = event.text.partition(":")
    moment = time.strftime("%H:%M:%S", time.localtime(event.time))
    return Text.assemble((f" {moment} ", "dim"), (f"{sign} {word}", style), colon + rest)


def _curve(snapshot: Snapshot, width: int, height: int | None) -> Section:
    """The loss with its axes: from the lines that a tall terminal has over what all else needs."""
    most = min(_CURVE_LINES, (height or 0) - _CURVE_FROM)
    content = chart.lines(snapshot.loss_history, snapshot.eval_losses, width, most)
    return Section(
        lambda room: chart.lines(snapshot.loss_history, snapshot.eval_losses, width, room),
        chart.LEAST_LINES,
        len(content),
        6,
        is_optional=True,
    )


def footer_lines(snapshot: Snapshot, width: int, height: int | None, state: ViewState | None) -> list[Text]:
    """The commands, and below them the keys, where there are any (`state` is not None)."""
    keys = [_key_line(snapshot, width, state)] if state is not None else []
    return keys if keys and height is not None and height < _LOW else _commands(snapshot, width, height) + keys


def help_lines(width: int) -> list[Text]:
    """What each key does."""
    return [Text(" keys", style="bold"), *(clip(Text.assemble((f"   {key:<9} ", "bold"), does), width) for key, does in view_state.KEYS)]


def _commands(snapshot: Snapshot, width: int, height: int | None) -> list[Text]:
    """Side by side, or below each other so that they can be copied; where lines are dear and the names long, as the
    alternatives of one: homelab status|stop RUN."""
    pieces = [Text.assemble((f" {command.purpose:<7}  ", "dim"), f"{command.command}  ") for command in snapshot.next_commands]
    if sum(len(piece.plain) for piece in pieces) <= width + 2:
        return [clip(Text().join(pieces), width)] if pieces else []
    if height is None or height >= _TALL:
        return [clip(piece, width) if height else piece for piece in pieces]
    parts = [command.command.split(" ", 2) for command in snapshot.next_commands]
    rest = parts[0][-1]
    verbs = "|".join(part[1] for part in parts if part[-1] == rest)
    return [clip(Text.assemble((" next  ", "dim"), f"homelab {verbs} {rest}"), width)]


def _key_line(snapshot: Snapshot, width: int, state: ViewState) -> Text:
    """The keys in order of importance, as many as fit. That leaving ends nothing comes first."""
    line = Text(" paused  ", style="yellow") if state.is_paused else Text(" ")
    goes_on = snapshot.state not in ("done", "failed", "stopped") or (bool(snapshot.supervisor) and snapshot.state == "failed")
    pieces = [
        "q leave (the run continues)" if goes_on else "q leave",
        "h help",
        "p go on" if state.is_paused else "p pause",
        "j k rank",
        "up down log",
    ]
    for number, piece in enumerate(pieces):
        text = piece if not number else f"   {piece}"
        if len(line.plain) + len(text) > width:
            break
        line.append(text, style="dim")
    return clip(line, width)
