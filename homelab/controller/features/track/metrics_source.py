"""The metrics of a run as they come: from the run's folder while a supervisor on this machine gathers them, else from the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from homelab.controller.attempt import remote_supervisor
from homelab.controller.base.errors import HomelabError
from homelab.controller.features.status import monitor
from homelab.controller.features.track.points import PointsTaker, TrackedPoint
from homelab.controller.features.track.sent import certain_step
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_folder, supervisor_lock
from homelab.controller.run.metrics import Gathered
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.state import FINISHED

_FILE_S, _NODES_S = 5.0, 20.0


@dataclass(frozen=True)
class KnownMetrics:
    """What is known now. `is_over`: nothing more will come. `trouble`: why the nodes could not be asked, empty where they were or need not be.

    `certain_step`: a recovery may compute the later ones again.
    `next_s`: after so many seconds it is worth looking again; a question to the nodes costs them something, a look into a file does not.
    """

    points: Sequence[TrackedPoint]
    state: str
    is_over: bool
    trouble: str = ""
    certain_step: int = 0
    next_s: float = _FILE_S


class MetricsSource:
    """Of one run; `fleet` is asked only where nobody else does."""

    def __init__(self, fleet: Fleet, paths: RunPaths) -> None:
        self._fleet, self._paths = fleet, paths
        self._points = PointsTaker()
        self._gathered: Gathered | None = None
        self._watcher: monitor.Watcher | None = None

    def look(self) -> KnownMetrics:
        """Raises HomelabError where the run's folder is damaged."""
        known = self.ask()
        if self._gathered is None:
            self._gathered = Gathered(self._paths, self._points)
        else:
            self._gathered.refresh()
        return replace(known, points=self._points.points, certain_step=certain_step(self._points.saves))

    def ask(self) -> KnownMetrics:
        """Have in the run's folder what the nodes have, where nobody else does; without the points. Raises HomelabError as `look`."""
        state = run_folder.state_of(self._paths)  # before the metrics: they are gathered before the end is written down
        if supervisor_lock.is_held(self._paths):
            return KnownMetrics((), state, is_over=state == "done", next_s=_FILE_S)
        if state == "done" or (state in FINISHED and self._is_owned_here_alone()):
            return KnownMetrics((), state, is_over=True, next_s=_FILE_S)
        self._watcher = self._watcher or monitor.Watcher(self._fleet, self._paths)
        try:
            snapshot = self._watcher.look()
        except HomelabError as error:
            return KnownMetrics((), state, is_over=False, trouble=error.message, next_s=_NODES_S)
        silent = self._watcher.unreachable
        trouble = f"{', '.join(silent)} cannot be asked" if snapshot.state == "lost" else ""
        return KnownMetrics((), snapshot.state, snapshot.is_over and snapshot.state != "lost", trouble, next_s=_NODES_S)

    def _is_owned_here_alone(self) -> bool:
        """Whether the run has had its supervisor on this machine, so that nobody recovers it where none is here. Elsewhere one may be at work."""
        return self._paths.supervisor_json.is_file() and not remote_supervisor.recorded(self._paths)
