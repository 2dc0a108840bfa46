"""One run for the pages that show it: its records, and what its nodes say. Every method waits for disks or nodes: for a thread."""

from __future__ import annotations

import time
from pathlib import Path

from homelab.controller.base.hint import Options
from homelab.controller.config.cluster import Cluster
from homelab.controller.dashboard.snapshot import Snapshot
from homelab.controller.features.report.run_report import RunReport
from homelab.controller.features.status import logs, monitor
from homelab.controller.features.web import page_values
from homelab.controller.features.web.run_records import RunRecords
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_folder, run_lookup

_ENERGY_S = 60.0  # between two questions for the energy of the cards
_LINES = 200


class RunSource:
    """A run that is there. `fleet` is its own, and is closed with it."""

    def __init__(self, fleet: Fleet, records: RunRecords, options: Options) -> None:
        self._fleet, self.records, self._options = fleet, records, options
        self._watcher: monitor.Watcher | None = None
        self._energy_at_s = float("-inf")

    @property
    def name(self) -> str:
        return self.records.paths.name

    @property
    def is_settled(self) -> bool:
        """A long run that is done: its records say all, and to ask its nodes would mean to read them whole."""
        return self.records.is_long and run_folder.state_of(self.records.paths) == "done"

    def recorded(self) -> tuple[Snapshot, RunReport]:
        """What this machine knows. Raises HomelabError where the run's folder is damaged."""
        snapshot, report = self.records.read()
        return snapshot.with_options(self._options), report

    def look(self) -> Snapshot:
        """What the nodes say now, as `homelab status` asks them."""
        self._watcher = self._watcher or monitor.Watcher(self._fleet, self.records.paths)
        snapshot = self._watcher.look()
        if snapshot.total_steps is None:
            snapshot = snapshot.model_copy(update={"total_steps": self.records.total_steps()})
        return snapshot.with_options(self._options)

    def report(self) -> RunReport:
        """The report, with the energy that the nodes tell now and then."""
        is_due = not self.is_settled and time.monotonic() - self._energy_at_s >= _ENERGY_S
        self._energy_at_s = time.monotonic() if is_due else self._energy_at_s
        return self.records.report(self._fleet if is_due else None)

    def logs(self, attempt: int | None) -> str:
        """The logs of an attempt, None: of the newest. Raises InputError where there is no such attempt."""
        found = logs.read(self._fleet, self.records.paths, None, _LINES, attempt)
        ranks = {number: (log.node, [*log.stdout, *log.stderr]) for number, log in found.ranks.items()}
        return page_values.logs_of(ranks, found.attempt, found.newest_attempt, found.unreachable)

    def leave(self) -> None:
        """Nobody waits any more for what is asked now, in another thread; then its connections are closed."""
        if self._watcher is not None:
            self._watcher.leave()
        self._fleet.give_up_all()
        self._fleet.__exit__()


def open_run(cluster: Cluster, runs_dir: Path, name: str, options: Options, known: dict[str, RunRecords]) -> RunSource:
    """The run of this name, or its beginning or end, with its records, which are kept in `known`. Raises HomelabError where nobody knows it."""
    fleet = Fleet(cluster)
    try:
        paths = run_lookup.run(fleet, runs_dir, name, lambda text: None)
        return RunSource(fleet, known.setdefault(paths.name, RunRecords(paths, cluster)), options)
    except BaseException:
        fleet.__exit__()
        raise
