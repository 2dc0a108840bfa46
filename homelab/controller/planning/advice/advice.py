"""How to train on these machines, in words and with their numbers: together or alone, whole or sharded, at which precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from homelab.controller.base.units import gigabytes
from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.strategy.base import Strategy
from homelab.controller.planning.strategy.ranks import memory_of
from homelab.controller.planning.time import network_cost
from homelab.controller.planning.types import FewerNodes, RankPlan, TimeEstimate
from homelab.controller.planning.work.job import TrainingJob

WIRE_PART = 0.10  # of a step on the wire: more than this is worth doing something about


def advice(
    job: TrainingJob, strategy: Strategy, ranks: Sequence[RankPlan], time: TimeEstimate
) -> tuple[FewerNodes | None, tuple[str, ...]]:
    """What an expert concludes from the figures: the nodes that should do it without the others, and all of it, one sentence each."""
    nodes = list(dict.fromkeys(rank.node for rank in ranks))
    fewer = strategy.fewer_nodes(job, time) or _fewer(nodes, time)
    return fewer, (
        *_together(job, strategy, len(ranks), nodes, time),
        *strategy.compared(job, time),
        *([f"{fewer.edit}: {fewer.because}: {fewer.option}"] if fewer else ()),
        *_smaller(job, ranks),
    )


def _together(job: TrainingJob, strategy: Strategy, ranks: int, nodes: list[str], time: TimeEstimate) -> Iterator[str]:
    if len(nodes) == 1:
        yield (
            f"one machine: nothing goes over the LAN; its {ranks} cards share the batch"
            if ranks > 1
            else "one machine, one rank: nothing goes over the LAN"
        )
        return
    part = time.wire_s / time.step_s
    yield f"{strategy.name} on {len(nodes)} machines: {time.wire_s:.2g} s of every {time.step_s:.3g} s step go to the network ({part:.0%})"
    if part > WIRE_PART:
        ways = ["a larger global_batch (global_batch_max lets the launch raise it)"]
        if job.recipe.parallel.compress == "none" and not strategy.divides_weights:
            ways.append('compress = "bf16" (half the bytes, but the curve changes in its last digits)')
        yield f"the network takes more than {WIRE_PART:.0%} of a step; what helps: {', or '.join(ways)}"
    if job.shape is not None and not strategy.divides_weights:
        yield f"{network_cost.price_of_sharding(job, job.shape)} That is too slow on this network"


def _fewer(nodes: list[str], time: TimeEstimate) -> FewerNodes | None:
    """The nodes without one that costs more than it gives. Compared: all nodes, all but the worst, and the best machine alone."""
    if len(nodes) < 2 or not time.gains:
        return None
    best, worst = (max(time.gains, key=lambda gain: gain.alone_tokens_per_s), min(time.gains, key=lambda gain: gain.gain))
    together, without = time.tokens_per_s, time.tokens_per_s / (1 + worst.gain)
    if max(best.alone_tokens_per_s, without) <= together:
        return None
    others = tuple(name for name in nodes if name != worst.node)
    if without >= best.alone_tokens_per_s and others != (best.node,):
        because = f"{worst.node} costs more than it gives ({without:.0f} tokens/s without it, {together:.0f} with it)"
        return FewerNodes(nodes=others, edit=f"leave {worst.node} out", because=because)
    because = f"alone it does {best.alone_tokens_per_s:.0f} tokens/s, all together {together:.0f}"
    return FewerNodes(nodes=(best.node,), edit=f"stay on {best.node}", because=because)


def _smaller(job: TrainingJob, ranks: Sequence[RankPlan]) -> Iterator[str]:
    """What to do about ranks that the model does not fit on."""
    short = list(dict.fromkeys(rank.node for rank in ranks if rank.memory is not None and rank.memory.fits is False))
    if not short or job.shape is None:
        return
    if job.recipe.parallel.micro_batch != "auto" and all(_fits_row_by_row(job, rank) for rank in ranks if rank.node in short):
        yield f'it does not fit on {", ".join(short)} with micro_batch = {job.recipe.parallel.micro_batch}, but it fits row by row: set micro_batch = "auto"'
        return
    method, precision = job.recipe.method, job.precision
    now = rank_memory.base_weight_bytes(job.shape, method, precision)
    if method.kind == "qlora" or job.shape.widened:
        bits = "even in 4 bits" if method.kind == "qlora" else "and cannot be quantised again"
        yield f"it does not fit on {', '.join(short)} {bits} ({gigabytes(now, '.2g')} GB of weights): use a shorter seq_len or a smaller model, or leave it out"
        return
    packed = rank_memory.base_weight_bytes(job.shape, replace(method, kind="qlora", base="auto"), precision)
    yield f'quantise harder: it does not fit on {", ".join(short)}; kind = "qlora" holds the weights in {gigabytes(packed, ".2g")} GB instead of {gigabytes(now, ".2g")}'


def _fits_row_by_row(job: TrainingJob, rank: RankPlan) -> bool:
    memory = memory_of(job, job.machines.slots[rank.rank], 1, rank.token_cap)
    return memory is not None and memory.fits is not False
