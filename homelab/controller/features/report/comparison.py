"""The plan beside what happened, and each rank's part of the work. Pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from homelab.controller.dashboard import words
from homelab.controller.features.report.curves import Device, by_step, device_of, devices, speed_of
from homelab.controller.features.report.run_report import Compared, ShareRow
from homelab.controller.planning.types import Plan
from homelab.shared.protocol.rank_messages import Metric

UNKNOWN = "unknown"


def shares(plans: Mapping[int, Plan], lines: Sequence[Metric]) -> tuple[ShareRow, ...]:
    """The ranks of the newest plan, then what has trained before it. `done` counts all steps that are left, of every attempt."""
    tokens: dict[Device, int] = defaultdict(int)
    memory: dict[Device, int] = {}
    speeds: dict[Device, list[float]] = defaultdict(list)
    last: dict[Device, Metric] = {}
    for device, line in zip(devices(plans, lines), lines, strict=True):
        if line.kind != "train":
            continue
        tokens[device] += line.tokens or 0
        last[device] = line
        if line.memory_bytes is not None:
            memory[device] = max(memory.get(device, 0), line.memory_bytes)
        if line.tokens and line.compute_s:
            speeds[device].append(line.tokens / line.compute_s)
    plan = plans[max(plans)] if plans else None
    total, rows_of_batch = sum(tokens.values()), sum(rank.share for rank in plan.ranks) if plan else 0
    planned = {device_of(rank): rank for rank in plan.ranks} if plan else {}
    names = {device_of(rank): rank.device_name for _, older in sorted(plans.items()) for rank in older.ranks}
    before = sorted(tokens.keys() - planned.keys(), key=lambda device: (last[device].rank, device))
    rows = []
    for device in (*planned, *before):
        rank = planned.get(device)
        rows.append(
            ShareRow(
                rank=rank.rank if rank else None if plan else last[device].rank, node=device[0],
                device=names.get(device, ""), planned=rank.share / rows_of_batch if rank and rows_of_batch else None,
                done=tokens.get(device, 0) / total if total else None, tokens=tokens.get(device),
                tokens_per_s=statistics.median(speeds[device]) if speeds.get(device) else None,
                memory_planned_bytes=rank.memory.total_bytes if rank and rank.memory else None, memory_bytes=memory.get(device),
            )
        )  # fmt: skip
    return tuple(rows)


def compared(plans: Mapping[int, Plan], lines: Sequence[Metric], started_at: float | None, ended_at: float | None) -> tuple[Compared, ...]:
    """Figures of the newest plan beside the median of its attempt's steps; the time of the first plan beside that of the whole run."""
    newest, first = max(plans, default=0), min(plans, default=0)
    plan = plans.get(newest)
    time = plan.time if plan else None
    whole = plans[first].time if plans else None
    steps = by_step(line for line in lines if line.attempt == newest)
    step_s = [
        max(line.step_s for line in ranks if line.step_s is not None)
        for ranks in steps.values()
        if any(line.step_s is not None for line in ranks)
    ]
    speeds = [speed for ranks in steps.values() if (speed := speed_of(ranks)) is not None]
    wire = [
        min(line.communication_s for line in ranks if line.communication_s is not None)
        for ranks in steps.values()
        if any(line.communication_s is not None for line in ranks)
    ]
    alone = sum(rank.alone_tokens_per_s for rank in time.ranks) if time else 0.0
    speed = statistics.median(speeds) if speeds else None
    done = max((line.step for line in lines if line.kind == "train"), default=None)
    hours_s = whole.hours * 3600 if whole and whole.hours is not None else None
    took_s = ended_at - started_at if started_at is not None and ended_at is not None and ended_at >= started_at else None
    return (
        Compared(what="steps", planned=_count(whole.steps if whole else None), happened=_count(done)),
        Compared(what="duration", planned=_said(hours_s, words.duration), happened=_said(took_s, words.duration)),
        Compared(what="time of a step", planned=_said(time.step_s if time else None, _seconds), happened=_said(_median(step_s), _seconds)),
        Compared(what="of it on the network", planned=_said(time.wire_s if time else None, _seconds), happened=_said(_median(wire), _seconds)),
        Compared(what="speed of all ranks", planned=_said(time.tokens_per_s if time else None, _speed), happened=_said(speed, _speed)),
        Compared(
            what="part of the sum of the ranks' speeds", planned=_said(time.efficiency if time else None, _percent),
            happened=_said(speed / alone if speed is not None and alone > 0 else None, _percent),
        ),
    )  # fmt: skip


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _said(value: float | None, form: Callable[[float], str]) -> str:
    return UNKNOWN if value is None else form(value)


def _count(value: int | None) -> str:
    return UNKNOWN if value is None else words.count(value)


def _seconds(value: float) -> str:
    return f"{words.seconds(value)} s"


def _speed(value: float) -> str:
    return f"{words.count(value)} tokens/s"


def _percent(value: float) -> str:
    return words.percent(100 * value)
