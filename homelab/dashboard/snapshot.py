"""Snapshot: everything a dashboard shows, as one value; and `build`, which makes it from what the nodes answered."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from homelab.dashboard import eta, pace
from homelab.diagnose.cause import Diagnosis
from homelab.planning.model import Frozen, Plan, Shown
from homelab.runs.reply import Heartbeat, Metric, RankReply, Reply, plain_lines
from homelab.runs.state import State, newest_attempt, node_part, run_state


class GpuRow(Shown):
    """One card; None where it does not say."""

    name: str
    utilisation_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    temperature_c: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    is_left_out: bool = False  # cluster.toml names other cards of the node


class LeftOut(Shown):
    """A node of the cluster that takes no part in this attempt, and why, as far as that was written down."""

    name: str
    because: str = ""


class NodeRow(Shown):
    """One machine. `torchrun` is "running", "not started", "gone" or how it ended; `why_not`: why it was not asked."""

    name: str
    reachable: bool
    why_not: str = ""
    address: str = ""
    cpu_load_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    gpus: tuple[GpuRow, ...] = ()
    torchrun: str = "not started"
    needs_action: bool = False


class RankRow(Shown):
    """One worker process. Seconds are of its newest step, `tokens_per_s` of the last ones; `heartbeat_age_s` by its node's own clock.

    `memory_bytes`: the most it ever held, on its card or in the machine.
    """

    rank: int
    node: str
    device: str = ""
    phase: str = ""
    step: int | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    share: int | None = None
    compute_s: float | None = None
    communication_s: float | None = None
    heartbeat_age_s: float | None = None
    memory_bytes: int | None = None
    log_tail: tuple[str, ...] = ()


class LossPoint(Frozen):
    """The loss at one step: mean per token over the global batch."""

    step: int
    loss: float


class EventRow(Shown):
    """Something that happened to the run, in the controller's clock."""

    time: float
    text: str


class NextCommand(Shown):
    """What a person may type now, and what it is for."""

    purpose: str
    command: str


class Snapshot(Shown):
    """A run at one moment. `eta_s` is None while nobody can know; `started_at` is that of the attempt, by the clock of a node.

    `running_s`: for how long the attempt has been under way by the clock of its nodes, None where that cannot be told. `step_s` is that of
    the last steps of all together. Efficiencies are fractions of the sum of the ranks' speeds alone: what is reached, what the plan promised.
    """

    run: str
    state: State
    recipe: str
    attempt: int
    started_at: float | None
    now: float
    running_s: float | None = None
    step_s: float | None = None
    epoch: float | None = None
    efficiency: float | None = None
    planned_efficiency: float | None = None
    checkpoint_age_s: float | None = None
    restarts: int = 0
    left_out: tuple[LeftOut, ...] = ()
    total_steps: int | None
    step: int
    loss: float | None
    eval_losses: tuple[LossPoint, ...] = ()
    eta_s: float | None = None
    tokens_per_s: float | None = None
    loss_history: tuple[LossPoint, ...] = ()
    nodes: tuple[NodeRow, ...] = ()
    ranks: tuple[RankRow, ...] = ()
    events: tuple[EventRow, ...] = ()
    notes: tuple[str, ...] = ()
    checkpoint_steps: tuple[int, ...] = ()
    next_commands: tuple[NextCommand, ...] = ()
    diagnosis: Diagnosis | None = None
    supervisor: str = ""
    """What the run's supervisor on this machine is doing, with its reason; empty where there is none."""


def build(
    *,
    run: str,
    recipe: object,
    replies: Mapping[str, Reply],
    unreachable: Mapping[str, str],
    now: float,
    plan: Plan | None = None,
    expected_nodes: Sequence[str] = (),
    metrics: Iterable[Metric] = (),
    events: Iterable[Mapping[str, Any]] = (),
    total_steps: int | None = None,
    intent: State | None = None,
    kept: State | None = None,
    is_script: bool = False,
    diagnosis: Diagnosis | None = None,
    supervisor: str = "",
    options: str = "",
    log_lines: int = 200,
) -> Snapshot:
    """The Snapshot of a run from the nodes' answers.

    `expected_nodes` default to the plan's. `metrics` are lines gathered before (the answers may carry only newer ones,
    of the newest attempt); `events` are the lines of events.jsonl. `intent`, `kept` and `is_script` as for `run_state`, `options` as
    for `next_commands`. `recipe` is the name of its file, as run.json has it: somebody may have spoilt that.
    """
    expected = tuple(expected_nodes) or (tuple(node.name for node in plan.nodes) if plan else ())
    names = expected or tuple(node for node, reply in replies.items() if reply.run) + tuple(unreachable)
    attempt = max(newest_attempt(replies), plan.attempt if plan else 0)
    state = run_state(expected, replies, unreachable, intent=intent, kept=kept, is_script=is_script)
    lines = _merged([*metrics, *(line for reply in replies.values() for line in _metrics_of(reply))])
    train = [line for line in lines if line.kind == "train"]
    history = _history(train)
    beats = [rank.heartbeat for rank in _ranks_of(replies, attempt).values() if rank.heartbeat]
    totals = [beat.total_steps for beat in beats if beat.total_steps]
    total = max(totals) if totals else total_steps
    # An attempt that has done no step yet is where it goes on from: the last lines of the one before may never have come here.
    begins = plan.resume_step if plan and not any(line.attempt == attempt for line in train) else 0
    step = begins or (history[-1].step if history else max([0, *(beat.step for beat in beats)]))
    of_rank: dict[int, list[Metric]] = {}
    for line in train:
        if line.attempt == attempt:
            of_rank.setdefault(line.rank, []).append(line)
    rates = [rate for its in of_rank.values() if (rate := pace.tokens_per_s(its)) is not None]
    reached, planned = pace.efficiency(plan, sum(rates) if rates else None)
    checkpoints = {number for reply in replies.values() if reply.run for number in reply.run.checkpoints}
    started = [(reply, reply.run.started_at) for reply in replies.values() if reply.run and reply.run.attempt == attempt and reply.run.started_at]
    ages = [age_s for reply, at in started if (age_s := _age_s(reply, at)) is not None]
    return Snapshot(
        run=run,
        state=state,
        recipe=recipe if isinstance(recipe, str) else "",
        attempt=attempt,
        started_at=min((at for _, at in started), default=None),
        now=now,
        running_s=max(ages, default=None),
        step_s=pace.step_s(train, attempt),
        epoch=max((line.epoch for its in of_rank.values() for line in its[-1:] if line.epoch is not None), default=None),
        efficiency=reached if state == "running" else None,
        planned_efficiency=planned,
        checkpoint_age_s=pace.checkpoint_age_s(max(checkpoints), lines, replies) if checkpoints else None,
        restarts=max(0, attempt - 1),
        left_out=_left_out(plan),
        total_steps=total,
        step=step,
        loss=history[-1].loss if history else None,
        eval_losses=_evaluations(lines),
        eta_s=eta.eta_s(lines, step, total, next((beat.step_tokens for beat in beats if beat.step_tokens), None)) if state == "running" else None,
        tokens_per_s=sum(rates) if rates else None,
        loss_history=history,
        nodes=tuple(_node_row(name, replies.get(name), unreachable, plan, attempt) for name in names),
        ranks=_rank_rows(replies, plan, attempt, of_rank, log_lines),
        events=_events(events, lines),
        notes=(*dict.fromkeys(line.message for line in lines if line.kind == "note" and line.message), *_not_asked(state, run, unreachable, options)),
        checkpoint_steps=tuple(sorted(checkpoints)),
        next_commands=next_commands(state, run, options, diagnosis),
        diagnosis=diagnosis,
        supervisor=supervisor,
    )


def _not_asked(state: State, run: str, unreachable: Mapping[str, str], options: str) -> list[str]:
    """Of a run that was stopped: where something of it may be left."""
    if state not in ("stopping", "stopped"):
        return []
    after = f"what may be left of the run there ends with: homelab stop {run}{options}, once it can be asked"
    return [f"{name} was not asked: {plain_lines(why).split(chr(10), 1)[0]}; {after}" for name, why in unreachable.items()]


def next_commands(state: State, run: str, options: str = "", diagnosis: Diagnosis | None = None) -> tuple[NextCommand, ...]:
    """What a person may want to type in this state. `options` is what the commands need behind the run's name.

    Where the fix of the `diagnosis` is a new training, to recover the old one is not what comes next.
    """
    known = {
        "launch": diagnosis.launch if diagnosis else "",
        "follow": f"homelab status {run}{options}",
        "logs": f"homelab logs {run}{options}",
        "stop": f"homelab stop {run}{options}",
        "recover": f"homelab recover {run}{options}",
        "ask it": f"homelab chat {run}{options} --prompt '...'",
    }
    wanted: dict[State, tuple[str, ...]] = {
        "done": ("ask it", "logs"),
        "failed": ("launch" if known["launch"] else "recover", "logs"),
        "lost": ("recover", "follow", "stop"),
        "stopped": ("recover", "logs"),
    }
    return tuple(
        NextCommand(purpose=name, command=known[name]) for name in wanted.get(state, ("follow", "stop", "recover"))
    )


def _metrics_of(reply: Reply) -> Iterable[Metric]:
    if reply.run:
        for rank in reply.run.ranks.values():
            yield from rank.metrics


def _merged(lines: Iterable[Metric]) -> list[Metric]:
    """Each line once, by attempt and step; what was done again in a later attempt replaces what came before."""
    kept: dict[tuple[Any, ...], Metric] = {}
    for line in lines:
        key = (line.kind, line.attempt, line.rank, line.step, line.message)
        kept[key] = line
    return sorted(kept.values(), key=lambda line: (line.attempt, line.step, line.time))


def _history(train: Sequence[Metric]) -> tuple[LossPoint, ...]:
    """Steps in order, of the newest attempt that made each. All ranks write the same global loss."""
    losses: dict[int, float] = {}
    attempts: dict[int, int] = {}
    for line in train:
        if line.attempt > max(attempts.values(), default=line.attempt):
            # A later attempt began before steps that an earlier one had reached: those were undone.
            losses = {step: loss for step, loss in losses.items() if step < line.step}
            attempts = {step: its for step, its in attempts.items() if step < line.step}
        if line.loss is not None:
            losses[line.step], attempts[line.step] = line.loss, line.attempt
    return tuple(LossPoint(step=step, loss=loss) for step, loss in sorted(losses.items()))


def _evaluations(lines: Sequence[Metric]) -> tuple[LossPoint, ...]:
    by_step = {line.step: line.eval_loss for line in lines if line.kind == "eval" and line.eval_loss is not None}
    return tuple(LossPoint(step=step, loss=loss) for step, loss in sorted(by_step.items()))


def _ranks_of(replies: Mapping[str, Reply], attempt: int) -> dict[tuple[str, int], RankReply]:
    return {
        (node, number): rank
        for node, reply in replies.items()
        if reply.run and reply.run.attempt == attempt
        for number, rank in reply.run.ranks.items()
    }


def _node_row(
    name: str, reply: Reply | None, unreachable: Mapping[str, str], plan: Plan | None, attempt: int
) -> NodeRow:
    planned = {node.name: node for node in plan.nodes} if plan else {}
    address = planned[name].lan_address if name in planned else ""
    if reply is None:
        why = plain_lines(unreachable.get(name, "not asked yet")).split("\n", 1)[0]
        return NodeRow(
            name=name, reachable=False, why_not=why, address=address, torchrun="", needs_action=name in unreachable
        )
    part = node_part(reply.run, attempt)
    spare = {card.index for card in planned[name].spare_cards} if name in planned else set()
    words = {"absent": "not started", "prepared": "not started", "alive": "running", "vanished": "gone", "stopped": "stopped"}
    ended = reply.run.exit if reply.run else None
    return NodeRow(
        name=name,
        reachable=True,
        address=address,
        cpu_load_percent=reply.load.cpu_percent,
        memory_used_bytes=reply.load.memory_used_bytes,
        memory_total_bytes=reply.load.memory_total_bytes,
        gpus=tuple(
            GpuRow(
                name=gpu.name,
                utilisation_percent=gpu.utilization_percent,
                memory_used_bytes=gpu.memory_used_bytes,
                memory_total_bytes=gpu.memory_total_bytes,
                temperature_c=gpu.temperature_c,
                power_w=gpu.power_w,
                power_limit_w=gpu.power_limit_w,
                is_left_out=gpu.index in spare,
            )
            for gpu in reply.gpus
        ),
        torchrun=words[part] if part in words else ("done" if part == "succeeded" else str(ended)),
        needs_action=part in ("failed", "vanished"),
    )


def _left_out(plan: Plan | None) -> tuple[LeftOut, ...]:
    """With the reasons first that were written down; plans of before had none."""
    names = dict.fromkeys((*plan.left_out_because, *plan.left_out)) if plan else {}
    return tuple(LeftOut(name=name, because=plan.left_out_because.get(name, "")) for name in names) if plan else ()


def _rank_rows(
    replies: Mapping[str, Reply], plan: Plan | None, attempt: int, of_rank: Mapping[int, Sequence[Metric]], log_lines: int
) -> tuple[RankRow, ...]:
    found = {number: (node, rank) for (node, number), rank in _ranks_of(replies, attempt).items()}
    planned = {rank.rank: rank for rank in plan.ranks} if plan else {}
    rows = []
    for number in sorted(set(found) | set(planned)):
        node, reply = found.get(number, (planned[number].node if number in planned else "", None))
        its = of_rank.get(number, ())
        beat, line = reply.heartbeat if reply else None, its[-1] if its else None
        own = planned.get(number)
        log = (*reply.log_tail.stdout, *reply.log_tail.stderr) if reply else ()
        rows.append(
            RankRow(
                rank=number,
                node=node,
                device=own.device_name if own else "",
                phase=_phase(beat) if beat else "",
                step=line.step if line else (beat.step if beat else None),
                loss=line.loss if line else None,
                tokens_per_s=pace.tokens_per_s(its),
                share=line.share if line and line.share is not None else (own.share if own else None),
                compute_s=line.compute_s if line else None,
                communication_s=line.communication_s if line else None,
                heartbeat_age_s=_age_s(replies[node], beat.time) if beat else None,
                memory_bytes=max((entry.memory_bytes for entry in its if entry.memory_bytes), default=None),
                log_tail=log[-log_lines:],
            )
        )
    return tuple(rows)


def _events(events: Iterable[Mapping[str, Any]], lines: Sequence[Metric]) -> tuple[EventRow, ...]:
    """What the controller wrote down, and the rows that the ranks moved among themselves; each in its own order, together by time."""
    moved = [EventRow(time=line.time, text=line.message) for line in lines if line.kind == "shares"]
    told = [event_row(event) for event in events]
    return tuple(row for _, row in heapq.merge(_rising(told), _rising(moved), key=lambda entry: entry[0]))


def _rising(rows: Sequence[EventRow]) -> list[tuple[float, EventRow]]:
    """Each row with a time that never falls: where the clock was set back, what came after is counted on from there."""
    shift_s, found = 0.0, []
    for before, row in zip([None, *rows], rows, strict=False):
        shift_s += max(0.0, before.time - row.time) if before else 0.0
        found.append((row.time + shift_s, row))
    return found


_ONLY_IN_THE_FILE = ("time", "kind", "ranks", "clean", "gathered")  # for programs; the words say it


def event_row(event: Mapping[str, Any]) -> EventRow:
    """One line of events.jsonl: {"time", "what", and details}."""
    said = {key: _said(value) for key, value in event.items() if key not in _ONLY_IN_THE_FILE}
    what = said.pop("what", "")
    details = " · ".join(f"{key} {text}" for key, text in said.items() if text)
    text = plain_lines(f"{what}{': ' if details else ''}{details}").replace("\n", " · ")
    return EventRow(time=float(event.get("time") or 0.0), text=text)


def _said(value: object) -> str:
    """A word, a number, or a list of such, as text; nothing for what is nested deeper."""
    if isinstance(value, list):
        return ", ".join(str(entry) for entry in value if isinstance(entry, str | int | float))
    return str(value) if isinstance(value, str | int | float) else ""


def _age_s(reply: Reply, moment: float) -> float | None:
    """Seconds since a moment that this node wrote down, by its own clock; None where it has been set back since."""
    return reply.time - moment if reply.time >= moment else None


def _phase(beat: Heartbeat) -> str:
    return beat.phase if beat.done is None else f"{beat.phase} {beat.done:.0%}"
