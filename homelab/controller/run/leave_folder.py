"""given-back/ beside the runs: one file for each node that its owner wants, NODE.json.

It is about the node, and not about a run: every run that uses the node leaves it, and the next launch does not take it. A supervisor on a node has
such a folder beside its run, too, and is sent the file. Each file is replaced whole, so two commands at once leave one of the two wishes.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import ValidationError

from homelab.controller.base import elapsed
from homelab.controller.base.errors import BusyError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import house, leave, store
from homelab.controller.run.leave import Away, Leave, LeaveClock
from homelab.shared.protocol import files, layout

NAME = "given-back"


def read(runs_dir: Path, before: Mapping[str, Leave] | None = None) -> dict[str, Leave]:
    """Node -> its leave, also one that is over. A file that cannot be read now says what it said `before`."""
    found = {}
    for file in sorted((runs_dir / NAME).glob("*.json")):
        try:
            one = Leave.model_validate(store.read_object(file))
        except ValidationError:
            if before and file.stem in before:
                found[file.stem] = before[file.stem]
            continue
        if one.node == file.stem:
            found[one.node] = one
    return found


def write(runs_dir: Path, one: Leave) -> None:
    """Keep it. Raises HomelabError where the disk refuses."""
    folder = runs_dir / NAME
    file = folder / f"{layout.checked(one.node)}.json"
    with store.disk_errors_as_hints(file):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        store.keep_private(folder)
        files.write_json(file, one.model_dump(mode="json"), 0o600)


def lasting(runs_dir: Path) -> dict[str, Leave]:
    """Node -> its leave, of those that are not over."""
    return LeaveClock().lasting(read(runs_dir).values(), time.time(), elapsed.now_s())


def away(fleet: Fleet, runs_dir: Path, names: Collection[str]) -> dict[str, Away]:
    """Of these nodes, in their order: who is with its owner, because somebody typed it or because the node says so now."""
    now, known = time.time(), read(runs_dir)
    typed = LeaveClock().lasting(known.values(), now, elapsed.now_s())
    seen = house.away(fleet, [name for name in names if name not in typed], known)
    return {name: Away(typed[name].until_words(now)) if name in typed else seen[name] for name in names if name in typed or name in seen}


def refuse(fleet: Fleet, runs_dir: Path, names: Collection[str], command: str, *behind: str) -> None:
    """Raises BusyError where one of these nodes is with its owner. `command`: of ours, that takes --nodes; `behind`: its words after that."""
    owned = away(fleet, runs_dir, names)
    if not owned:
        return
    others = ",".join(name for name in names if name not in owned)
    back = homelab("yield", next(iter(owned)), "--back")
    raise BusyError(
        "; ".join(leave.sentence(name, one) for name, one in owned.items()), where=f"node {', '.join(owned)}",
        hint=Hint("train without it: {}; or take it back: {}", homelab(command, "--nodes", others, *behind), back) if others else back,
    )  # fmt: skip
