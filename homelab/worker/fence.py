"""Whoever was replaced writes no more: the look that a rank takes before anything of it becomes part of the run.

A node that was cut off cannot know that the others have gone on without it as the next attempt. What it saves in that time is no
danger to the training itself: the recipe alone decides it, so the checkpoint of step N is the same point of the same curve whoever
saved it in whichever attempt, and any whole one of this recipe may be gone on from. What it can spoil are the files: when it is
reached again the next attempt starts in the same folder, and two writers would replace each other's checkpoints, retain and remove
by two different ideas of what is newest, and leave a final model while the others still train. So the number of the attempt, which
only grows, is the generation: the agent refuses to start a lower one than it knows, and a worker that finds a higher one ends.
"""

from __future__ import annotations

from pathlib import Path

from homelab.worker.errors import WorkerError


def newest_attempt(run_dir: Path) -> int:
    """The highest attempt that this node was given a plan of; 0 where it knows none. An empty folder is nobody's attempt."""
    plans = run_dir.glob("attempts/*/plan.json")
    return max((int(plan.parent.name) for plan in plans if plan.parent.name.isdecimal()), default=0)


def check(run_dir: Path, attempt: int) -> None:
    """Raises WorkerError when `attempt` is not the newest of this node any more. One listing of a folder."""
    newest = newest_attempt(run_dir)
    if newest > attempt:
        raise WorkerError(
            f"attempt {newest} has replaced this one, attempt {attempt}: it writes nothing more",
            where=str(run_dir / "attempts" / str(newest)),
            hint=f"nothing is lost, attempt {newest} goes on: homelab status {run_dir.name}",
        )
