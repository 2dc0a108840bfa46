"""What happens to a run, as values: a kind, the attempt it is about, and details. Sentences for people are made here and nowhere else. Pure."""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from homelab.controller.base.sanitize import plain_lines

Kind = Literal[
    "launched", "attempt-started", "attempt-resumed", "attempt-not-started", "attempt-stopped", "attempt-superseded", "left-out",
    "interrupted", "start-stopped", "start-failed", "state", "trouble", "restart", "waiting", "given-up", "stopped",
    "checkpoint-unused", "mended", "adopted", "note", "given-back", "came-back",
]  # fmt: skip

# Kind -> its sentences; the first whose fields are all there is taken.
_SENTENCES: dict[Kind, tuple[str, ...]] = {
    "launched": ("launched",),
    "attempt-started": ("attempt {attempt} started",),
    # What a program of one's own makes of what lies before it is not seen.
    "attempt-resumed": (
        "attempt {attempt}: the program was started again; it had {saved}",
        "attempt {attempt} continues after step {step}",
    ),
    "attempt-not-started": ("attempt {attempt} did not start",),
    "attempt-stopped": ("attempt {attempt} was not started: the run was stopped by hand",),
    "attempt-superseded": ("attempt {attempt} was not started from here: another controller continued the run",),
    "left-out": ("{node} is left out of attempt {attempt}: {why}",),
    "interrupted": ("interrupted before it ran",),
    "start-stopped": ("not started: it was stopped by hand",),
    "start-failed": ("the start failed",),
    "state": ("{state}: {title}", "{state}"),
    "trouble": ("trouble: {because}",),
    "restart": ("restart: {because}",),
    "waiting": ("cannot continue yet: {message}",),
    "given-up": ("given up: {because}",),
    "stopped": ("stopped by hand",),
    "checkpoint-unused": ("checkpoint {step} on {node} is not used: {why}",),
    "mended": ("repaired from {node}: {files}",),
    "adopted": ("adopted from {node}",),
    "note": ("{text}",),
    "given-back": (
        "{node} was given back to its owner until {until}: {because}",
        "{node} was given back to its owner until {until}",
        "{node} was given back to its owner: {because}",
        "{node} was given back to its owner",
    ),
    "came-back": ("{node} came back from its owner",),
}
Tone = Literal["", "good", "waiting", "trouble"]
_TONES: dict[Kind, Tone] = {
    "trouble": "trouble", "given-up": "trouble", "start-failed": "trouble", "attempt-not-started": "trouble",
    "left-out": "waiting", "restart": "waiting", "waiting": "waiting", "stopped": "waiting", "interrupted": "waiting", "start-stopped": "waiting",
    "attempt-stopped": "waiting", "checkpoint-unused": "waiting", "given-back": "waiting",
}  # fmt: skip
_TONES_OF_STATES: dict[object, Tone] = {"done": "good", "failed": "trouble", "lost": "trouble", "stopping": "waiting", "stopped": "waiting"}
# What a "restart" can be about that is no fault and counts as none: a node goes to its owner, or comes back.
OF_THE_HOUSE = ("leave", "return")
# Keys of a line that only programs read.
_ONLY_IN_THE_FILE = {"time", "event", "attempt", "kind", "ranks", "clean", "gathered"}


@dataclass(frozen=True)
class Event:
    """One thing that happened. `values` are the words and numbers of its sentence, and details."""

    kind: Kind
    attempt: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """What it says, without the details."""
        values = {"attempt": self.attempt, **self.values}
        return next(words for words in _SENTENCES[self.kind] if _fields_of(words) <= set(values)).format_map(values)

    def line(self) -> dict[str, Any]:
        """The line of events.jsonl, without its time: `event` is the kind, `what` the sentence."""
        attempt = {} if self.attempt is None else {"attempt": self.attempt}
        return {"what": self.sentence, "event": self.kind, **attempt, **self.values}

    @property
    def begins_an_attempt(self) -> bool:
        """Whether an attempt began, or was about to."""
        return self.kind in ("attempt-started", "attempt-resumed", "attempt-not-started")

    @property
    def ends_all(self) -> bool:
        """Whether a person has stopped the run, and every node has answered that nothing of it is left."""
        return self.kind == "stopped" and bool(self.values.get("clean"))

    @property
    def tells_why_not_started(self) -> bool:
        """Whether nothing ran because of it."""
        return self.kind in ("start-failed", "attempt-not-started", "interrupted")

    @property
    def tone(self) -> Tone:
        """Whether it is trouble, needs patience or a decision ("waiting"), or is good news; "" for what is neither."""
        return _TONES_OF_STATES.get(self.values.get("state"), "") if self.kind == "state" else _TONES.get(self.kind, "")

    @property
    def is_a_failure(self) -> bool:
        """Whether the run was seen to have failed, or to be lost."""
        return self.kind == "state" and self.values.get("state") in ("failed", "lost")


def event(kind: Kind, attempt: int | None = None, /, **values: Any) -> Event:
    """An event of this kind."""
    return Event(kind, attempt, values)


def resumed(attempt: int, step: int, /, *, is_program: bool, **details: Any) -> Event:
    """The next attempt was started from the checkpoint of `step`, 0 for none. `is_program`: of one's own."""
    saved = {"saved": f"step-{step}" if step else "no checkpoint"} if is_program else {}
    return event("attempt-resumed", attempt, step=step, **saved, **details)


def given_back(attempt: int | None, node: str, until: str, because: str = "") -> Event:
    """The node is free for its owner; `until` is empty where no end is known, `because` where a person said so."""
    details = {"until": until, "because": because}
    return event("given-back", attempt, node=node, **{key: value for key, value in details.items() if value})


def note(text: str, **values: Any) -> Event:
    """What no other kind tells."""
    return event("note", text=text, **values)


def state(name: str, attempt: int, title: str | None = None) -> Event:
    """The run is in another state than before; `title` says why it failed."""
    return event("state", attempt, state=name, **({} if title is None else {"title": title}))


def read(line: Mapping[str, Any]) -> Event:
    """The event of a line of events.jsonl. A line of an unknown kind, of a damaged file or a newer version, is a note."""
    details = {key: value for key, value in line.items() if key not in ("time", "what", "event", "attempt", "gathered")}
    sentence, name, attempt = line.get("what"), line.get("event"), line.get("attempt")
    if isinstance(name, str) and name in _SENTENCES:
        return Event(name, attempt if isinstance(attempt, int) else None, details)
    return Event("note", None, {"text": sentence if isinstance(sentence, str) else "", **details})


def text_of(line: Mapping[str, Any]) -> str:
    """A line of events.jsonl for people, in one line: its sentence and those details that the sentence does not have."""
    kind = line.get("event")
    sentences = _SENTENCES.get(cast(Kind, kind), ()) if isinstance(kind, str) else ()
    hidden = _ONLY_IN_THE_FILE.union({"what"}, *(_fields_of(words) for words in sentences))
    details = {key: _said(value) for key, value in line.items() if key not in hidden}
    details_text = " · ".join(f"{key} {text}" for key, text in details.items() if text)
    return plain_lines(f"{_said(line.get('what', ''))}{': ' if details_text else ''}{details_text}").replace("\n", " · ")


def _said(value: object) -> str:
    """A word, a number, or a list of such, as text; nothing for what is nested deeper."""
    if isinstance(value, list):
        return ", ".join(str(entry) for entry in value if isinstance(entry, str | int | float))
    return str(value) if isinstance(value, str | int | float) else ""


def _fields_of(sentence: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(sentence) if name}
