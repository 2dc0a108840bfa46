"""Why a run failed and what fixes it, as a box. Pure."""

from __future__ import annotations

from rich.text import Text

from homelab.controller.dashboard.columns import clip
from homelab.controller.dashboard.screen import Section
from homelab.controller.dashboard.snapshot import Snapshot

_EVIDENCE = 4
_STATES = ("failed", "lost", "stopped")


def section(snapshot: Snapshot, width: int) -> Section | None:
    """The reason and the command that fixes it; the evidence and the lines of the box where there is room.

    The box has no sides, so that a command in it can be copied.
    """
    diagnosis = snapshot.diagnosis
    if diagnosis is None or snapshot.state not in _STATES:
        return None
    need = _wrapped(Text.assemble((" why  ", "dim"), (diagnosis.title, "bold red")), width)
    need += _wrapped(Text.assemble((" fix  ", "dim"), (diagnosis.hint, "bold")), width)
    # Wrapped, not cut: what is at the end of such a line is often the file and the line number.
    evidence = [Text("      ").append(line) for line in diagnosis.because[:_EVIDENCE]]
    content = need + [part for line in evidence for part in _wrapped(line, width)]
    title = f" ── diagnosis of attempt {snapshot.attempt} " if snapshot.attempt else " ── diagnosis "
    above = clip(Text(title + "─" * max(0, width - len(title) - 1), style="red"), width)
    below = Text(" " + "─" * max(0, width - 2), style="red")

    def draw(room: int) -> list[Text]:
        return [above, *content[: room - 2], below] if room >= len(need) + 2 else content[:room]

    return Section(draw, len(need), len(content) + 2, 1)


def _wrapped(line: Text, width: int) -> list[Text]:
    """The line in at most three, the later ones under the text of the first."""
    if len(line.plain) <= width:
        return [line]
    cut = line.plain.rfind(" ", 6, width)
    cut = cut if cut > 6 else width
    rest = Text(" " * 6).append_text(line[cut:].copy() if line.plain[cut] != " " else line[cut + 1 :].copy())
    return [line[:cut], *_wrapped(rest, width)] if len(line.plain) < 3 * width else [line[:cut], clip(rest, width)]
