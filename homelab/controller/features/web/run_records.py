"""What this machine has written down of one run, without a question to any node."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import cast

from homelab.controller.attempt import diagnosis_store
from homelab.controller.config.cluster import Cluster
from homelab.controller.dashboard.measured import Measured
from homelab.controller.dashboard.snapshot import Snapshot
from homelab.controller.dashboard.snapshot_builder import NodeAnswers, RunInfo, build, next_commands
from homelab.controller.facts.reading import is_readable, read
from homelab.controller.features.report import report_builder, report_sources
from homelab.controller.features.report.run_report import RunReport
from homelab.controller.features.web import long_run
from homelab.controller.features.web.long_run import FewLines, LineSample
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import event_log, run_folder, run_record, store
from homelab.controller.run.metric_keys import KnownKeys
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.state import State
from homelab.shared.protocol.rank_messages import Metric


class RunRecords:
    """The folder of a run, read again where something in it has changed. A page that shows it and one that compares it ask at the same time."""

    def __init__(self, paths: RunPaths, cluster: Cluster) -> None:
        self.paths, self._cluster = paths, cluster
        self.is_long = self.is_mute = False
        self._lines = LineSample(paths)
        self._reading = threading.Lock()  # two that read on in the same file would have each line twice
        self._stamps: list[tuple[int, int]] = []
        self._report: RunReport | None = None
        self._read: tuple[list[tuple[int, int]], Snapshot] | None = None

    def read(self) -> tuple[Snapshot, RunReport]:
        """How the run was when it was seen last, and its report; of a long one the first time only its loss: `report` reads the rest.

        Raises HomelabError where its folder is damaged.
        """
        with self._reading:
            stamps = self._stamped()
            if self._read is None or self._read[0] != stamps or self._report is None:
                few = long_run.glimpse(self.paths)
                if few is not None:
                    self.is_long = True
                    sources = report_sources.recorded(self.paths, self._cluster, [])
                    return self._snapshot(few), long_run.first_look(report_builder.build(sources), few)
                few = self._lines.read()
                self._read = (stamps, self._snapshot(few))
                self._reported(few, stamps, None)
            assert self._report is not None
            return self._read[1], self._report

    def report(self, fleet: Fleet | None = None) -> RunReport:
        """The report; the same one where nothing has changed. The fleet is asked for the energy of its cards."""
        with self._reading:
            stamps = self._stamped()
            if self._report is not None and stamps == self._stamps and fleet is None:
                return self._report
            return self._reported(self._lines.read(), stamps, fleet)

    def total_steps(self) -> int | None:
        """As the newest plan has it, or the recipe; None where only the ranks know it."""
        plan, recipe = run_folder.plan_of(self.paths), run_record.recipe_in(store.read_object(self.paths.run_json))
        return (plan.time.steps if plan.time else None) or (recipe.train.steps if recipe and recipe.train else None)

    def _reported(self, few: FewLines, stamps: list[tuple[int, int]], fleet: Fleet | None) -> RunReport:
        sources = report_sources.recorded(self.paths, self._cluster, few.lines, fleet=fleet)
        self.is_long = few.every > 1
        self._stamps, self._report = stamps, long_run.whole(report_builder.build(sources), few)
        if self.is_long:
            self._read = (stamps, self._snapshot(few))
        return self._report

    def _snapshot(self, few: FewLines) -> Snapshot:
        paths = self.paths
        plan, described = run_folder.plan_of(paths), store.read_object(paths.run_json)
        recipe, state = described.get("recipe"), cast(State, run_folder.state_of(paths))
        is_script, scores = isinstance(recipe, dict) and bool(recipe.get("script")), run_record.scores(described)
        self.is_mute = is_script or scores
        known = KnownKeys()
        measured = Measured(read(Metric, line) for line in few.lines if is_readable(Metric, line) and known.add(line))
        run = RunInfo(paths.name, described.get("recipe_file", ""), plan, is_script)
        snapshot = build(run, NodeAnswers(time.time(), {}, measured=measured, events=event_log.lines(paths)))
        stored = diagnosis_store.read(paths, plan.attempt) if state in ("failed", "stopped", "lost") else None
        diagnosis = stored.diagnosis if stored else None
        following = next_commands(state, paths.name, diagnosis, is_script=is_script, scores=scores)
        return snapshot.model_copy(
            update={"state": state, "diagnosis": diagnosis, "next_commands": following, "total_steps": self.total_steps()}
        )

    def _stamped(self) -> list[tuple[int, int]]:
        paths = self.paths
        files = [paths.metrics_jsonl, paths.events_jsonl, paths.state_json, paths.answers_jsonl, paths.profiles]
        return [_stamp(path) for path in (*files, *map(paths.plan_json, run_folder.attempts(paths)))]


def _stamp(path: Path) -> tuple[int, int]:
    try:
        state = os.stat(path)
    except OSError:
        return (0, 0)
    return (state.st_mtime_ns, state.st_size)
