"""`build`: the Snapshot of a run from what its nodes answered. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from homelab.controller.base.hint import NO_COMMAND, Hint, homelab
from homelab.controller.base.sanitize import plain_lines
from homelab.controller.dashboard import step_rate
from homelab.controller.dashboard.attempt_pace import AttemptPace
from homelab.controller.dashboard.event_rows import event_rows
from homelab.controller.dashboard.measured import Measured
from homelab.controller.dashboard.node_rows import age_s, left_out, node_row, rank_rows, replies_of_ranks
from homelab.controller.dashboard.snapshot import GivenBack, NextCommand, Snapshot
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.planning.types import Plan
from homelab.controller.run import leave, ownership
from homelab.controller.run.ownership import Ownership
from homelab.controller.run.state import FINISHED, State, newest_attempt, run_state
from homelab.shared.protocol.rank_messages import Heartbeat
from homelab.shared.protocol.run_messages import Reply


@dataclass(frozen=True)
class RunInfo:
    """What the controller's folder says of a run. `recipe` is the name of its file; a damaged run.json gives anything.

    `intent`, `kept` and `is_script` as for `run_state`; `owner`: who acts on it now.
    """

    name: str
    recipe: object = ""
    plan: Plan | None = None
    is_script: bool = False
    intent: State | None = None
    kept: State | None = None
    owner: Ownership = field(default_factory=Ownership)


@dataclass(frozen=True)
class NodeAnswers:
    """What the nodes answered at `now`, and what was measured up to then.

    `measured`: all that the ranks have measured, the metrics of these answers with it; `events` are the lines of events.jsonl. `unreachable`: node
    -> why it was not asked.
    """

    now: float
    replies: Mapping[str, Reply]
    unreachable: Mapping[str, str] = field(default_factory=dict)
    measured: Measured = field(default_factory=Measured)
    events: Sequence[Mapping[str, Any]] = ()


def build(run: RunInfo, observed: NodeAnswers) -> Snapshot:
    """The Snapshot of a run from the nodes' answers, without a diagnosis."""
    plan, replies, unreachable = run.plan, observed.replies, observed.unreachable
    expected = tuple(node.name for node in plan.nodes) if plan else ()
    names = expected or tuple(node for node, reply in replies.items() if reply.run) + tuple(unreachable)
    attempt = max(newest_attempt(replies), plan.attempt if plan else 0)
    state = run_state(expected, replies, unreachable, intent=run.intent, kept=run.kept, is_script=run.is_script)
    state = ownership.told_state(state, run.owner, run.kept)
    measured = observed.measured
    return Snapshot(
        run=run.name,
        state=state,
        recipe=run.recipe if isinstance(run.recipe, str) else "",
        attempt=attempt,
        now=observed.now,
        **_start(replies, attempt),
        **_training(plan, attempt, measured, replies, is_running=state == "running", is_script=run.is_script),
        **_checkpoints(measured, replies),
        restarts=max(0, attempt - 1 - leave.moves(observed.events)),
        **_given_back(state, observed.events),
        left_out=left_out(plan),
        nodes=tuple(node_row(name, replies.get(name), unreachable, plan, attempt) for name in names),
        events=event_rows(observed.events, measured.moves),
        notes=(*map(Hint.said, measured.notes), *_not_asked(state, run.name, unreachable)),
        next_commands=next_commands(state, run.name, is_script=run.is_script),
        supervisor="" if state == "done" else run.owner.doing,  # who leaves a run that is done is no news
    )


def _given_back(state: State, events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Who is with an owner now; of a run that is over nobody is."""
    away = leave.lasting(events) if state not in FINISHED else {}
    rows = tuple(GivenBack(name=name, until=one.until, because=one.because) for name, one in away.items())
    return {"given_back": rows, "waits_for_owner": bool(away) and state != "running" and leave.is_waiting(events)}


def _start(replies: Mapping[str, Reply], attempt: int) -> dict[str, Any]:
    """When the attempt began, and how long ago."""
    started = [
        (reply, reply.run.started_at) for reply in replies.values() if reply.run and reply.run.attempt == attempt and reply.run.started_at
    ]
    ages = [age for reply, moment in started if (age := age_s(reply, moment)) is not None]
    return {"started_at": min((moment for _, moment in started), default=None), "running_s": max(ages, default=None)}


def _training(
    plan: Plan | None, attempt: int, measured: Measured, replies: Mapping[str, Reply], *, is_running: bool, is_script: bool
) -> dict[str, Any]:
    """How far the training is, how good, how fast, and each rank's part in it."""
    newest, pace = measured.losses.last, measured.pace(attempt)
    beats = [rank.heartbeat for rank in replies_of_ranks(replies, attempt).values() if rank.heartbeat]
    total = max((beat.total_steps for beat in beats if beat.total_steps), default=None)
    step = _step(plan, pace, newest.step if newest else None, beats, is_script=is_script)
    rates = [rate for number in sorted(pace.ranks) if (rate := step_rate.tokens_per_s(pace.ranks[number].lines)) is not None]
    reached, planned = step_rate.efficiency(plan, sum(rates) if rates else None)
    step_tokens = next((beat.step_tokens for beat in beats if beat.step_tokens), None)
    last = [course.lines[-1] for course in pace.ranks.values()]
    return {
        "step": step, "total_steps": total, "step_s": pace.step_s, "epoch": max((line.epoch for line in last if line.epoch is not None), default=None),
        "loss": newest.loss if newest else None, "loss_history": measured.losses.points, "eval_losses": measured.eval_losses.points,
        "accuracy": measured.accuracy("train"), "eval_accuracy": measured.accuracy("eval"),
        "tokens_per_s": sum(rates) if rates else None, "efficiency": reached if is_running else None, "planned_efficiency": planned,
        "is_efficiency_measured": bool(plan and plan.time and plan.time.is_measured),
        "eta_s": measured.eta_s(step, total, step_tokens) if is_running else None, "ranks": rank_rows(replies, plan, attempt, pace.ranks),
    }  # fmt: skip


def _step(plan: Plan | None, pace: AttemptPace, newest: int | None, beats: Sequence[Heartbeat], *, is_script: bool) -> int:
    """The step of the run. An attempt without a step yet is at its resume step: the last lines of the one before may never have come here.

    What a program of one's own goes on from is not known.
    """
    if plan and plan.resume_step and not pace.ranks and not is_script:
        return plan.resume_step
    return newest if newest is not None else max([0, *(beat.step for beat in beats)])


def _checkpoints(measured: Measured, replies: Mapping[str, Reply]) -> dict[str, Any]:
    steps = sorted({step for reply in replies.values() if reply.run for step in reply.run.checkpoints})
    return {
        "checkpoint_steps": tuple(steps),
        "checkpoint_age_s": step_rate.checkpoint_age_s(measured.saved(steps[-1]), replies) if steps else None,
    }


def _not_asked(state: State, run: str, unreachable: Mapping[str, str]) -> list[Hint]:
    """Of a run that was stopped: where something of it may be left."""
    if state not in ("stopping", "stopped"):
        return []
    after = Hint("to end processes of the run there, when it answers: {}", homelab("stop", run))
    return [Hint("{} was not asked: {}; {}", name, plain_lines(why).split("\n", 1)[0], after) for name, why in unreachable.items()]


def next_commands(
    state: State, run: str, diagnosis: Diagnosis | None = None, *, is_script: bool = False, scores: bool = False
) -> tuple[NextCommand, ...]:
    """What a person may want to type in this state, without options.

    The model of a program of one's own (`is_script`) cannot be asked, and one that `scores` writes no text. Where the fix of the `diagnosis` is a new training, to
    recover the old one is not what comes next.
    """
    commands = {
        "launch": diagnosis.launch if diagnosis else NO_COMMAND,
        "follow": homelab("status", run),
        "logs": homelab("logs", run),
        "stop": homelab("stop", run),
        "recover": homelab("recover", run),
        "ask it": homelab(f"chat {run} --prompt '...'"),
        "fetch": homelab("fetch", run),
    }
    wanted: dict[State, tuple[str, ...]] = {
        "done": ("logs",) if is_script else ("fetch" if scores else "ask it", "logs"),
        "failed": ("launch" if commands["launch"] else "recover", "logs"),
        "lost": ("recover", "follow", "stop"),
        "stopped": ("recover", "logs"),
    }
    return tuple(NextCommand(purpose=name, command=commands[name]) for name in wanted.get(state, ("follow", "stop", "recover")))
