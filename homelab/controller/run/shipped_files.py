"""The person's own file behind a copy that homelab has shipped: a fix belongs into that file. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from homelab.controller.base.shell import file_word, quote_words
from homelab.shared.protocol import layout


@dataclass(frozen=True)
class Shipped:
    """A file of a run, data or a program. `copy` is how the path of its copy ends on every node (`homelab.shared.protocol.layout.data_file`).

    `original`: where it was on the controller at the launch; its name alone, where only the nodes know the run. `launch`: what starts
    the same training anew, behind `homelab`.
    """

    copy: str
    original: str
    launch: str

    def place(self, where: str) -> str | None:
        """FILE and line of the person's own file for those of the copy ("FILE:7"; "FILE, line 7"); None for any other file."""
        before, separator, line = where.partition(f"/{self.copy}")
        return f"{self.original}{line}" if separator and before and line[:1] in ("", ":", ",") else None


def of_run(described: Mapping[str, Any]) -> tuple[Shipped, ...]:
    """The shipped files of a run.json; none where it is damaged."""
    return tuple(Shipped(copy_of(entry), original_of(entry) or str(entry["name"]), launch(described)) for entry in _entries(described))


def originals(described: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(path on the controller of the launch, sha256 then) of every shipped file of a run.json, where the path is known."""
    return [(original, str(entry["sha256"])) for entry in _entries(described) if (original := original_of(entry))]


def script_of(described: Mapping[str, Any]) -> str | None:
    """Path of the run's own program on the controller of the launch; None for a run of the built-in worker, or where it is not known."""
    data = described.get("data")
    entry = data.get("script") if isinstance(data, dict) else None
    return next((original_of(candidate) for candidate in _entries(described) if candidate is entry), None)


def original_of(entry: Mapping[str, Any]) -> str | None:
    """None where run.json came from a node: there the path is that of its copy."""
    path = str(entry["path"])
    return None if path.endswith(f"/{copy_of(entry)}") else path


def copy_of(entry: Mapping[str, Any]) -> str:
    """The end of the copy's path on every node."""
    return layout.data_file(entry)


def launch(described: Mapping[str, Any]) -> str:
    """The command that starts this training anew, behind `homelab`, as shell text: of a recipe's file, or what was typed behind `homelab run --`."""
    name, typed = described.get("recipe_file"), described.get("typed")
    words = typed.get("words") if isinstance(typed, dict) else None
    if isinstance(words, list) and words and all(isinstance(word, str) for word in words):
        return f"run -- {quote_words(words)}"
    return f"launch {file_word(name) if isinstance(name, str) and name else 'RECIPE'}"


def _entries(described: Mapping[str, Any]) -> list[dict[str, Any]]:
    data = described.get("data")
    return [
        entry
        for entry in (data.values() if isinstance(data, dict) else ())
        if isinstance(entry, dict)
        and entry.get("sent") == "shipped"
        and all(entry.get(key) for key in ("path", "name", "sha256"))
        and _is_placed(entry)
    ]


def _is_placed(entry: Mapping[str, Any]) -> bool:
    """Whether the entry says where the copy lies on the nodes."""
    try:
        layout.data_file(entry)
    except (KeyError, ValueError):
        return False
    return True
