"""The fence of an attempt: a rank checks before every write that no newer attempt of its run has started on this node.

A node that was cut off does not know that the others continue without it as the next attempt. Its checkpoints are still correct: the
recipe alone decides the training, so the checkpoint of step N is the same in every attempt, and a run may resume from any complete one.
The danger is in the files. When the node is reached again, the next attempt starts in the same folder. Two writers would replace
each other's checkpoints, remove old ones by two different ideas of the newest, and write a final model while the others still train.
The number of the attempt, which only grows, is therefore the generation (a fencing token): the agent refuses to start a lower number
than it knows, and a worker that reads a higher one ends.
"""

from __future__ import annotations

import os
from pathlib import Path

from homelab.worker.errors import WorkerError


def newest_attempt(run_dir: Path) -> int:
    """The highest attempt of which this node has a plan; 0 without a plan. An empty folder does not count."""
    folder = run_dir / "attempts"
    names = os.listdir(folder) if folder.is_dir() else []
    numbers = sorted((int(name) for name in names if name.isdecimal()), reverse=True)  # a run of months has thousands
    return next((number for number in numbers if (folder / str(number) / "plan.json").exists()), 0)


def check(run_dir: Path, attempt: int) -> None:
    """Raises WorkerError when `attempt` is not the newest of this node any more. One listing of a folder."""
    newest = newest_attempt(run_dir)
    if newest > attempt:
        raise WorkerError(
            f"attempt {newest} has replaced this one, attempt {attempt}: it writes nothing any more",
            where=str(run_dir / "attempts" / str(newest)),
            hint=f"nothing is lost, attempt {newest} continues: homelab status {run_dir.name}",
        )
