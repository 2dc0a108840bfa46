"""The supervisor of a run as a state machine: from its state and what it observes to its next act. Pure: no clock, no nodes.

`homelab.controller.features.supervise.supervisor` gathers the observation, performs the act, and comes back with the result.

    new ---> watching ---> recovering ---> resumed ---> watching ...      the attempt failed, a node can be taken back or its owner wants it, or another cut pays
     |          |           |     ^  |
     |          |           v     |  +---> giving-up                      trying again would not help
     |          |          waiting                                        what is in the way may pass by itself
     |          +--> End   done, stopped, recovered by another controller
     +--> reviewing ---> watching | recovering                            the last supervisor was ended while it recovered
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from homelab.controller.attempt.watchdog import AttemptVerdict
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.features.supervise import acts, leaving, restart_policy
from homelab.controller.features.supervise.observation import Examined, Failed, Followed, HaltResult, Observation, ResumeResult
from homelab.controller.run import events, leave, restart
from homelab.shared.recipe import Checkpoint, Recovery

RETRY_S = (2.0, 5.0, 10.0, 20.0, 30.0)
OTHERS_S = 300.0
WAIT_S = 24 * 3600.0  # for nodes that may be switched on again in the morning
COLLECT_S, FIRST_COLLECT_S = 20.0, 5.0  # the first not while ranks load: both want the processors
REFUSED_S = 900.0  # a node that looked well and was not: its return has cost everybody a restart
CUT_SHORT = AttemptVerdict("exit", because="the supervisor ended while it recovered this run")

Phase = Literal["new", "reviewing", "watching", "recovering", "waiting", "resumed", "giving-up"]


@dataclass(frozen=True)
class Watch:
    """What is known of the attempt that is watched. `first_seen`: node that is healthy again -> the newest checkpoint when that was first seen."""

    absent: frozenset[str] = frozenset()
    reported: str | None = None
    collected_s: float = -math.inf
    first_seen: Mapping[str, int] = field(default_factory=dict)
    saving: leaving.Saving | None = None


@dataclass(frozen=True)
class Recovering:
    """One recovery: since when, why, and how far it is. While nodes are `away` with their owners, it is tried again at `again_s`, or when others are."""

    incident: acts.Incident
    since_s: float
    examined: Examined | None = None
    decision: restart_policy.Decision | None = None
    asks_silent: bool = False
    tries: int = 0
    said: str = ""
    away: frozenset[str] = frozenset()
    again_s: float = 0.0


@dataclass(frozen=True)
class State:
    """`was_cut_short`: the last supervisor was ended while it recovered this attempt. `refused`: node that came back in vain -> when it may again."""

    attempt: int
    recovery: Recovery
    checkpoint: Checkpoint
    was_cut_short: bool = False
    restarts: tuple[restart.Restart, ...] = ()
    phase: Phase = "new"
    watch: Watch = field(default_factory=Watch)
    recovering: Recovering | None = None
    refused: Mapping[str, float] = field(default_factory=dict)


Step = tuple[State, acts.Act]


def next_step(state: State, observation: Observation) -> Step:
    """The next act, and the state to come back with."""
    return _PHASES[state.phase](state, observation)


def _new(state: State, observation: Observation) -> Step:
    if state.was_cut_short and not observation.is_stopped:
        return replace(state, phase="reviewing"), acts.Review()
    return _follow(state)


def _follow(state: State) -> Step:
    return replace(state, phase="watching", watch=Watch(), recovering=None), acts.Follow()


def _review(state: State, observation: Observation) -> Step:
    """What the last supervisor had stopped by then looks as if a person had stopped it."""
    if observation.verdict is None or observation.verdict.kind == "done":
        return _follow(state)
    return _begin(state, observation, acts.Incident(CUT_SHORT, observation.time, frozenset()))


def _watch(state: State, observation: Observation) -> Step:
    if isinstance(observation.result, Followed):
        due_s = observation.now_s - COLLECT_S + FIRST_COLLECT_S
        state = replace(state, attempt=observation.result.attempt, watch=Watch(observation.result.absent, collected_s=due_s))
    watch = state.watch
    if observation.is_stopped or observation.verdict is None:
        return state, acts.End("stopped", "stopped", watch.absent, collects=True)
    verdict = observation.verdict
    well = frozenset(name for name in observation.well - set(observation.away) if state.refused.get(name, 0.0) <= observation.now_s)
    if verdict.is_trouble:
        return _begin(state, observation, acts.Incident(verdict, observation.time, watch.absent - well))
    if verdict.kind != "well":
        # The controller that has recovered the run needs the nodes, and looks after it.
        left_out = frozenset() if verdict.kind == "superseded" else watch.absent
        return state, acts.End(verdict.kind, verdict.because or verdict.kind, left_out, collects=True)
    moves = leaving.moves(observation, watch.absent, well)
    if moves:
        return _move(state, observation, moves, watch.absent - well)
    watch = replace(watch, saving=None)
    rejoining, first_seen = restart_policy.rejoining(well, watch.first_seen, observation.checkpoint, verdict)
    if rejoining:
        return _begin(state, observation, acts.Incident(None, observation.time, watch.absent - set(rejoining), rejoining))
    if observation.recut and not verdict.blind:  # a node that cannot be heard could not be stopped
        return _begin(state, observation, acts.Incident(None, observation.time, watch.absent, recut=observation.recut))
    return _report(replace(state, watch=replace(watch, first_seen=first_seen)), observation, verdict)


def _report(state: State, observation: Observation, verdict: AttemptVerdict) -> Step:
    """Write down what is seen, gather, or wait."""
    watch = state.watch
    if verdict.because != watch.reported:
        report = acts.WriteProgress("watching", verdict.because or f"attempt {state.attempt}")
        return replace(state, watch=replace(watch, reported=verdict.because)), report
    if observation.now_s - watch.collected_s > COLLECT_S:
        return replace(state, watch=replace(watch, collected_s=observation.now_s)), acts.Collect()
    return state, acts.Wait()


def _move(state: State, observation: Observation, moves: leaving.Moves, left_out: frozenset[str]) -> Step:
    """Nodes go to their owners or come from there: the attempt is saved and ends, and the next one begins without them or with them."""
    verdict = observation.verdict
    assert verdict is not None
    match leaving.next_move(observation, state.watch.saving):
        case "save":
            saving = leaving.Saving(observation.now_s, observation.step)
            return replace(state, watch=replace(state.watch, saving=saving)), acts.Save()
        case "move":
            incident = acts.Incident(None, observation.time, left_out, moves.returning, leaving=moves.leaving, returning=moves.returning)
            return _begin(state, observation, incident)
    return _report(state, observation, verdict)


def _begin(state: State, observation: Observation, incident: acts.Incident) -> Step:
    return replace(state, phase="recovering", recovering=Recovering(incident, observation.now_s)), acts.Begin(incident)


def _recover(state: State, observation: Observation) -> Step:
    recovering = state.recovering
    assert recovering is not None
    match observation.result:
        case Failed() as error:
            return _failed(state, recovering, observation, error)
        case Examined() as examined:
            return _try(state, replace(recovering, examined=examined))
        case HaltResult() as halted:
            return _decide(state, recovering, observation, halted)
        case ResumeResult() as resumed:
            return _resumed(state, recovering, observation, resumed)
        case _:
            return _try(state, recovering)


def _try(state: State, recovering: Recovering) -> Step:
    state = replace(state, phase="recovering", recovering=recovering)
    if recovering.examined is None:  # once: after the stop there is no rank left to ask
        return state, acts.Examine(recovering.incident)
    return state, acts.Halt(restart_policy.may_begin_again(recovering.examined.step, state.checkpoint), recovering.asks_silent)


def _decide(state: State, recovering: Recovering, observation: Observation, halted: HaltResult) -> Step:
    incident, examined, away = recovering.incident, recovering.examined, observation.away
    assert examined is not None
    staying = tuple(name for name in halted.nodes if name not in away)
    if incident.verdict is None:
        decision = restart_policy.Decision("go-on", incident.because, incident.kind, ", ".join(incident.nodes))
    else:
        failure = restart_policy.Failure(incident.verdict, examined.diagnosis, examined.met)
        decision = restart_policy.decide(failure, state.restarts, state.recovery, now=observation.time, step=halted.step, nodes=staying)
        decision = restart_policy.keeping(halted.indispensable, decision)
    if decision.kind == "give-up":
        return _give_up(state, decision.because, decision.hint, examined.diagnosis)
    if observation.is_stopped:  # a person stopped the run while the nodes were asked
        return state, acts.End("stopped")
    if because := leaving.why_waits(away, halted.nodes, halted.indispensable):
        hint = Hint("nothing is needed: it goes on by itself; to take the node back now: {}", homelab("yield", min(away), "--back"))
        # One that is off may be switched on, and train alone; owners are asked no more often than that.
        is_one_off = bool(observation.nodes - set(away) - set(halted.nodes))
        again_s = OTHERS_S if is_one_off else math.inf
        return _wait(state, recovering, observation, Failed("other", because, hint, because), again_s, is_for_owner=True)
    state = replace(state, recovering=replace(recovering, decision=decision))
    exclude = tuple(dict.fromkeys((*decision.exclude, *sorted(away))))
    why_not = [decision.because] if decision.exclude or not away else []
    why_not += [leave.sentence(name, away[name]) for name in sorted(away)]
    ends = (*state.restarts, restart.Restart(observation.time, decision.cause, decision.node, halted.step))
    return state, acts.Resume("; ".join(why_not), exclude, restart.halvings(ends))


def _resumed(state: State, recovering: Recovering, observation: Observation, resumed: ResumeResult) -> Step:
    decision, refused, restarts = recovering.decision, dict(state.refused), state.restarts
    assert decision is not None
    refused |= {
        name: observation.now_s + REFUSED_S for name in recovering.incident.rejoining if name not in (*resumed.nodes, *observation.away)
    }
    if recovering.incident.verdict is not None:
        restarts = (*restarts, restart.Restart(observation.time, decision.cause, decision.node, resumed.step))
    state = replace(state, phase="resumed", attempt=resumed.attempt, restarts=restarts, refused=refused)
    words = events.resumed(resumed.attempt, resumed.step, is_program=resumed.is_program).sentence
    return state, acts.WriteProgress("watching", f"{words}: {decision.because}")


def _failed(state: State, recovering: Recovering, observation: Observation, error: Failed) -> Step:
    if error.kind == "stopped":
        return state, acts.End("stopped", records_stop=True)
    if error.kind == "superseded":  # the controller that has recovered the run looks after it
        return state, acts.End("superseded", error.message)
    if observation.is_stopped:
        return state, acts.End("stopped")
    is_late = observation.now_s - recovering.since_s > WAIT_S and not observation.away
    if error.kind == "other-training" or is_late:
        diagnosis = recovering.examined.diagnosis if recovering.examined else None
        return _give_up(state, error.message, error.hint, diagnosis, stops_nodes=True)
    return _wait(state, recovering, observation, error, RETRY_S[min(recovering.tries, len(RETRY_S) - 1)])


def _wait(
    state: State, recovering: Recovering, observation: Observation, error: Failed, seconds: float, *, is_for_owner: bool = False
) -> Step:
    """Try again after this time. While nodes are with their owners it is looked more often whether one has come back."""
    away = frozenset(observation.away)
    waiting = replace(
        recovering, tries=recovering.tries + 1, said=error.message,
        # A node that was silent may be back by now: it is what is waited for. Whether it is well is seen then.
        asks_silent=recovering.asks_silent or recovering.examined is not None,
        away=away, again_s=observation.now_s + seconds if away else 0.0,
        since_s=observation.now_s if away else recovering.since_s,  # an owner may want a node for longer than a fault may last
    )  # fmt: skip
    # Once, not twice a minute all night.
    return replace(state, phase="waiting", recovering=waiting), acts.WaitBeforeRetry(
        min(seconds, leaving.LOOK_S) if away else seconds, error if error.message != recovering.said else None, is_for_owner
    )


def _retry(state: State, observation: Observation) -> Step:
    recovering = state.recovering
    assert recovering is not None
    is_same = recovering.away and recovering.away == frozenset(observation.away) and not observation.is_stopped
    if is_same and observation.now_s < recovering.again_s:
        return replace(state, recovering=replace(recovering, since_s=observation.now_s)), acts.WaitBeforeRetry(leaving.LOOK_S)
    return _try(state, recovering)


def _give_up(state: State, because: str, hint: str, diagnosis: Diagnosis | None, *, stops_nodes: bool = False) -> Step:
    return replace(state, phase="giving-up"), acts.GiveUp(because, hint, diagnosis.cause if diagnosis else None, stops_nodes)


def _end_given_up(state: State, observation: Observation) -> Step:
    return state, acts.End("stopped" if observation.is_stopped else "given up")


_PHASES: Mapping[Phase, Callable[[State, Observation], Step]] = {
    "new": _new, "reviewing": _review, "watching": _watch, "recovering": _recover, "waiting": _retry,
    "resumed": lambda state, seen: _follow(state), "giving-up": _end_given_up,
}  # fmt: skip
