"""What a topic of `homelab explain` is. The topics themselves are in the folder topics/."""

from __future__ import annotations

from dataclasses import dataclass, fields

from homelab.controller.diagnose import data_file


@dataclass(frozen=True)
class Topic:
    """One way a training on machines at home goes wrong.

    `seen` is what a person meets (of a log, as it is printed there). `do` are the steps, the most useful first; a command
    among them stands as it is typed, with NODE, RUN, RECIPE and ADDRESS for the reader's own. `checks` are ids of preflight's checks
    that are about this (each belongs to one topic), `checks_too` others that may find it; `rules` are ids of `rules` and `endings`
    that lead here. `words` are further words a person may look it up by. `says` is a regular expression of messages that mean
    this topic although their rule is a general one; `lines` is one of lines that homelab itself writes of a run. `next_command` is
    what a reader may type first, where it is not the check that finds it.
    """

    id: str
    title: str
    seen: tuple[str, ...]
    cause: str
    do: tuple[str, ...]
    checks: tuple[str, ...] = ()
    checks_too: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    says: str = ""
    lines: str = ""
    next_command: str = ""


def load(name: str) -> tuple[str, tuple[Topic, ...]]:
    """(heading, topics) of the file homelab/controller/diagnose/topics/NAME.toml. The line breaks of `cause` are blanks."""
    document = data_file.load(f"topics/{name}.toml")
    return document["heading"], tuple(_topic(entry) for entry in document["topics"])


def _topic(entry: dict[str, str | list[str]]) -> Topic:
    assert entry.keys() <= {field.name for field in fields(Topic)}, entry
    values = {key: tuple(value) if isinstance(value, list) else " ".join(value.split()) for key, value in entry.items()}
    return Topic(**values)  # type: ignore[arg-type]
