"""One try to recover a run: the nodes are asked, then the run is claimed, halted and started again, over the same connections."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.sanitize import plain
from homelab.controller.base.say import Say
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.recipe import Recipe
from homelab.controller.features.recover import examine, halt, resume
from homelab.controller.features.recover.examine import AttemptEnd, Examination
from homelab.controller.features.recover.resume import NextAttempt
from homelab.controller.features.status import monitor
from homelab.controller.features.supervise import acts, log_policies, observation
from homelab.controller.features.supervise.status_streams import StatusStreams
from homelab.controller.planning.types import Plan
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import claims, event_log, node_matching, run_folder, store
from homelab.controller.run.events import note
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import checkpoint_holders
from homelab.shared.protocol.request import RunRequest

# Of a node: stacks within 1 s, nvidia-smi within 5 s, the flight recorder within 3 s.
_DUMP_TIMEOUT_S = 12.0
STOP_GRACE_S = 0.5  # these processes have failed or wait for a failed one; checkpoints are complete or absent


@dataclass(frozen=True)
class Supervised:
    """A run and the nodes that it may use. `skip`: checks that the person left out at the launch, which are left out again."""

    cluster: Cluster
    paths: RunPaths
    recipe: Recipe
    items: list[RecipeInput]
    skip: Collection[str]

    @property
    def nodes(self) -> list[str]:
        """Their names."""
        return [node.name for node in self.cluster.nodes]


@dataclass
class RecoveryTry:
    """`close` ends it: the claim is released and the connections are closed. `examination` is kept from one try to the next."""

    run: Supervised
    plan: Plan
    streams: StatusStreams
    say: Say
    began_s: float  # of the whole recovery, by `elapsed`
    watcher: monitor.Watcher | None = None  # what it has gathered need not come again: a long run has many megabytes
    looking: threading.Lock = field(default_factory=threading.Lock)  # held by who uses it
    connected: Fleet | None = None  # connections that are there already, for the first time; they are closed like any others
    examination: Examination | None = None
    _open: ExitStack = field(default_factory=ExitStack)
    _fleet: Fleet | None = None
    _claimed: claims.ClaimedRun | None = None
    _halted: halt.Halted | None = None

    def close(self) -> None:
        """Release the claim, close the connections."""
        if self.connected is not None:
            self._open.push(self.connected)
        self.connected = self._fleet = self._claimed = self._halted = None
        self._open.close()

    def examine(self, incident: acts.Incident) -> observation.Examined:
        """Ask what happened. Raises HomelabError."""
        fleet, paths, verdict = self._connected(), self.run.paths, incident.verdict
        if verdict is not None and verdict.kind in ("hang", "frozen-rank", "silent-node"):
            silent_nodes = verdict.nodes if verdict.kind == "silent-node" else ()
            _keep_stack_dumps(fleet, paths, self.plan, [node.name for node in self.plan.nodes if node.name not in silent_nodes])
        # A look in another thread may wait for a node that is gone: what the one before it brought need not come again.
        request = (self.watcher and self.watcher.next_request) or node_matching.poll_request(paths.name, tail_lines=200)
        self.examination = examine.examine_failure(fleet, paths, self.plan, _end_of(self.plan, incident), request, self._keep)
        policies = self.run.recipe.recovery.log_policies if verdict is not None else ()
        met, slow = log_policies.met(self.examination.logs, policies)
        for policy in slow:
            event_log.append(paths, note(f'[recovery] log_policies: looking for "{policy.pattern}" takes too long; it counts as not found'))
        return observation.Examined(self.examination.diagnosis, self.examination.step, tuple(met))

    def _keep(self, answers: dict[str, dict[str, Any]]) -> None:
        with self.looking:
            monitor.keep(self.run.paths, answers, self.watcher.gathered if self.watcher else None)

    def halt(self, act: acts.Halt) -> observation.HaltResult:
        """Claim the run and stop what is left of it. Raises HomelabError."""
        assert self.examination is not None
        if act.asks_silent:
            self.examination = replace(self.examination, unreachable={})
        fleet, paths = self._connected(), self.run.paths
        names = [name for name in self.run.nodes if name not in self.examination.unreachable]
        after = max(self.plan.attempt, *run_folder.attempts(paths))
        age_s = claims.since(self.began_s)
        claim = self._open.enter_context(claims.claimed(fleet, paths.name, names, "recovered by its supervisor", age_s=age_s, after=after))
        self._claimed = claims.ClaimedRun(fleet, claim, paths, self.say)
        from_scratch: halt.Scratch = "if-nothing-was-saved" if act.may_begin_again else "never"
        self._halted = halt.halt(self._claimed, self.examination, nodes=self.run.nodes, from_scratch=from_scratch, grace_s=STOP_GRACE_S)
        point, well = self._halted.resume_point, tuple(self._halted.names)
        return observation.HaltResult(point.step, well, checkpoint_holders.indispensable(point.held, well))

    def resume(self, act: acts.Resume) -> observation.ResumeResult:
        """Start the next attempt. Raises HomelabError."""
        assert self._claimed is not None and self.examination is not None and self._halted is not None
        nodes = [name for name in self.run.nodes if name not in act.exclude]
        next_attempt = NextAttempt(nodes, self.run.skip, act.because, act.halvings)
        plan = resume.resume(self._claimed, self.examination, self._halted, next_attempt)
        return observation.ResumeResult(
            plan.attempt, plan.resume_step, tuple(node.name for node in plan.nodes), is_program=self.run.recipe.script is not None
        )

    def _connected(self) -> Fleet:
        """The connections of this try; the run's folder is whole afterwards: a person may have deleted it in the middle of the run."""
        if self._fleet is None:
            self._fleet = self._open.enter_context(self.connected or Fleet(self.run.cluster))
            self.connected = None
            self._open.enter_context(self.streams.letting_go(self._fleet))
            run_folder.repair(self._fleet, self.run.paths, self.say)
        return self._fleet


def _end_of(plan: Plan, incident: acts.Incident) -> AttemptEnd:
    verdict = incident.verdict
    silent = {name: plan.left_out_because.get(name, "it was left out, and is not healthy yet") for name in incident.left_out}
    if verdict is None:
        return AttemptEnd(incident.because, False, silent)
    if verdict.kind == "silent-node":
        silent |= dict.fromkeys(verdict.nodes, verdict.because)
    # Ranks that were silent before the stop are the cause, even when other ranks blame their peers.
    return AttemptEnd(incident.because, True, silent, verdict.ranks if verdict.kind in ("frozen-rank", "hang") else ())


def _keep_stack_dumps(fleet: Fleet, paths: RunPaths, plan: Plan, names: Collection[str]) -> None:
    """Ask these nodes; a node that does not answer is left out."""
    answers, _ = fleet.ask("stacks", RunRequest(run=paths.name), names=names, timeout_s=_DUMP_TIMEOUT_S)
    for name, answer in answers.items():
        folder = paths.node(plan.attempt, name)
        with store.best_effort_write(folder):
            store.write_text(folder / "stacks.txt", "\n".join(map(plain, _dumped_lines(answer))) + "\n")
            if answer.get("cards"):
                store.write_text(folder / "cards.txt", "\n".join(map(plain, answer["cards"])) + "\n")


def _dumped_lines(answer: Mapping[str, Any]) -> Iterator[str]:
    for rank, stack in answer["ranks"].items():
        yield f"rank {rank}:"
        yield from stack or ["  no answer"]
    for path in answer.get("dumps", ()):
        yield f"NCCL's flight recorder, on this node: {path}"
