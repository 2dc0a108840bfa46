"""The supervisor of one run: follows it, and when it fails stops what is left, finds the cause and starts the next attempt.

One per run (a lock that the kernel drops when its holder dies), and it knows nothing that is not on disk: it may be killed and
started again at any moment. `homelab recover` does by hand what it does by itself, with the same functions. What it does next is
decided in `homelab.controller.features.supervise.step`; here its acts are performed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from homelab.controller.attempt import inputs
from homelab.controller.base import elapsed
from homelab.controller.base.errors import HomelabError, StoppedError, SupersededError
from homelab.controller.base.hint import homelab
from homelab.controller.base.say import Say
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.interpreter import for_recipe
from homelab.controller.features.recover.resume_guards import OtherTrainingError
from homelab.controller.features.status import monitor
from homelab.controller.features.supervise import acts, notifier
from homelab.controller.features.supervise.attempt_watch import AttemptWatch
from homelab.controller.features.supervise.leave_watch import LeaveWatch
from homelab.controller.features.supervise.observation import Error, Failed, Followed, Observation, Result
from homelab.controller.features.supervise.recovery_try import STOP_GRACE_S, RecoveryTry, Supervised
from homelab.controller.features.supervise.recut_watch import RecutWatch
from homelab.controller.features.supervise.rejoin import RejoinMonitor
from homelab.controller.features.supervise.status_streams import StatusStreams
from homelab.controller.features.supervise.step import State, next_step
from homelab.controller.features.supervise.step_durations import StepTimeWindow
from homelab.controller.planning.strategy import registry
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import event_log, run_folder, store, supervisor_record
from homelab.controller.run.events import event
from homelab.controller.run.paths import RunPaths
from homelab.controller.run.restart import Restart
from homelab.shared.protocol.run_requests import SaveRequest, StopRequest


class Supervisor:
    """Of one run. `cluster` holds the nodes that the run may use."""

    def __init__(self, cluster: Cluster, paths: RunPaths, say: Say) -> None:
        self._paths, self._say = paths, say
        self._notifier = notifier.of_run(cluster.notify, paths, say)
        described = run_folder.description_of(paths)
        recipe, items = described.recipe, inputs.of_run(paths, described.run_json)
        self._run = Supervised(for_recipe(cluster, recipe), paths, recipe, items, supervisor_record.skipped(paths))
        self._plan = run_folder.plan_of(paths)
        self._watch: AttemptWatch | None = None
        self._try: RecoveryTry | None = None
        self._collecting: threading.Thread | None = None
        self._asking: threading.Thread | None = None
        self._free = self._absent()
        self._looking = threading.Lock()
        self._fleet: Fleet | None = None  # kept open from look to look, and handed to a recovery
        self._watcher: monitor.Watcher | None = None  # it knows what was gathered before: a look costs what is new
        supervisor_json = store.read_object(paths.supervisor_json)
        history = supervisor_record.valid_history(supervisor_json, self._plan.attempt)
        is_same = history["attempt"] == self._plan.attempt
        self._step_times = StepTimeWindow(history["step_s"] if is_same else None)
        # The attempt that the last supervisor was about to start came to its start. (state.json is written by everybody who looks.)
        has_started = not is_same and any(
            (line.get("event"), line.get("attempt")) == ("attempt-resumed", self._plan.attempt) for line in event_log.lines(paths)
        )
        self._state = State(
            self._plan.attempt, recipe.recovery, recipe.checkpoint, restarts=tuple(Restart(**entry) for entry in history["restarts"]),
            was_cut_short=supervisor_json.get("doing") == "recovering" and not has_started,
        )  # fmt: skip
        # At the end, because it begins to ask the nodes: `run` closes it.
        self._leaves = LeaveWatch(paths, self._run.cluster, lambda: self._watch.streams.statuses() if self._watch else {}, self._stop_ranks)

    def run(self) -> str:
        """Until the run is done, stopped, or given up; how it ended."""
        result: Result | None = None
        with ExitStack() as closing:  # all of it, also where one part cannot be closed: another supervisor may follow in this process
            closing.callback(self._notifier.close)
            closing.callback(self._leaves.close)
            closing.callback(lambda: self._connections().__exit__())
            closing.callback(self._close)
            while True:
                self._state, act = next_step(self._state, self._observe(result))
                if isinstance(act, acts.End):
                    self._end(act)
                    return act.how
                result = self._perform(act)

    def _observe(self, result: Result | None) -> Observation:
        away = self._leaves.look(self._plan.attempt, self._free)
        is_stopped = run_folder.is_stopped(self._paths, self._plan.attempt)
        observed = Observation(
            time.monotonic(), time.time(), is_stopped, result, away=away, lent=self._leaves.lent, nodes=frozenset(self._run.nodes)
        )
        if self._watch is None or self._state.phase not in ("reviewing", "watching") or observed.is_stopped:
            return observed
        watch = self._watch
        step = watch.step  # before the look: a checkpoint that is newer than this has all that was done
        verdict, checkpoint = watch.look()
        return replace(observed, verdict=verdict, checkpoint=checkpoint, well=watch.well, recut=watch.recut, step=step, save=watch.save)

    def _perform(self, act: acts.Act) -> Result | None:
        match act:
            case acts.Review():
                self._listen(())
                assert self._watch is not None
                self._watch.settle()
            case acts.Follow():
                return self._follow()
            case acts.Wait():
                assert self._watch is not None
                self._watch.wait()
            case acts.Collect():
                self._collect_aside()
            case acts.Save():
                self._ask_for_a_save()
            case acts.WriteProgress(doing, why):
                self._write(doing, why)
            case acts.Begin():
                self._begin(act)
            case acts.Examine() | acts.Halt() | acts.Resume():
                return self._recover(act)
            case acts.WaitBeforeRetry():
                self._wait_before_retry(act)
            case acts.GiveUp():
                self._give_up(act)
        return None

    def _follow(self) -> Followed:
        self._plan = run_folder.plan_of(self._paths)
        absent = self._free = self._absent()
        self._leaves.took_part([node.name for node in self._plan.nodes])
        takes_back = self._run.recipe.recovery.rejoin == "next-checkpoint" and self._run.recipe.script is None
        self._listen(absent if takes_back else absent & (self._leaves.lent | set(self._leaves.away)))
        return Followed(self._plan.attempt, absent)

    def _absent(self) -> frozenset[str]:
        """Nodes that the run may use, and that are not in its newest plan."""
        return frozenset(self._run.nodes) - {node.name for node in self._plan.nodes}

    def _listen(self, left_out: Collection[str]) -> None:
        self._close()
        run, names = self._run, [node.name for node in self._plan.nodes]
        rejoin = RejoinMonitor(run, left_out, names, lambda name: name in self._leaves.away)
        recut = (
            RecutWatch(run.cluster, run.recipe, run.items, self._plan)
            if registry.of_plan(self._plan).cuts_layers and run.recipe.recovery.auto
            else None
        )
        self._watch = AttemptWatch(
            self._plan, self._streams(), self._step_times, sees_ranks=run.recipe.script is None, monitor=rejoin, recut=recut
        )
        self._watch.__enter__()

    def _streams(self) -> StatusStreams:
        return StatusStreams(self._run.cluster, self._paths.name, self._plan.attempt, [node.name for node in self._plan.nodes])

    def _begin(self, act: acts.Begin) -> None:
        incident = act.incident
        assert self._watch is not None
        self._watch.stop_asking()
        self._say(f"attempt {self._plan.attempt}: {incident.kind}: {incident.because}")
        details = {"time": incident.noticed_at, "kind": incident.kind, "nodes": list(incident.nodes)}
        details["ranks"] = list(incident.verdict.ranks) if incident.verdict else []
        event_log.append(
            self._paths, event("trouble" if incident.verdict else "restart", self._plan.attempt, because=incident.because, **details)
        )
        self._write("recovering", incident.because)
        if incident.verdict:
            self._notifier.tell("failed", f"attempt {self._plan.attempt}: {incident.because}. It is being recovered.")
        self._try = RecoveryTry(
            self._run, self._plan, self._watch.streams, self._say, elapsed.now_s(), self._watcher, self._looking, self._fleet
        )
        self._fleet = None

    def _recover(self, act: acts.Examine | acts.Halt | acts.Resume) -> Result:
        assert self._try is not None
        try:
            match act:
                case acts.Examine(incident):
                    return self._try.examine(incident)
                case acts.Halt():
                    halted = self._try.halt(act)
                    self._free = frozenset(self._run.nodes)
                    return halted
                case acts.Resume():
                    self._free = frozenset(act.exclude)  # the others may begin at any moment
                    resumed = self._try.resume(act)
                    self._step_times = StepTimeWindow()  # the first step of an attempt takes longer than all others
                    return resumed
        except HomelabError as error:
            self._try.close()
            kind: Error = (
                "stopped" if isinstance(error, StoppedError)
                else "superseded" if isinstance(error, SupersededError)
                else "other-training" if isinstance(error, OtherTrainingError)
                else "other"
            )  # fmt: skip
            return Failed(kind, error.message, error.hint, str(error))

    def _wait_before_retry(self, act: acts.WaitBeforeRetry) -> None:
        if self._try is not None:
            self._try.close()
        if act.error is not None:
            self._say(f"cannot continue yet: {act.error.text}")
            event_log.append(self._paths, event("waiting", self._plan.attempt, message=act.error.message, hint=act.error.hint))
            self._write("recovering", f"waiting: {act.error.message}")
            if not act.is_for_owner:
                self._notifier.tell("needs you", f"it cannot continue yet: {act.error.message}\n{act.error.hint}")
        time.sleep(act.seconds)

    def _give_up(self, act: acts.GiveUp) -> None:
        if act.stops_nodes:  # the recovery may have been refused before anything was stopped
            self._stop_ranks(frozenset(node.name for node in self._plan.nodes))
        store.set_state(self._paths, "failed", self._plan.attempt)
        event_log.append(self._paths, event("given-up", self._plan.attempt, because=act.because, cause=act.cause, hint=act.hint))
        self._write("given up", act.because)
        self._say(f"given up: {act.because}")
        self._notifier.tell("gave up", f"{act.because}\n{act.hint}")

    def _end(self, act: acts.End) -> None:
        self._close()
        if act.collects:
            self._collect(self._connections())
        if act.left_out:
            self._stop_ranks(act.left_out)
        if act.records_stop:
            store.set_state(self._paths, "stopped", self._plan.attempt, intent="stopped")
        if act.why is not None:
            self._write("ended", act.why)
        if act.how != "superseded":
            self._leaves.forget_overrides()
        if act.how == "done":
            self._notifier.tell("done", f"It is done. Next: {homelab('status', self._paths.name)}")

    def _stop_ranks(self, names: frozenset[str]) -> None:
        """A rank may still wait for its peers there, or for the next attempt. Never what another controller has started meanwhile."""
        with Fleet(self._run.cluster) as fleet:
            fleet.ask("stop", StopRequest(run=self._paths.name, grace_s=STOP_GRACE_S, after=self._plan.attempt), names=names)

    def _collect_aside(self) -> None:
        """`_collect` in a thread: a node that does not answer takes ten seconds."""
        if self._collecting is None or not self._collecting.is_alive():
            self._collecting = threading.Thread(target=self._collect, args=(self._connections(),), daemon=True, name="look")
            self._collecting.start()

    def _ask_for_a_save(self) -> None:
        """In a thread, as `_collect_aside`. One node is enough: its ranks tell the others."""
        if self._asking is None or not self._asking.is_alive():
            names = [node.name for node in self._plan.nodes]
            self._asking = threading.Thread(target=self._ask_one_of, args=(names, self._plan.attempt), daemon=True, name="save")
            self._asking.start()

    def _ask_one_of(self, names: list[str], attempt: int) -> None:
        self._say(f"attempt {attempt}: asking for a checkpoint")
        for name in names:
            with Fleet(self._run.cluster.only((name,))) as fleet:
                answers, errors = fleet.ask("save", SaveRequest(run=self._paths.name, attempt=attempt), names=[name])
            if answers:
                return
            self._say(f"{name} could not be asked for a checkpoint: {'; '.join(error.message for error in errors.values())}")

    def _connections(self) -> Fleet:
        """In the supervisor's own thread: a recovery takes them there."""
        self._fleet = self._fleet or Fleet(self._run.cluster)
        return self._fleet

    def _collect(self, fleet: Fleet) -> None:
        """Gather metrics and write the run's state down, as `homelab status` does."""
        try:
            with self._looking:
                self._watcher = self._watcher or monitor.Watcher(fleet, self._paths)
                self._watcher.look(fleet)
        except Exception as error:  # noqa: BLE001 - a fault in what people are shown does not end the supervision
            self._say(f"looking failed: {error}")
        finally:
            if fleet.is_closed:  # by a recovery; this look has opened connections anew
                fleet.__exit__()

    def _write(self, doing: str, why: str) -> None:
        supervisor_json: dict[str, Any] = {
            "pid": os.getpid(), "doing": doing, "why": why, "attempt": self._state.attempt, "step_s": self._step_times.step_s,
            "since": time.time(), "restarts": [asdict(restart) for restart in self._state.restarts],
        }  # fmt: skip
        with store.best_effort_write(self._paths.supervisor_json):
            store.write_json(self._paths.supervisor_json, supervisor_json)

    def _close(self) -> None:
        try:
            if self._try is not None:
                self._try.close()
        finally:
            if self._watch is not None:
                self._watch.__exit__()
            self._try = self._watch = None
