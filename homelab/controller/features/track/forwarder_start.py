"""What a started run is left with: its supervisor, and a forwarder for each tracker, a process on this machine.

A forwarder that fails or hangs is in nobody's way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from homelab.controller.attempt.placement import RunView, SupervisorPlacement
from homelab.controller.base import package
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.features.track import event_files
from homelab.controller.features.track.trackers import TRACKERS
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_folder
from homelab.controller.run.paths import RunPaths


class TrackingView(Protocol):
    """How the person is told."""

    def tracked(self, tracker: str, error: HomelabError | None) -> None:
        """The run's metrics go to this tracker, or do not yet, and the run trains all the same."""
        ...


class StartView(RunView, TrackingView, Protocol):
    """How the person is told of the supervisor and of the trackers of a run that was started."""


@contextmanager
def left_running(
    placement: SupervisorPlacement, fleet: Fleet, paths: RunPaths, cluster_file: Path, names: Sequence[str], view: StartView
) -> Iterator[None]:
    """The run is announced inside. Whatever becomes of that, and before a Ctrl-C counts again, the run has its supervisor and its forwarders."""
    try:
        yield
    finally:
        placement.leave(fleet, paths, cluster_file, names, view)
        start(paths, cluster_file, view)


def start(paths: RunPaths, cluster_file: Path, view: TrackingView) -> None:
    """Start those that [tracking] to of the recipe names. One that is at work already goes on, and a second one ends at once."""
    for tracker in run_folder.description_of(paths).recipe.tracking.to:
        try:
            module, requirement = ("tensorboard", event_files.REQUIREMENT) if tracker == "tensorboard" else TRACKERS[tracker].package
            package.require(module, requirement)
            _start(paths, cluster_file, tracker)
        except HomelabError as error:
            again = homelab(f"track --to {tracker}", paths.name)
            view.tracked(tracker, HomelabError(error.message, where=error.where, hint=Hint("{}; then: {}", Hint.said(error.hint), again)))
        else:
            view.tracked(tracker, None)


def _start(paths: RunPaths, cluster_file: Path, tracker: str) -> None:
    command = [
        sys.executable, "-P", "-m", "homelab", "track", paths.name, "--to", tracker, "--keep-trying",
        "--cluster", str(cluster_file.resolve()), "--runs-dir", str(paths.root.parent.resolve()),
    ]  # fmt: skip
    words = [word.encode("utf-8", "surrogateescape") for word in command]
    log_file = paths.tracking / f"{tracker}.log"
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, env={**os.environ, "PYTHONUTF8": "1"}
            )
    except (OSError, ValueError) as error:
        raise HomelabError(
            f"the metrics are not sent to {tracker}: {error}", where=str(log_file), hint=homelab("status", paths.name)
        ) from error
