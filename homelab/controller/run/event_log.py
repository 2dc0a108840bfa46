"""events.jsonl of a run's folder: what happened, one JSON object per line; also that a node has removed secrets of a run that is over."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from homelab.controller.remote.poll_reply import is_moment
from homelab.controller.run import events
from homelab.controller.run.events import Event
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.store import append_lines, read_lines

_GATHERED = "gathered"  # key of an event that was written down on a node first


def append(paths: RunPaths, event: Event) -> None:
    """Write down that something happened: now, unless the event has a time of its own."""
    append_lines(paths.events_jsonl, [{"time": time.time(), **event.line()}])


def lines(paths: RunPaths) -> list[dict[str, Any]]:
    """What happened, in the order of its writing: a clock may be set back. What was gathered from a node later is where its time was.

    What has no time that can be is left out.
    """
    ordered: list[dict[str, Any]] = []
    for line in read_lines(paths.events_jsonl):
        if not is_moment(line.get("time")):
            continue
        place = len(ordered)
        while line.get(_GATHERED) and place and not ordered[place - 1].get(_GATHERED) and ordered[place - 1]["time"] > line["time"]:
            place -= 1
        ordered.insert(place, line)
    return ordered


def gather(paths: RunPaths, new: list[dict[str, Any]]) -> None:
    """Write down what was written down elsewhere. Two machines never write at the same instant, so the time tells what is known."""
    times = {line["time"] for line in lines(paths)} if new else set()
    append_lines(paths.events_jsonl, [{**line, _GATHERED: True} for line in new if line["time"] not in times])


def tell_secrets_removed(runs_dir: Path, answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for every run whose secrets were still on a node, from the nodes' answers to "runs"; an event of the run, too."""
    return [
        f"{run} has finished: {note_secrets_removed(RunPaths(runs_dir / run), node)}"
        for node, answer in answers.items()
        for run in answer.get("secrets_removed", ())
    ]


def note_secrets_removed(paths: RunPaths, node: str) -> str:
    """Write it down, unless this controller does not know the run; the words."""
    text = f"the token on {node} was removed: this run did not end there in the usual way"
    if os.path.isfile(paths.run_json):
        append(paths, events.note(text))
    return text
