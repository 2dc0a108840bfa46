"""The person's own file behind a copy that homelab has shipped: whoever mends the copy on one node has mended nothing."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from homelab.planning.command import file_word


@dataclass(frozen=True)
class Shipped:
    """A file of a run, data or a program. `copy` is how the path of its copy ends on every node (`homelab.node.transfer.data_path`).

    `original`: where it was on the controller at the launch; its name alone, where only the nodes know the run.
    """

    copy: str
    original: str
    recipe_file: str

    def place(self, where: str) -> str | None:
        """FILE and line of the person's own file for those of the copy ("FILE:7"; "FILE, line 7"); None for any other file."""
        before, found, line = where.partition(f"/{self.copy}")
        return f"{self.original}{line}" if found and before and line[:1] in ("", ":", ",") else None


def of_run(described: Mapping[str, Any]) -> tuple[Shipped, ...]:
    """The shipped files of a run.json; none where it is damaged."""
    return tuple(
        Shipped(copy_of(entry), original_of(entry) or str(entry["name"]), recipe_file(described))
        for entry in _entries(described)
    )


def originals(described: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(path on the controller of the launch, sha256 then) of every shipped file of a run.json, where the path is known."""
    return [(original, str(entry["sha256"])) for entry in _entries(described) if (original := original_of(entry))]


def script_of(described: Mapping[str, Any]) -> str | None:
    """Path of the run's own program on the controller of the launch; None for a run of the built-in worker, or where it is not known."""
    data = described.get("data")
    entry = data.get("script") if isinstance(data, dict) else None
    return next((original_of(known) for known in _entries(described) if known is entry), None)


def original_of(entry: Mapping[str, Any]) -> str | None:
    """None where run.json came from a node: there the path is that of its copy."""
    path = str(entry["path"])
    return None if path.endswith(f"/{copy_of(entry)}") else path


def copy_of(entry: Mapping[str, Any]) -> str:
    """The end of the copy's path on every node."""
    if entry.get("folder") and entry.get("inside"):  # with others, below a common folder
        return f"data/{str(entry['folder'])[:16]}/{entry['inside']}"
    return f"data/{str(entry['sha256'])[:16]}/{posixpath.basename(str(entry['name']))}"


def recipe_file(described: Mapping[str, Any]) -> str:
    """The recipe's file name as a shell word."""
    name = described.get("recipe_file")
    return file_word(name) if isinstance(name, str) and name else "RECIPE"


def _entries(described: Mapping[str, Any]) -> list[dict[str, Any]]:
    data = described.get("data")
    return [
        entry
        for entry in (data.values() if isinstance(data, dict) else ())
        if isinstance(entry, dict) and entry.get("sent") == "shipped" and all(entry.get(key) for key in ("path", "name", "sha256"))
    ]
