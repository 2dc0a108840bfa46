"""What is left of runs that are over: after a power cut, or a controller that never came back."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from homelab.control import find, leftovers, stop, watch
from homelab.control.stop import Outcome
from homelab.errors import HomelabError
from homelab.remote.fanout import Fleet
from homelab.runs.state import FINISHED


def end(fleet: Fleet, runs_dir: Path, say: Callable[[str], None]) -> tuple[list[Outcome], list[str], dict[str, HomelabError], list[str]]:
    """End them on whatever node: (what was ended, the runs that live and were left alone, the nodes that could not be asked, what else was mended).

    A run that trains is left alone, and so is one whose supervisor is at work, here or on its head.
    """
    say("asking the nodes what runs there")
    answers, unreachable = fleet.ask("runs")
    mended = leftovers.tell(runs_dir, answers)
    ended, kept = [], []
    for name in sorted({entry["name"] for answer in answers.values() for entry in answer["runs"] if entry["alive"]}):
        paths = find.run(fleet, runs_dir, name, say)
        seen = watch.Watcher(fleet, paths, "").look()
        if seen.supervisor or seen.state not in (*FINISHED, "lost"):
            kept.append(name)
        else:
            ended.append(stop.stop(fleet, paths, say))
    return ended, kept, unreachable, mended
