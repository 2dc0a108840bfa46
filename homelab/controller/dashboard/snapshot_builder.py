"""`build`: the Snapshot of a run from what its nodes answered. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from homelab.controller.base.hint import NO_COMMAND, Hint, homelab
from homelab.controller.base.sanitize import plain_lines
from homelab.controller.dashboard import step_rate
from homelab.controller.dashboard.event_rows import event_rows
from homelab.controller.dashboard.node_rows import age_s, left_out, node_row, rank_rows, replies_of_ranks
from homelab.controller.dashboard.snapshot import LossPoint, NextCommand, Snapshot
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.planning.types import Plan
from homelab.controller.run import ownership
from homelab.controller.run.ownership import Ownership
from homelab.controller.run.state import State, newest_attempt, run_state
from homelab.shared.protocol.rank_messages import Heartbeat, Metric
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
    """What the nodes answered at `now`, and what was gathered before.

    `metrics` are the lines gathered before (the answers may carry only newer ones, of the newest attempt); `events` are the lines of
    events.jsonl. `unreachable`: node -> why it was not asked.
    """

    now: float
    replies: Mapping[str, Reply]
    unreachable: Mapping[str, str] = field(default_factory=dict)
    metrics: Sequence[Metric] = ()
    events: Sequence[Mapping[str, Any]] = ()


def build(run: RunInfo, observed: NodeAnswers) -> Snapshot:
    """The Snapshot of a run from the nodes' answers, without a diagnosis."""
    plan, replies, unreachable = run.plan, observed.replies, observed.unreachable
    expected = tuple(node.name for node in plan.nodes) if plan else ()
    names = expected or tuple(node for node, reply in replies.items() if reply.run) + tuple(unreachable)
    attempt = max(newest_attempt(replies), plan.attempt if plan else 0)
    state = run_state(expected, replies, unreachable, intent=run.intent, kept=run.kept, is_script=run.is_script)
    state = ownership.told_state(state, run.owner, run.kept)
    lines = merged([*observed.metrics, *(line for reply in replies.values() for line in of_reply(reply))])
    notes = (line.message for line in lines if line.kind == "note" and line.message)
    return Snapshot(
        run=run.name,
        state=state,
        recipe=run.recipe if isinstance(run.recipe, str) else "",
        attempt=attempt,
        now=observed.now,
        **_start(replies, attempt),
        **_training(plan, attempt, lines, replies, is_running=state == "running", is_script=run.is_script),
        **_checkpoints(lines, replies),
        restarts=max(0, attempt - 1),
        left_out=left_out(plan),
        nodes=tuple(node_row(name, replies.get(name), unreachable, plan, attempt) for name in names),
        events=event_rows(observed.events, lines),
        notes=(*map(Hint.said, dict.fromkeys(notes)), *_not_asked(state, run.name, unreachable)),
        next_commands=next_commands(state, run.name, is_script=run.is_script),
        supervisor="" if state == "done" else run.owner.doing,  # who leaves a run that is done is no news
    )


def _start(replies: Mapping[str, Reply], attempt: int) -> dict[str, Any]:
    """When the attempt began, and how long ago."""
    started = [
        (reply, reply.run.started_at) for reply in replies.values() if reply.run and reply.run.attempt == attempt and reply.run.started_at
    ]
    ages = [age for reply, moment in started if (age := age_s(reply, moment)) is not None]
    return {"started_at": min((moment for _, moment in started), default=None), "running_s": max(ages, default=None)}


def _training(
    plan: Plan | None, attempt: int, lines: Sequence[Metric], replies: Mapping[str, Reply], *, is_running: bool, is_script: bool
) -> dict[str, Any]:
    """How far the training is, how good, how fast, and each rank's part in it."""
    train = [line for line in lines if line.kind == "train"]
    history = loss_history(train)
    beats = [rank.heartbeat for rank in replies_of_ranks(replies, attempt).values() if rank.heartbeat]
    total = max((beat.total_steps for beat in beats if beat.total_steps), default=None)
    of_rank = by_rank(train, attempt)
    step = _step(plan, of_rank, history[-1].step if history else None, beats, is_script=is_script)
    rates = [rate for rank_lines in of_rank.values() if (rate := step_rate.tokens_per_s(rank_lines)) is not None]
    reached, planned = step_rate.efficiency(plan, sum(rates) if rates else None)
    step_tokens = next((beat.step_tokens for beat in beats if beat.step_tokens), None)
    return {
        "step": step, "total_steps": total, "step_s": step_rate.step_s(train, attempt),
        "epoch": max((line.epoch for rank_lines in of_rank.values() for line in rank_lines[-1:] if line.epoch is not None), default=None),
        "loss": history[-1].loss if history else None, "loss_history": history, "eval_losses": eval_losses(lines),
        "tokens_per_s": sum(rates) if rates else None, "efficiency": reached if is_running else None, "planned_efficiency": planned,
        "is_efficiency_measured": bool(plan and plan.time and plan.time.is_measured),
        "eta_s": step_rate.eta_s(lines, step, total, step_tokens) if is_running else None, "ranks": rank_rows(replies, plan, attempt, of_rank),
    }  # fmt: skip


def _step(
    plan: Plan | None, of_rank: Mapping[int, Sequence[Metric]], newest: int | None, beats: Sequence[Heartbeat], *, is_script: bool
) -> int:
    """The step of the run. An attempt without a step yet is at its resume step: the last lines of the one before may never have come here.

    What a program of one's own goes on from is not known.
    """
    if plan and plan.resume_step and not of_rank and not is_script:
        return plan.resume_step
    return newest if newest is not None else max([0, *(beat.step for beat in beats)])


def _checkpoints(lines: Sequence[Metric], replies: Mapping[str, Reply]) -> dict[str, Any]:
    steps = sorted({step for reply in replies.values() if reply.run for step in reply.run.checkpoints})
    return {"checkpoint_steps": tuple(steps), "checkpoint_age_s": step_rate.checkpoint_age_s(steps[-1], lines, replies) if steps else None}


def _not_asked(state: State, run: str, unreachable: Mapping[str, str]) -> list[Hint]:
    """Of a run that was stopped: where something of it may be left."""
    if state not in ("stopping", "stopped"):
        return []
    after = Hint("to end processes of the run there, when it answers: {}", homelab("stop", run))
    return [Hint("{} was not asked: {}; {}", name, plain_lines(why).split("\n", 1)[0], after) for name, why in unreachable.items()]


def of_reply(reply: Reply) -> Iterable[Metric]:
    """All lines that this node sent."""
    if reply.run:
        for rank in reply.run.ranks.values():
            yield from rank.metrics


def merged(lines: Iterable[Metric]) -> list[Metric]:
    """Each line once, by attempt and step; what was done again in a later attempt replaces what came before."""
    kept: dict[tuple[Any, ...], Metric] = {}
    for line in lines:
        key = (line.kind, line.attempt, line.rank, line.step, line.message)
        kept[key] = line
    return sorted(kept.values(), key=lambda line: (line.attempt, line.step, line.time))


def loss_history(train: Sequence[Metric]) -> tuple[LossPoint, ...]:
    """Steps in order, of the newest attempt that made each. All ranks write the same global loss."""
    losses: dict[int, float] = {}
    attempts: dict[int, int] = {}
    for line in train:
        if line.attempt > max(attempts.values(), default=line.attempt):
            # A later attempt began before steps that an earlier one had reached: those were undone.
            losses = {step: loss for step, loss in losses.items() if step < line.step}
            attempts = {step: attempt for step, attempt in attempts.items() if step < line.step}
        if line.loss is not None:
            losses[line.step], attempts[line.step] = line.loss, line.attempt
    return tuple(LossPoint(step=step, loss=loss) for step, loss in sorted(losses.items()))


def eval_losses(lines: Sequence[Metric]) -> tuple[LossPoint, ...]:
    """The loss on the held-out rows, by step."""
    by_step = {line.step: line.eval_loss for line in lines if line.kind == "eval" and line.eval_loss is not None}
    return tuple(LossPoint(step=step, loss=loss) for step, loss in sorted(by_step.items()))


def by_rank(train: Iterable[Metric], attempt: int) -> dict[int, list[Metric]]:
    """Rank -> its lines of this attempt."""
    of_rank: dict[int, list[Metric]] = {}
    for line in train:
        if line.attempt == attempt:
            of_rank.setdefault(line.rank, []).append(line)
    return of_rank


def next_commands(state: State, run: str, diagnosis: Diagnosis | None = None, *, is_script: bool = False) -> tuple[NextCommand, ...]:
    """What a person may want to type in this state, without options.

    The model of a program of one's own (`is_script`) cannot be asked. Where the fix of the `diagnosis` is a new training, to recover the old one is not what comes next.
    """
    commands = {
        "launch": diagnosis.launch if diagnosis else NO_COMMAND,
        "follow": homelab("status", run),
        "logs": homelab("logs", run),
        "stop": homelab("stop", run),
        "recover": homelab("recover", run),
        "ask it": homelab(f"chat {run} --prompt '...'"),
    }
    wanted: dict[State, tuple[str, ...]] = {
        "done": ("logs",) if is_script else ("ask it", "logs"),
        "failed": ("launch" if commands["launch"] else "recover", "logs"),
        "lost": ("recover", "follow", "stop"),
        "stopped": ("recover", "logs"),
    }
    return tuple(NextCommand(purpose=name, command=commands[name]) for name in wanted.get(state, ("follow", "stop", "recover")))
