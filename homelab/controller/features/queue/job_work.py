"""What the runner does for a job on the nodes: launch, go on, look, stop. By the same functions as the commands of these names."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from homelab.controller.attempt import inputs
from homelab.controller.attempt.placement import SupervisorPlacement, Where
from homelab.controller.base import elapsed
from homelab.controller.base.errors import BusyError, HomelabError, InputError, TakenError, UnreachableError, did_you_mean
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.say import Say
from homelab.controller.checks import registry
from homelab.controller.config import load
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.interpreter import for_recipe
from homelab.controller.config.recipe import Recipe
from homelab.controller.diagnose import endings
from homelab.controller.features.launch.launch_run import LaunchRequest, launch_run
from homelab.controller.features.launch.prepare import Prepared
from homelab.controller.features.launch.quiet_view import QuietView
from homelab.controller.features.queue.queued_job import QueuedJob
from homelab.controller.features.queue.turns import SeenRun
from homelab.controller.features.recover.examine import Examination
from homelab.controller.features.recover.recover_run import Recovered, RecoverRequest, recover_run
from homelab.controller.features.status import monitor
from homelab.controller.features.stop import stop
from homelab.controller.features.supervise import restart_policy
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import claims, leave, leave_folder, run_folder, supervisor_lock
from homelab.controller.run.adoption import AdoptedProgram
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.state import FINISHED
from homelab.shared.protocol import layout

_WAITED_FOR = (TakenError, UnreachableError, BusyError)
_OF_A_MACHINE = restart_policy.OF_ONE_NODE | {rule.id for rule in endings.OF_A_NODE}
_ASKED_S = 30.0
# Their checks judge the recipe and its files, which are the same on every node.
_OF_THE_RECIPE = frozenset({"data", "fit", "model"})


class NotYetError(HomelabError):
    """The job cannot start now, and may later: it goes on waiting."""


class MachineError(HomelabError):
    """The job was refused because of this machine."""

    def __init__(self, error: HomelabError, machine: str) -> None:
        super().__init__(error.message, where=error.where, hint=error.hint)
        self.machine = machine


@dataclass
class JobWork:
    """`where`: the place of the supervisors of its runs."""

    cluster_file: Path
    runs_dir: Path
    where: Where
    say: Say
    _watched: dict[str, tuple[Fleet, monitor.Watcher]] = field(default_factory=dict)
    _asked: dict[str, tuple[float, bool]] = field(default_factory=dict)

    def every(self) -> tuple[str, ...]:
        """All nodes of the cluster as its file says them now."""
        return tuple(node.name for node in load.load_cluster(self.cluster_file).nodes)

    def busy(self, job: QueuedJob) -> str:
        """Why its nodes cannot be had now; empty if all answer, nothing of ours is on them and no owner wants one."""
        with self._fleet(job) as fleet:
            for name, one in leave_folder.away(fleet, self.runs_dir, job.needs(self.every())).items():
                return leave.sentence(name, one)
            answers, errors = fleet.ask("runs")
        for name, error in errors.items():
            return f"{name} does not answer: {error.message}"
        for name, answer in answers.items():
            for entry in answer["runs"]:
                if (entry["alive"] or entry["busy"]) and entry["name"] != job.run:
                    return f"{entry['name']} is at work on {name}"
        return ""

    def launch(self, job: QueuedJob, named: Callable[[str], None], refuse_held: Callable[[], None]) -> None:
        """Start it. `named` hears the run's name before anything of it is on a node; `refuse_held` is asked once all checks are done.

        Raises NotYetError if it may start later.
        """
        recipe = self._recipe(job)
        _refuse_changed(job, recipe)
        # This process is older than the runs before this one, which are no others' runs.
        request = LaunchRequest(
            Path(job.recipe), self.cluster_file, self.runs_dir, registry.skipped(only=[], skip=list(job.skip)), self.where,
            age_s=claims.since(elapsed.now_s()), recipe_text=job.text, named=named,
        )  # fmt: skip
        view = _LaunchView(self.say, refuse_held)
        with self._fleet(job) as fleet:
            try:
                launch_run(fleet, recipe, request, view)
            except HomelabError as error:
                raise view.judged(error) from error

    def resume(self, job: QueuedJob) -> None:
        """Go on with its run from the newest checkpoint. Raises NotYetError if that may be later."""
        cluster = load.load_cluster(self.cluster_file)
        names = job.needs(tuple(node.name for node in cluster.nodes))
        skip = registry.skipped(only=[], skip=list(job.skip))
        # It was stopped before its first checkpoint, perhaps; what was saved is never thrown away.
        request = RecoverRequest(
            job.run, names, self.cluster_file, self.runs_dir, skip, self.where, "if-nothing-was-saved", age_s=claims.since(elapsed.now_s())
        )
        with Fleet(for_recipe(cluster, self._recipe(job))) as fleet:
            try:
                recover_run(fleet, request, _RecoverView(self.say))
            except _WAITED_FOR as error:
                raise NotYetError(error.message, where=error.where, hint=error.hint) from error

    def look(self, job: QueuedJob) -> SeenRun | None:
        """How its run is; None if nothing of it was ever sent to a node."""
        if not layout.is_usable(job.run):  # of a file that somebody has edited: "" would be the folder of all runs
            return None
        paths = RunPaths(self.runs_dir / job.run)
        if not self.was_sent(job):
            shutil.rmtree(paths.root, ignore_errors=True)
            return None
        if job.run not in self._watched:
            fleet = self._fleet(job)
            self._watched[job.run] = fleet, monitor.Watcher(fleet, paths)
        fleet, watcher = self._watched[job.run]
        try:
            snapshot = watcher.look()
        except HomelabError:
            self.forget(job)
            raise
        owner, diagnosis = watcher.owner, snapshot.diagnosis
        missing = [node.name for node in snapshot.nodes if node.reachable and node.torchrun == "not started"]
        return SeenRun(
            snapshot.state, snapshot.is_over, owner.is_owned, owner.has_said_its_end, owner.is_stopped_by_hand,
            is_cut_short=bool(missing) and snapshot.state not in FINISHED, step=snapshot.step, checkpoints=snapshot.checkpoint_steps,
            because=diagnosis.title if diagnosis else "", machine=diagnosis.first_node if diagnosis and diagnosis.cause in _OF_A_MACHINE else "",
        )  # fmt: skip

    def was_sent(self, job: QueuedJob) -> bool:
        """Whether anything of its run may be on a node: this is written before the first byte is sent."""
        return bool(job.run) and RunPaths(self.runs_dir / job.run).state_json.is_file()

    def forget(self, job: QueuedJob) -> None:
        """Close the connections to its run."""
        fleet, _ = self._watched.pop(job.run, (None, None))
        if fleet is not None:
            fleet.__exit__()

    def close(self) -> None:
        """Close all connections."""
        while self._watched:
            self._watched.popitem()[1][0].__exit__()

    def supervise(self, job: QueuedJob) -> None:
        """Start a supervisor on its run. Raises HomelabError."""
        paths = RunPaths(self.runs_dir / job.run)
        with self._fleet(job) as fleet:
            names = [node.name for node in fleet.cluster.nodes]
            SupervisorPlacement("here").start(fleet, paths, self.cluster_file, names, self.say)

    def stop(self, job: QueuedJob, *, everywhere: bool = True) -> bool:
        """End its run on every node; whether nothing is left of it, on those at least that answer if not `everywhere`. Its checkpoints stay."""
        with Fleet(load.load_cluster(self.cluster_file)) as fleet:
            outcome = stop.stop(fleet, RunPaths(self.runs_dir / job.run), self.say)
            return outcome.exit_code == 0 if everywhere else not outcome.left

    def is_over(self, run: str) -> bool:
        """Whether a run that is not of this queue is over; one that is not there any more is. The nodes are asked twice a minute."""
        asked_at, is_over = self._asked.get(run, (-_ASKED_S, False))
        if not is_over and time.monotonic() - asked_at >= _ASKED_S:
            is_over = self._is_over(run)
            self._asked[run] = time.monotonic(), is_over
        return is_over

    def _is_over(self, run: str) -> bool:
        paths = RunPaths(self.runs_dir / run)
        if not paths.run_json.is_file():
            return True
        if run_folder.state_of(paths) in FINISHED:
            return not supervisor_lock.is_held(paths)
        with suppress(HomelabError), Fleet(load.load_cluster(self.cluster_file)) as fleet:
            return monitor.Watcher(fleet, paths).look().state in FINISHED and not supervisor_lock.is_held(paths)
        return False

    def _recipe(self, job: QueuedJob) -> Recipe:
        return load.recipe_of_text(job.text, Path(job.recipe))

    def _fleet(self, job: QueuedJob) -> Fleet:
        cluster = load.load_cluster(self.cluster_file)
        return Fleet(for_recipe(_only(cluster, job.nodes, self.cluster_file), self._recipe(job)))


def _only(cluster: Cluster, names: Sequence[str], cluster_file: Path) -> Cluster:
    known = [node.name for node in cluster.nodes]
    for name in names:
        if name not in known:
            raise InputError(
                f'no node is called "{name}" any more.{did_you_mean(name, known)}', where=f"{cluster_file} has {', '.join(known)}",
                hint=Hint("add the job again with the nodes that it is to have: {}", homelab("queue add RECIPE --nodes", known[0])),
            )  # fmt: skip
    return cluster.only(tuple(names)) if names else cluster


def digests(recipe: Recipe, file: Path) -> dict[str, str]:
    """Role -> what its data is, of all that is known here. Raises InputError."""
    return {item.role: item.identity for item in inputs.of_recipe(recipe, file) if item.identity}


def _refuse_changed(job: QueuedJob, recipe: Recipe) -> None:
    """Raises InputError for data that is not what it was when the job was added: another training would come of it."""
    now = digests(recipe, Path(job.recipe))
    changed = sorted(role for role in now.keys() | job.digests.keys() if now.get(role) != job.digests.get(role))
    if changed:
        raise InputError(
            f"its {', '.join(changed)} data has changed since the job was added", where=job.recipe,
            hint=Hint("to train with the data as it is now: {}", homelab("queue add", job.recipe)),
        )  # fmt: skip


class _LaunchView(QuietView):
    def __init__(self, say: Say, refuse_held: Callable[[], None]) -> None:
        super().__init__(say)
        self._refuse_held = refuse_held
        self._prepared: Prepared | None = None

    def checked(self, prepared: Prepared) -> Prepared:
        """A person may have paused the queue while the nodes were checked."""
        self._prepared = prepared
        self._refuse_held()
        return prepared

    def judged(self, error: HomelabError) -> HomelabError:
        """The error as what it means for a job: wait, or a fault of a machine, or of the job."""
        findings = self._prepared.findings if self._prepared is not None else []
        failed = [finding for finding in findings if finding.level == "fail"]
        if isinstance(error, _WAITED_FOR) or (not failed and any(finding.is_busy for finding in findings)):
            return NotYetError(error.message, where=error.where, hint=error.hint)
        if failed and failed[0].node and failed[0].subject not in _OF_THE_RECIPE:
            return MachineError(error, failed[0].node)
        return error


class _RecoverView(QuietView):
    def examined(self, examination: Examination, notes: Sequence[Hint]) -> None:
        """The run was stopped by us."""

    def accepts(self, program: AdoptedProgram) -> bool:
        """Nobody is there to read what another machine launched."""
        return False

    def resumed(self, resumed: Recovered) -> None:
        """As a launch says it."""
        self._say(f"{resumed.paths.name} trains again, after step {resumed.plan.resume_step}")
