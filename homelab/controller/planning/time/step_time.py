"""Seconds per step, hours to the end, what every node adds: the ranks' speeds, the rows and the wire put together. Pure.

A step costs the rank that ends last, by the worker's own rule of who computes what (`homelab.shared.law.assignment`), then what of the wire the
backward pass does not hide (`hidden_wire`), and what ranks wait for each other because none is always as fast, where an earlier run has measured it.
What a run has measured of the wire is the part that is not hidden already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from homelab.controller.base.units import megabytes
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.time import network_cost
from homelab.controller.planning.time.hidden_wire import LastPass
from homelab.controller.planning.time.network_cost import NetworkCost, Wire
from homelab.controller.planning.types import Choice, NodeGain, RankPlan, RankTime, TimeEstimate
from homelab.controller.planning.work.job import Job, TrainingJob
from homelab.controller.planning.work.speed_estimate import Speeds, is_measured
from homelab.shared.law import assignment, checkpoint_interval, order, packing
from homelab.shared.law.limits import Limits
from homelab.shared.law.speed import Speed
from homelab.shared.law.wire_bytes import BUCKET_MB

# Assumed until a save was measured: an older disk, and the file is read again for its sha256; a large state is only copied.
_DISK_BYTES_PER_S, _COPY_BYTES_PER_S = 200e6, 1e9
_WORTH_A_WORD_S = 0.005
FORWARD_PART = 0.3  # of a training pass, assumed until an evaluation was measured


@dataclass(frozen=True)
class Worker:
    """One rank, as far as time goes."""

    rank: int
    node: str
    source: str
    speed: Speed
    limits: Limits
    share: int


@dataclass(frozen=True)
class Sync:
    """What a step pays for the wire: `measured_s` with `measured_ranks` ranks where an earlier run knows it, else from bytes. `wait_s` is what
    several ranks wait for each other beside it.

    `wire_s` gives the strategy's seconds for (bytes, ranks, bytes per second), `exposed_s` what of them is left after these last passes.
    """

    wire_s: Callable[[float, int, float], float]
    size_bytes: int | None
    throughputs: Mapping[tuple[str, str], float]
    measured_s: float | None = None
    measured_ranks: int = 0
    wait_s: float = 0.0
    exposed_s: Callable[[float, Sequence[LastPass]], float] = lambda wire_s, passes: wire_s

    def seconds(self, workers: Sequence[Worker], passes: Sequence[LastPass]) -> tuple[float, float]:
        """(after the last rank's passes, hidden behind them) for these ranks; what was measured is scaled by the strategy's own rule when
        their number differs. One machine alone: 0."""
        names, ranks = {worker.node for worker in workers}, len(workers)
        if len(names) < 2:
            return 0.0, 0.0
        if self.measured_s is not None and self.measured_ranks > 1:
            return self.measured_s * self.wire_s(1, ranks, 1) / self.wire_s(1, self.measured_ranks, 1), 0.0
        wire = network_cost.wire_between(names, self.throughputs)
        total_s = self.wire_s(self.size_bytes or 0, ranks, wire.bytes_per_s)
        exposed_s = self.exposed_s(total_s, passes)
        return exposed_s, max(0.0, total_s - exposed_s)

    def waiting_s(self, ranks: int) -> float:
        """One rank waits for nobody."""
        return self.wait_s if ranks > 1 else 0.0

    def because(self, wire: Wire, ranks: int, hidden_s: float) -> str:
        """Where the seconds come from."""
        if self.measured_s is not None:
            return "measured by an earlier run" + (f" with {self.measured_ranks} ranks" if ranks != self.measured_ranks else "")
        if self.size_bytes is None:
            return "not known: the model's shape is not known here"
        hidden = f"; {network_cost.seconds_text(hidden_s)} more run during the backward pass" if hidden_s > _WORTH_A_WORD_S else ""
        return f"{megabytes(self.size_bytes, '.3g')} MB per step, {ranks} ranks, {wire}{hidden}"


def estimate(job: TrainingJob, strategy: NetworkCost, ranks: Sequence[RankPlan]) -> TimeEstimate | None:
    """The estimate, or None where no speed is known."""
    recipe, rows, speeds = job.recipe, job.workload.rows, job.workload.speeds
    if speeds.speeds is None:
        return None
    of_strategy = speeds.slowdown(strategy.name, len(ranks))
    # A judged answer is compared with another one, which is a forward pass over about as many tokens.
    judges = recipe.objective is not None and recipe.objective.learns_labels
    slowdown = of_strategy * (1 + FORWARD_PART * judges)
    workers = workers_of(recipe, ranks, speeds.speeds, speeds.sources, padded=bool(rows.padded), slowdown=slowdown)
    lengths = rows.lengths(recipe.train.global_batch, recipe.train.seq_len)
    rows_of = None if recipe.parallel.shares == "auto" else [worker.share for worker in workers]
    passes = [len(own) for own in passes_of(workers, lengths, rows_of)]
    sync = sync_of(job, strategy, len(workers), passes=max(passes))
    busy = [
        rank.streaming.step_s(own_s, count) if rank.streaming else own_s
        for rank, own_s, count in zip(ranks, busy_s(workers, lengths, rows_of), passes, strict=True)
    ]
    (wire_s, hidden_s), tokens = sync.seconds(workers, last_passes(workers, lengths, rows_of)), sum(lengths)
    exchange_s = wire_s + sync.waiting_s(len(workers))
    step_s = max(busy) + exchange_s
    equal_step_s = max(busy_s(workers, lengths, order.quotas(len(lengths), [1] * len(workers)))) + exchange_s
    alone = [tokens / max(busy_s([worker], lengths, None)) * of_strategy / speeds.slowdown(strategy.name, 1) for worker in workers]
    rows_by_rank = assignment.assign(lengths, [w.speed for w in workers], [w.limits for w in workers], rows_of)
    steps = rows.steps(recipe)
    wire = network_cost.wire_between({worker.node for worker in workers}, job.throughputs)
    gathers_s = strategy.checkpoint_wire_s(job, len(workers), wire.bytes_per_s) if len({worker.node for worker in workers}) > 1 else 0.0
    save_s, evaluate_s = save_s_of(job, gathers_s), evaluate_s_of(job, sum(alone))
    seconds = None if steps is None else whole_s(job, steps, step_s, save_s, evaluate_s)
    return TimeEstimate(
        is_measured=is_measured(worker.source for worker in workers) and rows.is_measured,
        steps=steps, row_tokens=rows.tokens_mean, rows_because=rows.because, compute_s=max(busy), wire_s=wire_s, wire_hidden_s=hidden_s,
        wire_because=sync.because(wire, len(workers), hidden_s) if wire_s else "nothing goes over the LAN",
        wire_is_measured=not wire_s or (sync.measured_s is not None and sync.measured_ranks == len(workers)), step_s=step_s,
        wire_measured_ranks=sync.measured_ranks if wire_s else 0, wait_s=exchange_s - wire_s,
        best_step_s=best_s(workers, tokens, rows.tokens_mean) + exchange_s, equal_step_s=equal_step_s, tokens_per_s=tokens / step_s,
        efficiency=tokens / step_s / sum(alone), equal_efficiency=tokens / equal_step_s / sum(alone), save_s=save_s,
        evaluate_s=evaluate_s, hours=None if seconds is None else seconds / 3600,
        ranks=tuple(
            RankTime(rank=worker.rank, node=worker.node, source=worker.source, alone_tokens_per_s=rate, tokens=sum(lengths[row] for row in own_rows), busy_s=own)
            for worker, rate, own_rows, own in zip(workers, alone, rows_by_rank, busy, strict=True)
        ),
        gains=_gains(workers, lengths, sync, tokens / step_s, lambda count: speeds.slowdown(strategy.name, count) / of_strategy, fixed=rows_of is not None),
    )  # fmt: skip


def choices(job: Job, time: TimeEstimate | None) -> list[Choice]:
    """What the time rests on, or why it is not known; nothing for a [script]."""
    if not isinstance(job, TrainingJob):
        return []
    rows = job.workload.rows
    if time is None:
        return [Choice(subject="time", value="not known", because=f"speeds: {job.workload.speeds.choice.because}")]
    rows_text = f"{rows.count or 'unknown'} of about {time.row_tokens:.0f} tokens"
    return [
        Choice(subject="rows", value=rows_text, because=time.rows_because),
        *([Choice(subject="padding", value="rows are padded to the longest of their pass", because=rows.padded)] if rows.padded else ()),
        Choice(subject="wire", value=f"{time.wire_s:.2g} s per step", because=time.wire_because),
    ]


def workers_of(
    recipe: TrainRecipe, ranks: Sequence[RankPlan], speeds: Speeds, sources: Mapping[str, str], *, padded: bool, slowdown: float = 1.0
) -> list[Worker]:
    """The ranks of a plan with the limits that the worker gives them; `slowdown`: what the strategy makes of their speeds."""
    workers = []
    for rank in ranks:
        limits = Limits.planned(
            rank.micro_batch, rank.token_cap, seq_len=recipe.train.seq_len, asked=recipe.parallel.micro_batch, padded=padded
        )
        workers.append(
            Worker(rank.rank, rank.node, sources[rank.node], speeds[rank.node][rank.local_rank].slower(slowdown), limits, rank.share)
        )
    return workers


def busy_s(workers: Sequence[Worker], lengths: Sequence[int], rows_of: Sequence[int] | None) -> list[float]:
    """Seconds that each rank computes in a step with rows of these lengths, by the worker's own rules. `rows_of` fixes their number."""
    return [worker.speed.seconds(tokens) for worker, tokens in zip(workers, passes_of(workers, lengths, rows_of), strict=True)]


def last_passes(workers: Sequence[Worker], lengths: Sequence[int], rows_of: Sequence[int] | None) -> list[LastPass]:
    """The last pass of each rank in a step with rows of these lengths."""
    return [
        LastPass(worker.speed.seconds(tokens), worker.speed.pass_s(tokens[-1]) if tokens else 0.0)
        for worker, tokens in zip(workers, passes_of(workers, lengths, rows_of), strict=True)
    ]


def passes_of(workers: Sequence[Worker], lengths: Sequence[int], rows_of: Sequence[int] | None) -> Sequence[Sequence[int]]:
    """The tokens of each pass that each rank makes in a step with rows of these lengths."""
    return _passes(tuple((worker.speed, worker.limits) for worker in workers), tuple(lengths), None if rows_of is None else tuple(rows_of))


# All strategies of a plan ask for the same few, and a curve over numbers of machines asks for each node alone again and again.
@functools.lru_cache(maxsize=256)
def _passes(
    ranks: tuple[tuple[Speed, Limits], ...], lengths: tuple[int, ...], rows_of: tuple[int, ...] | None
) -> tuple[tuple[int, ...], ...]:
    tokens = []
    for (speed, limits), positions in zip(
        ranks, assignment.assign(lengths, [one[0] for one in ranks], [one[1] for one in ranks], rows_of), strict=True
    ):
        own_lengths = [lengths[position] for position in positions]
        cuts = packing.micro_batches(range(len(own_lengths)), own_lengths, speed, limits)
        passes = ([own_lengths[row] for row in cut] for cut in cuts)
        tokens.append(tuple(limits.tokens(len(cut), max(cut), sum(cut)) for cut in passes))
    return tuple(tokens)


def best_s(workers: Sequence[Worker], tokens: float, row_tokens: float) -> float:
    """The shortest step if rows could be cut anywhere: the smallest T at which all ranks together get through `tokens`.

    A rank computes from step_s to T at the seconds per token of a full pass; one whose step_s is
    above T would get nothing.
    """
    costs = []
    for worker in workers:
        full = max(1, int(worker.limits.pass_tokens // row_tokens))
        full = min(full, worker.limits.pass_rows or full)
        costs.append((worker.speed.step_s, worker.speed.pass_s(full * row_tokens) / (full * row_tokens)))
    costs.sort()
    best = 0.0
    for count in range(1, len(costs) + 1):
        rate = sum(1 / token_s for _, token_s in costs[:count])
        best = (tokens + sum(step_s / token_s for step_s, token_s in costs[:count])) / rate
        if count == len(costs) or best <= costs[count][0]:
            break
    return best


def sync_of(job: TrainingJob, strategy: NetworkCost, ranks: int, *, passes: int) -> Sync:
    """What is known of the wire: seconds of an earlier run on as many ranks or the next best number, else bytes and the slowest pair."""
    size, exposed_s = strategy.step_bytes(job, passes), functools.partial(strategy.exposed_s, job)
    bucket_mb = BUCKET_MB if job.recipe.parallel.bucket_mb == "auto" else job.recipe.parallel.bucket_mb
    syncs = [
        sync for profile in job.workload.speeds.files.values() for sync in profile.syncs
        if (sync.compress, sync.strategy, sync.bucket_mb) == (job.recipe.parallel.compress, strategy.name, bucket_mb)
    ]  # fmt: skip
    if not syncs:
        return Sync(strategy.wire_s, size, job.throughputs, exposed_s=exposed_s)
    nearest = min((sync.world_size for sync in syncs), key=lambda count: (abs(count - ranks), count))
    of_as_many = [sync for sync in syncs if sync.world_size == nearest]
    slowest_s, wait_s = max(sync.sync_s for sync in of_as_many), max(sync.wait_s for sync in of_as_many)
    return Sync(strategy.wire_s, size, job.throughputs, slowest_s, nearest, wait_s, exposed_s)


def _gains(
    workers: Sequence[Worker], lengths: Sequence[int], sync: Sync, rate: float, slowdown: Callable[[int], float], *, fixed: bool
) -> tuple[NodeGain, ...]:
    """Tokens per second with a node against those without it, and of the node alone, for every node when there are several.

    `slowdown` says how many times as long the passes of so many ranks take as those of all.
    """

    def rate_of(members: Sequence[Worker]) -> float:
        rows_of = order.quotas(len(lengths), [worker.share for worker in members]) if fixed else None
        wire_s, _ = sync.seconds(members, last_passes(members, lengths, rows_of))
        return sum(lengths) / (max(busy_s(members, lengths, rows_of)) * slowdown(len(members)) + wire_s + sync.waiting_s(len(members)))

    names = list(dict.fromkeys(worker.node for worker in workers))
    return tuple(
        NodeGain(
            node=name,
            gain=rate / rate_of([worker for worker in workers if worker.node != name]) - 1,
            alone_tokens_per_s=rate_of([worker for worker in workers if worker.node == name]),
        )
        for name in (names if len(names) > 1 else ())
    )


def save_s_of(job: TrainingJob, gathers_s: float) -> float:
    """Seconds for which one checkpoint halts the training: the slowest node's, measured, else `gathers_s` and the bytes of a checkpoint."""
    measured = [profile.save_s for profile in job.workload.speeds.files.values() if profile.save_s is not None]
    if measured:
        return max(measured)
    if job.shape is None:
        return 0.0
    size_bytes = rank_memory.CHECKPOINT_BYTES * rank_memory.trainable_parameters(job.shape, job.recipe.method)
    return gathers_s + size_bytes / (_DISK_BYTES_PER_S if size_bytes < checkpoint_interval.BACKGROUND_BYTES else _COPY_BYTES_PER_S)


def evaluate_s_of(job: TrainingJob, rate: float) -> float:
    """Seconds of one evaluation: measured by an earlier run, or the forward passes of the held-out rows at `rate` tokens/s."""
    measured = [profile.evaluate_s for profile in job.workload.speeds.files.values() if profile.evaluate_s is not None]
    if measured:
        return max(measured)
    return (job.workload.held_out_rows or 0) * job.workload.rows.tokens_mean * FORWARD_PART / rate


def whole_s(job: TrainingJob, steps: int, step_s: float, save_s: float, evaluate_s: float) -> float:
    """From the first step of this attempt to the end, with checkpoints and evaluations (before the first and after the last step, and between)."""
    begin, every = job.resume_step, job.recipe.tracking.eval_every_steps
    saves = checkpoint_interval.saves(job.recipe.checkpoint.every_steps, steps, begin, step_s, save_s, job.recipe.checkpoint.keep_every)
    evaluations = 0
    if job.workload.held_out_rows is not None:
        evaluations = 2 + ((steps - 1) // every - begin // every if every else 0)
    return max(0, steps - begin) * step_s + saves * save_s + evaluations * evaluate_s
