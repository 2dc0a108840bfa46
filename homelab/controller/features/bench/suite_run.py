"""The runs of a suite, in rounds: every cell once, then every cell again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.say import Say
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.suite import Suite
from homelab.controller.features.bench.cell import Cell
from homelab.controller.features.bench.cell_run import CellRun
from homelab.controller.features.bench.folder import BenchmarkFolder
from homelab.controller.features.bench.result import Result, Summary, summaries
from homelab.controller.features.stop import stop
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_folder, store, supervisor_lock
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.state import FINISHED


@dataclass(frozen=True)
class SuiteRun:
    """A suite on a cluster. `contents`: variation -> its recipe; `recipe_folder` is where its relative paths begin."""

    suite: Suite
    cells: Sequence[Cell]
    contents: Mapping[str, Mapping[str, Any]]
    recipe_folder: Path
    cluster: Cluster
    cluster_file: Path
    folder: BenchmarkFolder

    def begin(self, *, again: bool, say: Say) -> None:
        """End what an interrupted benchmark has left; `again`: forget what failed. Raises InputError where the suite is not the one of the folder."""
        nodes = {node.name: node.host for node in self.cluster.nodes}
        self.folder.keep_to(
            {
                "suite": self.suite.model_dump(mode="json"),
                "recipes": {name: dict(content) for name, content in self.contents.items()},
                "nodes": nodes,
            }
        )
        for cell in self.cells:
            self.folder.recipe(cell, self.contents[cell.variation], self.recipe_folder)
        left = self._unfinished()
        if left:
            with Fleet(self.cluster) as fleet:
                for paths in left:
                    say(f"stopping {paths.name}, left by an interrupted benchmark")
                    stop.stop(fleet, paths, say)
        for result in self.folder.results() if again else ():
            if result.state != "done":
                self.folder.result_file(result.cell, result.repeat).unlink(missing_ok=True)

    def go(self, say: Say, done: Callable[[Result], None]) -> None:
        """Run what has no result yet; `done` hears of each. A cell whose launch is refused, or that fails, is not tried in the next round."""
        total = len(self.cells) * self.suite.repeats
        for repeat in range(1, self.suite.repeats + 1):
            for cell in self.cells:
                results = self.folder.results()
                if any(one.cell == cell and (one.repeat == repeat or one.state != "done") for one in results):
                    continue
                label = f"{len(results) + 1} of {total}"
                cluster = self.suite.cluster_of(cell.variation, self.cluster)
                run = CellRun(
                    cell, self.suite, cluster, self.cluster_file, self.folder.root / "recipes" / f"{cell.file_stem}.toml", self.folder.runs
                )
                result = run.result(repeat, lambda text, label=label: say(f"{label}, {text}"))  # type: ignore[misc]
                store.write_json(self.folder.result_file(cell, repeat), result.model_dump(mode="json"))
                done(result)

    def interrupted(self, say: Say) -> None:
        """End the run that is under way."""
        with Fleet(self.cluster) as fleet:
            for paths in self._unfinished():
                try:
                    stop.stop(fleet, paths, say)
                except HomelabError as error:
                    say(f"{paths.name} could not be stopped: {error.message}")

    def _unfinished(self) -> list[RunPaths]:
        """The runs that may go on: also one that has failed, while its supervisor recovers it."""
        return [
            paths
            for paths in store.runs_in(self.folder.runs)
            if run_folder.state_of(paths) not in FINISHED or supervisor_lock.is_held(paths)
        ]

    def summary(self) -> tuple[Summary, ...]:
        """What is known now."""
        return summaries(self.cells, self.folder.results())
