"""What the nodes answered, as rows of the dashboard: one per machine, one per rank. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from homelab.controller.base.sanitize import plain_lines
from homelab.controller.dashboard import step_rate
from homelab.controller.dashboard.attempt_pace import RankCourse
from homelab.controller.dashboard.log_noise import newest_bars
from homelab.controller.dashboard.snapshot import GpuRow, LeftOut, NodeRow, RankRow
from homelab.controller.dashboard.step_rate import WINDOW_STEPS
from homelab.controller.planning.types import Plan
from homelab.controller.run.state import node_part
from homelab.shared.protocol.rank_messages import Heartbeat, Metric, RankReply
from homelab.shared.protocol.run_messages import Reply

_LOG_LINES = 200


def replies_of_ranks(replies: Mapping[str, Reply], attempt: int) -> dict[tuple[str, int], RankReply]:
    """(node, rank) -> what it answered of this attempt."""
    return {
        (node, number): rank
        for node, reply in replies.items()
        if reply.run and reply.run.attempt == attempt
        for number, rank in reply.run.ranks.items()
    }


def node_row(name: str, reply: Reply | None, unreachable: Mapping[str, str], plan: Plan | None, attempt: int) -> NodeRow:
    """One machine: what it answered, or why it was not asked."""
    planned = {node.name: node for node in plan.nodes} if plan else {}
    address = planned[name].lan_address if name in planned else ""
    if reply is None:
        why = plain_lines(unreachable.get(name, "not asked yet")).split("\n", 1)[0]
        return NodeRow(name=name, reachable=False, why_not=why, address=address, torchrun="", needs_action=name in unreachable)
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
        received_bytes=reply.load.received_bytes,
        sent_bytes=reply.load.sent_bytes,
        counted_at_s=reply.load.counted_at_s,
        gpus=tuple(
            GpuRow(
                name=gpu.name,
                index=gpu.index,
                utilisation_percent=gpu.utilization_percent,
                memory_used_bytes=gpu.memory_used_bytes,
                memory_total_bytes=gpu.memory_total_bytes,
                memory_free_bytes=gpu.free_bytes,
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


def left_out(plan: Plan | None) -> tuple[LeftOut, ...]:
    """Nodes that take no part; those with a recorded reason come first."""
    names = dict.fromkeys((*plan.left_out_because, *plan.left_out)) if plan else {}
    return tuple(LeftOut(name=name, because=plan.left_out_because.get(name, "")) for name in names) if plan else ()


def rank_rows(replies: Mapping[str, Reply], plan: Plan | None, attempt: int, courses: Mapping[int, RankCourse]) -> tuple[RankRow, ...]:
    """One row for each rank that answers or is planned; `courses`: rank -> what it has measured in this attempt."""
    answering = {number: (node, rank) for (node, number), rank in replies_of_ranks(replies, attempt).items()}
    planned = {rank.rank: rank for rank in plan.ranks} if plan else {}
    wire = wire_seconds({number: course.lines for number, course in courses.items()})
    rows = []
    for number in sorted(set(answering) | set(planned)):
        node, reply = answering.get(number, (planned[number].node if number in planned else "", None))
        course = courses.get(number) or RankCourse()
        rank_lines = course.lines
        beat, line = reply.heartbeat if reply else None, rank_lines[-1] if rank_lines else None
        own = planned.get(number)
        # of the newest step the lines of others may be missing
        timed = next((entry for entry in reversed(rank_lines) if entry.step in wire), line)
        wire_s, wait_s = wire_and_wait(timed, wire) if timed else (None, None)
        printed, warned = (newest_bars(reply.log_tail.stdout), newest_bars(reply.log_tail.stderr)) if reply else ([], [])
        # Neither stream hides the other: a program of one's own says on stdout what it does.
        log = (*printed[-max(_LOG_LINES // 2, _LOG_LINES - len(warned)) :], *warned[-max(_LOG_LINES // 2, _LOG_LINES - len(printed)) :])
        rows.append(
            RankRow(
                rank=number,
                node=node,
                device=own.device_name if own else "",
                phase=_phase(beat) if beat else "",
                step=line.step if line else (beat.step if beat else None),
                loss=line.loss if line else None,
                tokens_per_s=step_rate.tokens_per_s(rank_lines),
                share=line.share if line and line.share is not None else (own.share if own else None),
                compute_s=timed.compute_s if timed else None,
                communication_s=timed.communication_s if timed else None,
                wire_s=wire_s,
                wait_s=wait_s,
                heartbeat_age_s=age_s(replies[node], beat.time) if beat else None,
                memory_bytes=course.memory_bytes,
                log_tail=log,
            )
        )
    return tuple(rows)


def age_s(reply: Reply, moment: float) -> float | None:
    """Seconds since a moment that this node wrote down, by its own clock; None where it has been set back since."""
    return reply.time - moment if reply.time >= moment else None


def _phase(beat: Heartbeat) -> str:
    return beat.phase if beat.done is None else f"{beat.phase} {beat.done:.0%}"


def wire_seconds(of_rank: Mapping[int, Sequence[Metric]]) -> dict[int, float]:
    """Step -> seconds that the data need on the wire: of the rank that communicated for the shortest time.

    A rank's `communication_s` begins when it has its own gradients and ends with those of all. The slowest rank waits for nobody, so its time is
    the wire's; what others have more, they wait. Steps of which a rank's line is missing are left out, and old ones. One rank alone has no wire.
    """
    ranks = [
        {line.step: line.communication_s for line in lines[-WINDOW_STEPS:] if line.communication_s is not None}
        for lines in of_rank.values()
    ]
    if len(ranks) < 2:
        return {}
    common = set.intersection(*(set(seconds) for seconds in ranks))
    return {step: min(seconds[step] for seconds in ranks) for step in common}


def wire_and_wait(line: Metric, wire: Mapping[int, float]) -> tuple[float | None, float | None]:
    """(wire, wait) of one rank's step, in seconds; None where other ranks have not told of this step."""
    if line.communication_s is None or line.step not in wire:
        return None, None
    return wire[line.step], max(0.0, line.communication_s - wire[line.step])
