"""Secrets of a run that is over, which a node had kept and has removed: an event of the run, and a line for the person."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from homelab.controller.run import event_log, events
from homelab.controller.run.paths import RunPaths


def tell(runs_dir: Path, answers: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for every run whose secrets were still on a node, from the nodes' answers to "runs"; an event of the run, too."""
    return [
        f"{run} is over: {note(RunPaths(runs_dir / run), node)}"
        for node, answer in answers.items()
        for run in answer.get("secrets_removed", ())
    ]


def note(paths: RunPaths, node: str) -> str:
    """Write it down, unless this controller does not know the run; the words."""
    text = f"the token that {node} had kept was removed: this run was not ended there in the usual way"
    if os.path.isfile(paths.run_json):
        event_log.append(paths, events.note(text))
    return text
