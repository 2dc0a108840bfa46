"""One run of a cell: launched as any other, watched to its end, measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from homelab.controller.attempt import diagnosis_store
from homelab.controller.base import elapsed
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import homelab
from homelab.controller.base.say import Say
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.interpreter import for_recipe
from homelab.controller.config.load import load_recipe
from homelab.controller.config.suite import Suite
from homelab.controller.features.bench.cell import Cell
from homelab.controller.features.bench.measurement import measure
from homelab.controller.features.bench.result import Result, State
from homelab.controller.features.launch.launch_run import LaunchRequest, launch_run
from homelab.controller.features.launch.quiet_view import QuietView
from homelab.controller.features.report import report_sources
from homelab.controller.features.report.energy_price import JOULES_PER_KWH
from homelab.controller.features.report.report_builder import Sources, counted, energy_of
from homelab.controller.features.status import monitor
from homelab.controller.features.stop import stop
from homelab.controller.planning.types import Plan
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import claims
from homelab.controller.run.paths import RunPaths

_POLL_S = 2.0
_TRIES = 3
# Every cell is another set of nodes, and each would have its own all-reduce of 64 MB before the launch; the runs do it anyway.
_SKIPPED = frozenset({"collective"})


class _Disturbed(Exception):
    """The run was interrupted by a fault: its steps are not those of an undisturbed one."""


@dataclass(frozen=True)
class CellRun:
    """One cell on this cluster: `recipe` is its file, `runs` the folder of its runs."""

    cell: Cell
    suite: Suite
    cluster: Cluster
    cluster_file: Path
    recipe: Path
    runs: Path

    def result(self, repeat: int, say: Say) -> Result:
        """Run it, again where a fault disturbed it. Never raises for what a run can end with."""
        because, state = "", "failed"
        paths: RunPaths | None = None
        for number in range(1, _TRIES + 1):
            try:
                with Fleet(for_recipe(self.cluster.only(self.cell.nodes), load_recipe(self.recipe))) as fleet:
                    paths = None
                    paths = self._launched(fleet, say)
                    self._wait(fleet, paths, say)
                    return self._measured(fleet, paths, repeat, number)
            except _Disturbed as disturbance:
                because = f"{disturbance}, {number} time{'s' if number > 1 else ''}"
                say(f"{self.cell.label}: {because}; again")
            except HomelabError as error:
                because, state = error.message.splitlines()[0], "failed" if paths else "refused"
                break
        return self._without_measurement(repeat, state, because, paths)  # type: ignore[arg-type]

    def _launched(self, fleet: Fleet, say: Say) -> RunPaths:
        # This process is older than the runs before this one, which are no others' runs.
        request = LaunchRequest(self.recipe, self.cluster_file, self.runs, _SKIPPED, "here", age_s=claims.since(elapsed.now_s()))
        paths = launch_run(fleet, load_recipe(self.recipe), request, QuietView(say))
        assert paths is not None, "not a dry run"
        return paths

    def _wait(self, fleet: Fleet, paths: RunPaths, say: Say) -> None:
        """Raises HomelabError where it does not end well, with the reason that `homelab why` gives."""
        watcher, deadline = monitor.Watcher(fleet, paths), time.monotonic() + 60 * self.suite.minutes_per_run
        trouble, told = "", -1
        while time.monotonic() < deadline:
            try:
                snapshot = watcher.look()
            except HomelabError as error:
                trouble = error.message
                time.sleep(_POLL_S)
                continue
            if snapshot.is_over:
                if snapshot.state == "done":
                    return
                stop.stop(fleet, paths, lambda text: None)
                reason = snapshot.diagnosis.title if snapshot.diagnosis else f"the run ended in the state {snapshot.state}"
                raise HomelabError(reason, where=paths.name, hint=homelab("why", paths.name))
            if snapshot.step != told:
                say(f"{self.cell.label}: step {snapshot.step} of {self.suite.steps}")
                told = snapshot.step
            time.sleep(_POLL_S)
        stop.stop(fleet, paths, lambda text: None)
        raise HomelabError(
            f"it was not done after {self.suite.minutes_per_run:g} minutes{f' ({trouble})' if trouble else ''}", where=paths.name,
            hint="minutes_per_run in the suite",
        )  # fmt: skip

    def _measured(self, fleet: Fleet, paths: RunPaths, repeat: int, tries: int) -> Result:
        sources = report_sources.gather(fleet, paths, self.cluster)
        plan = sources.plans[max(sources.plans)]
        if len(sources.plans) > 1:
            reason = diagnosis_store.read(paths, min(sources.plans))
            raise _Disturbed(f"disturbed by a fault ({reason.diagnosis.title})" if reason else "disturbed by a fault")
        lines = counted(sources.metrics, {number: one.resume_step for number, one in sources.plans.items()})
        measured = measure(lines, plan.world_size, self.suite.warmup)
        if measured is None:
            return self._without_measurement(repeat, "failed", "some steps of some ranks are missing", paths)
        used = energy_of(sources, lines)
        joules = used.kwh * JOULES_PER_KWH if used.kwh is not None and used.is_complete else None
        # Both of the whole run: the meter does not know which steps were the warm-up.
        tokens = sum(line.tokens or 0 for line in lines if line.kind == "train")
        return Result(
            variation=self.cell.variation, strategy=self.cell.strategy, nodes=self.cell.nodes, repeat=repeat, state="done", run=paths.name, tries=tries,
            measured=measured, plan_tokens_per_s=plan.time.tokens_per_s if plan.time else None,
            plan_is_measured=plan.time is not None and plan.time.is_measured and plan.time.wire_is_measured, devices=_devices(plan),
            versions=_versions(sources), joules=joules, joules_per_token=joules / tokens if joules is not None and tokens else None, precision=plan.precision, ended_at=time.time(),
        )  # fmt: skip

    def _without_measurement(self, repeat: int, state: State, because: str, paths: RunPaths | None) -> Result:
        return Result(
            variation=self.cell.variation, strategy=self.cell.strategy, nodes=self.cell.nodes, repeat=repeat, state=state, because=because,
            run=paths.name if paths else "", ended_at=time.time(),
        )  # fmt: skip


def _devices(plan: Plan) -> dict[str, str]:
    """Node -> its cards or processor."""
    names: dict[str, list[str]] = {}
    for rank in plan.ranks:
        names.setdefault(rank.node, []).append(rank.device_name)
    return {node: ", ".join(devices) for node, devices in names.items()}


def _versions(sources: Sources) -> dict[str, str]:
    """What the nodes have, where they agree or not: "2.13.0" or "2.11.0, 2.13.0"."""
    versions: dict[str, set[str]] = {"homelab": {sources.about.homelab}}
    for packages in (sources.about.versions or {}).values():
        for name, version in packages.items():
            if isinstance(version, str):
                versions.setdefault(name, set()).add(version)
    return {name: ", ".join(sorted(found)) for name, found in versions.items()}
