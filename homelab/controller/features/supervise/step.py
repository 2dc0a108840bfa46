"""The supervisor of a run as a state machine: from its state and what it observes to its next act. Pure: no clock, no nodes.

`homelab.controller.features.supervise.supervisor` gathers the observation, performs the act, and comes back with the result.

    new ---> watching ---> recovering ---> resumed ---> watching ...      the attempt failed, a node can be taken back, or another cut pays
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
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.features.supervise import acts, restart_policy
from homelab.controller.features.supervise.observation import Examined, Failed, Followed, HaltResult, Observation, ResumeResult
from homelab.controller.run import events, restart
from homelab.shared.recipe import Checkpoint, Recovery

RETRY_S = (2.0, 5.0, 10.0, 20.0, 30.0)
WAIT_S = 24 * 3600.0  # for nodes that may be switched on again in the morning
COLLECT_S = 20.0
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


@dataclass(frozen=True)
class Recovering:
    """One recovery: since when, why, and how far it is."""

    incident: acts.Incident
    since_s: float
    examined: Examined | None = None
    decision: restart_policy.Decision | None = None
    asks_silent: bool = False
    tries: int = 0
    said: str = ""


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
        state = replace(state, attempt=observation.result.attempt, watch=Watch(observation.result.absent))
    watch = state.watch
    if observation.is_stopped or observation.verdict is None:
        return state, acts.End("stopped", "stopped", watch.absent, collects=True)
    verdict = observation.verdict
    well = frozenset(name for name in observation.well if state.refused.get(name, 0.0) <= observation.now_s)
    if verdict.is_trouble:
        return _begin(state, observation, acts.Incident(verdict, observation.time, watch.absent - well))
    if verdict.kind != "well":
        # The controller that has recovered the run needs the nodes, and looks after it.
        left_out = frozenset() if verdict.kind == "superseded" else watch.absent - well
        return state, acts.End(verdict.kind, verdict.because or verdict.kind, left_out, collects=True)
    rejoining, first_seen = restart_policy.rejoining(well, watch.first_seen, observation.checkpoint, verdict)
    if rejoining:
        return _begin(state, observation, acts.Incident(None, observation.time, watch.absent - set(rejoining), rejoining))
    if observation.recut and not verdict.blind:  # a node that cannot be heard could not be stopped
        return _begin(state, observation, acts.Incident(None, observation.time, watch.absent, recut=observation.recut))
    watch = replace(watch, first_seen=first_seen)
    if verdict.because != watch.reported:
        report = acts.WriteProgress("watching", verdict.because or f"attempt {state.attempt}")
        return replace(state, watch=replace(watch, reported=verdict.because)), report
    if observation.now_s - watch.collected_s > COLLECT_S:
        return replace(state, watch=replace(watch, collected_s=observation.now_s)), acts.Collect()
    return replace(state, watch=watch), acts.Wait()


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
    incident, examined = recovering.incident, recovering.examined
    assert examined is not None
    if incident.verdict is None:
        decision = restart_policy.Decision("go-on", incident.because, incident.kind, ", ".join(incident.nodes))
    else:
        failure = restart_policy.Failure(incident.verdict, examined.diagnosis, examined.met)
        decision = restart_policy.decide(
            failure, state.restarts, state.recovery, now=observation.time, step=halted.step, nodes=halted.nodes
        )
        decision = restart_policy.keeping(halted.indispensable, decision)
    if decision.kind == "give-up":
        return _give_up(state, decision.because, decision.hint, examined.diagnosis)
    if observation.is_stopped:  # a person stopped the run while the nodes were asked
        return state, acts.End("stopped")
    state = replace(state, recovering=replace(recovering, decision=decision))
    return state, acts.Resume(decision.because, decision.exclude, restart_policy.lowered(state.restarts, decision))


def _resumed(state: State, recovering: Recovering, observation: Observation, resumed: ResumeResult) -> Step:
    decision, refused, restarts = recovering.decision, dict(state.refused), state.restarts
    assert decision is not None
    refused |= {name: observation.now_s + REFUSED_S for name in recovering.incident.rejoining if name not in resumed.nodes}
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
    if error.kind == "other-training" or observation.now_s - recovering.since_s > WAIT_S:
        diagnosis = recovering.examined.diagnosis if recovering.examined else None
        return _give_up(state, error.message, error.hint, diagnosis, stops_nodes=True)
    seconds = RETRY_S[min(recovering.tries, len(RETRY_S) - 1)]
    waiting = replace(
        recovering, tries=recovering.tries + 1, said=error.message,
        # A node that was silent may be back by now: it is what is waited for. Whether it is well is seen then.
        asks_silent=recovering.asks_silent or recovering.examined is not None,
    )  # fmt: skip
    # Once, not twice a minute all night.
    return replace(state, phase="waiting", recovering=waiting), acts.WaitBeforeRetry(
        seconds, error if error.message != recovering.said else None
    )


def _retry(state: State, observation: Observation) -> Step:
    assert state.recovering is not None
    return _try(state, state.recovering)


def _give_up(state: State, because: str, hint: str, diagnosis: Diagnosis | None, *, stops_nodes: bool = False) -> Step:
    return replace(state, phase="giving-up"), acts.GiveUp(because, hint, diagnosis.cause if diagnosis else None, stops_nodes)


def _end_given_up(state: State, observation: Observation) -> Step:
    return state, acts.End("stopped" if observation.is_stopped else "given up")


_PHASES: Mapping[Phase, Callable[[State, Observation], Step]] = {
    "new": _new, "reviewing": _review, "watching": _watch, "recovering": _recover, "waiting": _retry,
    "resumed": lambda state, seen: _follow(state), "giving-up": _end_given_up,
}  # fmt: skip
