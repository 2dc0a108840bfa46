"""The supervisor of one run: follows it, and when it fails stops what is left, finds the cause and starts the next attempt.

One per run (a lock that the kernel drops when its holder dies), and it knows nothing that is not on disk: it may be killed and
started again at any moment. `homelab recover` does by hand what it does by itself, with the same functions.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from typing import Any

from homelab.config.cluster import Cluster
from homelab.config.interpreter import for_recipe
from homelab.control import by_hand, claims, find, patterns, recover, stacks, watch
from homelab.control.claims import Claim
from homelab.control.followers import Followers
from homelab.control.identity import OtherTrainingError
from homelab.control.recover import Examination, Scratch
from homelab.control.returning import Returning
from homelab.diagnose.cause import Diagnosis
from homelab.errors import HomelabError, StoppedError, SupersededError
from homelab.planning.model import Plan
from homelab.remote.fanout import Fleet
from homelab.runs import lock, policy, store, watchdog
from homelab.runs.pace import Pace
from homelab.runs.paths import RunPaths
from homelab.runs.policy import Action, Restart
from homelab.runs.signs import Sign
from homelab.runs.watchdog import Kind, Verdict

Say = Callable[[str], None]
ENDS: frozenset[Kind] = frozenset({"exit", "dead-rank"})
# What follows the first sign of a failure within a moment belongs to it: the ends of the other ranks, their last words.
SETTLE_S, SETTLE_MOST_S = 0.7, 6.0
STOP_GRACE_S = 0.5  # whoever is stopped here has failed or waits for who has; checkpoints are whole or not there
RETRY_S = (2.0, 5.0, 10.0, 20.0, 30.0)
WAIT_S = 24 * 3600.0  # for nodes that may be switched on again in the morning
LOOK_S = 20.0
RETURN_AGAIN_S = 900.0  # a node that looked well and was not: its return has cost everybody a restart
LOCK_S = 1.0  # whoever only asks for the lock has it for an instant


class Supervisor:
    """See the module. `cluster` holds the nodes that this run may use. `run` returns when there is nothing more to do."""

    def __init__(self, cluster: Cluster, paths: RunPaths, say: Say) -> None:
        self._paths = paths
        self._say = say
        described, self._recipe = find.recipe_of(paths)
        self._cluster = for_recipe(cluster, self._recipe)
        self._items = recover.material_of(paths, described)
        known = store.read_object(paths.supervisor_json)
        whole = by_hand.kept(known)
        self._was = (known.get("doing"), whole["attempt"])
        self._restarts = [Restart(**entry) for entry in whole["restarts"]]
        # What the person left out at the launch is left out again.
        self._skipped = by_hand.skipped(paths)
        self._pace = Pace(whole["step_s"])
        self._refused: dict[str, float] = {}  # a node that came back in vain -> when it is asked again (monotonic)
        self._looking: threading.Thread | None = None
        self._ended = ""  # how, where a recovery had nothing more to do
        self._noticed_at = time.time()  # when the newest verdict was made: what is waited for behind it is no part of the finding

    def run(self) -> str:
        """Until the run is done, stopped, or given up; how it ended."""
        plan = find.plan_of(self._paths)
        if plan.attempt != self._was[1]:
            self._pace = Pace()
        # Ended in the middle of a recovery: what it has stopped by then looks as if a person had.
        cut_short = Verdict("exit", because="the supervisor was ended while it recovered this run")
        was_recovering = self._was[0] == "recovering" and not self._has_started(plan) and not self._is_stopped(plan)
        if was_recovering:
            with self._followers(plan) as followers:
                _settle(followers, ())
                names = [node.name for node in plan.nodes]
                is_done = self._judge(plan, names, self._signs(followers), followers).kind == "done"
                if not is_done and not self._recover(plan, cut_short, frozenset(), followers):
                    return self._ended or "given up"
        while True:
            plan = find.plan_of(self._paths)
            self._write("watching", f"attempt {plan.attempt}", plan)
            with self._followers(plan) as followers:
                verdict, left_out = self._follow(plan, followers)
                goes_on = (verdict.is_trouble or verdict.kind == "rejoin") and self._recover(plan, verdict, left_out, followers)
            if not verdict.is_trouble and verdict.kind != "rejoin":
                self._look()
                if verdict.kind != "superseded":  # whoever has recovered the run needs the nodes, and looks after it
                    self._clean(left_out)
                self._write("ended", verdict.because or verdict.kind, plan)
                return verdict.kind
            if not goes_on:
                return "stopped" if self._is_stopped(plan) else self._ended or "given up"

    def _followers(self, plan: Plan) -> Followers:
        return Followers(self._cluster, self._paths.name, plan.attempt, [node.name for node in plan.nodes])

    def _follow(self, plan: Plan, followers: Followers) -> tuple[Verdict, frozenset[str]]:
        """Until something is the matter with this attempt, or it is over; and the nodes that are still to be left out."""
        names = [node.name for node in plan.nodes]
        gone = frozenset(node.name for node in self._cluster.nodes if node.name not in names)
        wanted = gone if self._recipe.recovery.rejoin == "next-checkpoint" and self._recipe.script is None else frozenset()
        said, looked_at = "", 0.0
        since: dict[str, int] = {}  # node that is well again -> the newest checkpoint when it was first seen to be
        with Returning(self._cluster, self._recipe, self._items, wanted, names, self._skipped) as returning:
            while True:
                if self._is_stopped(plan):
                    return Verdict("stopped"), gone
                signs = self._signs(followers)
                now = time.monotonic()
                self._pace.see(signs, now)
                verdict = self._judge(plan, names, signs, followers)
                well = {name for name in returning.well if self._refused.get(name, 0.0) <= now}
                if verdict.kind != "well":
                    return verdict, gone - well
                back, since = policy.returning(well, since, signs, verdict)
                if back:
                    return Verdict("rejoin", back, because=f"{', '.join(back)} is well again"), gone - set(back)
                if verdict.because != said:
                    said = verdict.because
                    self._write("watching", said or f"attempt {plan.attempt}", plan)
                if now - looked_at > LOOK_S:
                    looked_at = now
                    self._look_aside()
                followers.wait(0.2)

    def _judge(self, plan: Plan, names: list[str], signs: dict[str, Sign], followers: Followers) -> Verdict:
        """The watchdog's verdict. Of an end it is asked again when torchrun has said its own word."""
        self._noticed_at = time.time()
        verdict = watchdog.judge(plan.attempt, names, signs, self._pace.step_s, plan.step_s)
        if verdict.kind not in ENDS:
            return verdict
        _settle(followers, verdict.nodes)
        signs = self._signs(followers)
        return watchdog.confirmed(verdict, watchdog.judge(plan.attempt, names, signs, self._pace.step_s, plan.step_s), signs)

    def _signs(self, followers: Followers) -> dict[str, Sign]:
        signs = followers.signs()
        if self._recipe.script is None:
            return signs
        return {name: sign.model_copy(update={"ranks": {}}) for name, sign in signs.items()}  # any program: only its end can be seen

    def _has_started(self, plan: Plan) -> bool:
        """The attempt that the last supervisor was about to start came to its start."""
        known = store.read_object(self._paths.state_json)
        return plan.attempt != self._was[1] and (known.get("attempt"), known.get("state")) == (plan.attempt, "running")

    def _is_stopped(self, plan: Plan) -> bool:
        return store.intent_of(self._paths, plan.attempt) in ("stopping", "stopped")

    def _clean(self, left_out: frozenset[str]) -> None:
        """On these nodes a rank may still wait for its peers."""
        with Fleet(self._cluster) as fleet:
            fleet.ask("stop", {"run": self._paths.name, "grace_s": STOP_GRACE_S}, names=left_out)

    def _look_aside(self) -> None:
        """`_look`, while the following goes on: a node that does not answer takes ten seconds."""
        if self._looking is None or not self._looking.is_alive():
            self._looking = threading.Thread(target=self._look, daemon=True, name="look")
            self._looking.start()

    def _look(self) -> None:
        """Gather metrics and write the run's state down, as `homelab status` does."""
        try:
            with Fleet(self._cluster) as fleet:
                watch.Watcher(fleet, self._paths, "").look()
        except Exception as error:  # whatever is wrong with what people are shown: the run is looked after all the same
            self._say(f"looking failed: {error}")

    def _recover(self, plan: Plan, verdict: Verdict, left_out: frozenset[str], followers: Followers) -> bool:
        """Stop, diagnose, decide, start the next attempt. False when the run is given up (or was stopped meanwhile)."""
        self._say(f"attempt {plan.attempt}: {verdict.kind}: {verdict.because}")
        word = "trouble" if verdict.is_trouble else "restart"
        seen = {"time": self._noticed_at, "kind": verdict.kind, "nodes": list(verdict.nodes), "ranks": list(verdict.ranks)}
        store.event(self._paths, f"{word}: {verdict.because}", **seen)
        self._write("recovering", verdict.because, plan)
        began_at, tries, said = time.monotonic(), 0, ""
        found: Examination | None = None
        while True:
            try:
                with Fleet(self._cluster) as fleet, followers.letting_go(fleet):
                    find.mend(fleet, self._paths, self._say)
                    # Once: after the stop nobody has anything to tell.
                    found = found or self._examine(fleet, plan, verdict, left_out, followers)
                    return self._once(fleet, plan, verdict, found, began_at)
            except StoppedError:  # on another machine
                store.set_state(self._paths, "stopped", plan.attempt, intent="stopped")
                return False
            except SupersededError as error:  # whoever has recovered the run looks after it
                self._write("ended", error.message, plan)
                self._ended = "superseded"
                return False
            except HomelabError as error:
                if self._is_stopped(plan):
                    return False
                if isinstance(error, OtherTrainingError) or time.monotonic() - began_at > WAIT_S:
                    diagnosis = found.diagnosis if found else None
                    self._clean(frozenset(node.name for node in plan.nodes))  # it may have been refused before anything was stopped
                    self._give_up(plan, diagnosis, Action("give-up", str(error.message), verdict.kind, hint=error.hint or ""))
                    return False
                # Who was silent may be back by now: it is what is waited for. Whether it is well is seen then.
                found = found and replace(found, unreachable={})
                wait_s = RETRY_S[min(tries, len(RETRY_S) - 1)]
                tries += 1
                if error.message != said:  # once, not twice a minute all night
                    said = error.message
                    self._say(f"cannot go on yet: {error}")
                    store.event(self._paths, f"cannot go on yet: {error.message}", hint=error.hint)
                    self._write("recovering", f"waiting: {error.message}", plan)
                time.sleep(wait_s)

    def _examine(self, fleet: Fleet, plan: Plan, verdict: Verdict, left_out: frozenset[str], followers: Followers) -> Examination:
        if verdict.kind in ("hang", "frozen-rank", "silent-node"):
            stacks.keep(fleet, self._paths, plan, [node.name for node in plan.nodes if verdict.kind != "silent-node" or node.name not in verdict.nodes])
        silent = {name: plan.left_out_because.get(name, "it was left out, and is not well yet") for name in left_out}
        silent |= dict.fromkeys(verdict.nodes, verdict.because) if verdict.kind == "silent-node" else {}
        found = recover.examine_failure(
            fleet, self._paths, plan, silent=silent, silent_ranks=_suspects(verdict), has_failed=verdict.is_trouble,
            because=verdict.because,
        )
        met, slow = patterns.met(found.logs, self._recipe.recovery.log_policies) if verdict.is_trouble else ([], [])
        for entry in slow:
            store.event(self._paths, f"[recovery] log_policies: looking for \"{entry.pattern}\" takes too long; it counts as not met")
        return replace(found, met=tuple(met))

    def _once(self, fleet: Fleet, plan: Plan, verdict: Verdict, found: Examination, began_at: float) -> bool:
        everybody = [node.name for node in fleet.cluster.nodes]
        names = [name for name in everybody if name not in found.unreachable]
        after = max(plan.attempt, *find.attempts(self._paths))
        with claims.claimed(fleet, self._paths.name, names, "recovered by its supervisor", age_s=claims.since(began_at), after=after) as claim:
            return self._go_on(fleet, claim, plan, verdict, found)

    def _go_on(self, fleet: Fleet, claim: Claim, plan: Plan, verdict: Verdict, found: Examination) -> bool:
        everybody = [node.name for node in fleet.cluster.nodes]
        scratch: Scratch = "if-nothing-was-saved" if policy.may_begin_again(found.step, self._recipe.checkpoint) else "never"
        halted = recover.halt(fleet, claim, self._paths, found, nodes=everybody, from_scratch=scratch, say=self._say, grace_s=STOP_GRACE_S)
        action = policy.decide(
            verdict, found.diagnosis, self._restarts, self._recipe.recovery, now=time.time(), step=halted.step,
            nodes=halted.names, met=found.met,
        )  # fmt: skip
        if action.kind == "give-up":
            self._give_up(plan, found.diagnosis, action)
            return False
        if self._is_stopped(plan):  # by a person, while we were looking
            return False
        wanted = [name for name in everybody if name not in action.exclude]
        made = recover.resume(
            fleet, claim, self._paths, found, halted, nodes=wanted, skip=self._skipped, say=self._say,
            lower=policy.lowered(self._restarts, action), why_not=action.because,
        )  # fmt: skip
        for name in set(verdict.nodes if verdict.kind == "rejoin" else ()) - {node.name for node in made.nodes}:
            self._refused[name] = time.monotonic() + RETURN_AGAIN_S
        if verdict.is_trouble:
            self._restarts.append(Restart(time.time(), action.cause, action.node, made.resume_step))
        self._pace = Pace()  # the first step of an attempt takes longer than all others
        self._write("watching", f"attempt {made.attempt} goes on after step {made.resume_step}: {action.because}", made)
        return True

    def _give_up(self, plan: Plan, diagnosis: Diagnosis | None, action: Action) -> None:
        store.set_state(self._paths, "failed", plan.attempt)
        store.event(self._paths, f"given up: {action.because}", cause=diagnosis.cause if diagnosis else None, hint=action.hint)
        self._write("given up", action.because, plan)
        self._say(f"given up: {action.because}")

    def _write(self, doing: str, why: str, plan: Plan) -> None:
        state: dict[str, Any] = {
            "pid": os.getpid(), "doing": doing, "why": why, "attempt": plan.attempt, "step_s": self._pace.step_s, "since": time.time(),
            "restarts": [asdict(restart) for restart in self._restarts],
        }  # fmt: skip
        with store.told(self._paths.supervisor_json):
            store.write_json(self._paths.supervisor_json, state)


def _settle(followers: Followers, names: Collection[str]) -> None:
    """Wait until torchrun on these nodes has said how its ranks ended, which takes longer on a busy machine; not for long."""
    began_s = time.monotonic()
    while (passed_s := time.monotonic() - began_s) < SETTLE_MOST_S:
        signs = followers.signs()
        if passed_s >= SETTLE_S and all(signs[name].exit is not None for name in names if name in signs):
            return
        followers.wait(0.1)


def _suspects(verdict: Verdict) -> tuple[int, ...]:
    """Ranks that were silent before anything was stopped: they are to blame, whatever the others say of their peers."""
    return verdict.ranks if verdict.kind in ("frozen-rank", "hang") else ()


def supervise(cluster: Cluster, paths: RunPaths, say: Say) -> str | None:
    """Supervise a run until its end; None when somebody else does already."""
    deadline = time.monotonic() + LOCK_S
    while True:
        with lock.held(paths) as ours:
            if ours:
                return Supervisor(cluster, paths, say).run()
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
