"""What is left of runs that are over: after a power cut, or a controller that never came back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from homelab.controller.base.errors import HomelabError
from homelab.controller.features.status import monitor
from homelab.controller.features.stop import stop
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import leftovers, ownership, run_lookup


def end(
    fleet: Fleet, runs_dir: Path, say: Callable[[str], None]
) -> tuple[list[stop.Outcome], list[str], dict[str, HomelabError], list[str]]:
    """End them on every node: (what was ended, the runs that live and were left alone, the nodes that could not be asked, what else was repaired).

    A run that trains is left alone, and so is one that somebody owns: a supervisor, here or anywhere, or a command.
    """
    say("asking the nodes what runs there")
    answers, unreachable = fleet.ask("runs")
    repaired = leftovers.tell(runs_dir, answers)
    ended, kept = [], []
    for name in sorted({entry["name"] for answer in answers.values() for entry in answer["runs"] if entry["alive"]}):
        paths = run_lookup.run(fleet, runs_dir, name, say)
        watcher = monitor.Watcher(fleet, paths)
        snapshot = watcher.look()
        if ownership.is_orphaned(snapshot.state, watcher.owner):
            ended.append(stop.stop(fleet, paths, say))
        else:
            kept.append(name)
    return ended, kept, unreachable, repaired
