"""Starting a run's supervisor: a process of its own that outlives this terminal, on this machine or on the head node."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Literal, Protocol

from homelab.controller.attempt import remote_supervisor
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import hub_token, store, supervisor_lock
from homelab.controller.run.paths import RunPaths

_START_S = 30.0
Where = Literal["here", "head", "no"]


class RunView(Protocol):
    """How the person is told while a command starts a run."""

    def progress(self) -> AbstractContextManager[Say]:
        """Inside the block `say` tells what is being done."""
        ...

    def supervised(self, note: str) -> None:
        """The run has its supervisor; `note`, where it is not empty, says where."""
        ...

    def unsupervised(self, error: HomelabError) -> None:
        """The run trains, and its supervisor did not start."""
        ...


class SupervisorPlacement:
    """Where a run is to have its supervisor. A head that is this machine itself (`host = "local"`) is here."""

    def __init__(self, where: Where) -> None:
        self._where = where
        self._place: remote_supervisor.SupervisorPlace | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the run is to have one."""
        return self._where != "no"

    @contextmanager
    def prepare(self, fleet: Fleet, request: remote_supervisor.SupervisorRequest, say: Say) -> Iterator[None]:
        """Around the start of the training: raises HomelabError before it where the head cannot have the supervisor."""
        if self._where == "head" and fleet.cluster.node(request.head).host != "local":
            self._place = remote_supervisor.prepare(fleet, request, say)
        try:
            yield
        except BaseException:
            self._discard(fleet)
            raise

    def rehearse(self, fleet: Fleet, request: remote_supervisor.SupervisorRequest, say: Say) -> None:
        """Raise what `prepare` would raise; nothing is left of it."""
        with self.prepare(fleet, request, say):
            self._discard(fleet)

    def leave(self, fleet: Fleet, paths: RunPaths, cluster_file: Path, nodes: Collection[str], view: RunView) -> None:
        """Start it and tell the person. Where that fails the run is under way all the same: a warning, not an error."""
        try:
            with view.progress() as say:
                note = self.start(fleet, paths, cluster_file, nodes, say)
        except HomelabError as error:
            view.unsupervised(error)
        else:
            view.supervised(note)

    def _discard(self, fleet: Fleet) -> None:
        if self._place is not None:
            remote_supervisor.discard(fleet, self._place)

    def start(self, fleet: Fleet, paths: RunPaths, cluster_file: Path, nodes: Collection[str], say: Say) -> str:
        """Start it; what a person may want to know of it, empty where that is nothing. Raises HomelabError; the run itself goes on."""
        if self._where == "no":
            return ""
        place, self._place = self._place, None  # from here on it is not removed any more
        if place is not None:
            log = remote_supervisor.start(fleet, paths, place, say)
            return f"on {place.node}, also if this machine is off; its log there: {log}"
        with store.best_effort_write(paths.supervised_json):
            paths.supervised_json.unlink(missing_ok=True)
        start(paths, cluster_file, nodes)
        return ""


def start(paths: RunPaths, cluster_file: Path, nodes: Collection[str]) -> None:
    """Start the supervisor of a run on `nodes`, which are those it may use, unless it has one.

    Raises HomelabError when it does not come up; the run itself goes on.
    """
    if supervisor_lock.is_held(paths):
        return
    command = [
        sys.executable, "-P", "-m", "homelab", "supervise", paths.name,
        "--nodes", ",".join(nodes), "--cluster", str(cluster_file.resolve()), "--runs-dir", str(paths.root.parent.resolve()),
    ]  # fmt: skip
    # A node's name may hold letters that this locale has not (LC_ALL=C): as bytes, and for a Python that reads them so.
    words = [word.encode("utf-8", "surrogateescape") for word in command]
    environment = {**os.environ, "PYTHONUTF8": "1"}
    try:
        with paths.supervisor_log.open("ab") as log, hub_token.lent(environment) as (environment, descriptors):
            process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=paths.root,
                env=environment,
                pass_fds=descriptors,
            )
    except (OSError, ValueError) as error:
        raise _not_started(paths, str(error)) from error
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        if supervisor_lock.is_held(paths):
            return
        time.sleep(0.05)
    if process.poll() == 0:  # it found nothing to do, or another one was quicker
        return
    process.kill()  # a supervisor that is reported as not running must not begin later
    last_line = paths.supervisor_log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    raise _not_started(paths, last_line[0] if last_line else f"no answer within {_START_S:.0f} s")


def _not_started(paths: RunPaths, why: str) -> HomelabError:
    return HomelabError(
        f"the supervisor did not start: {why}",
        where=str(paths.supervisor_log),
        hint=Hint(
            "the run continues without it; to start one by hand: {}, and after a failure: {}",
            homelab("supervise", paths.name),
            homelab("recover", paths.name),
        ),
    )
