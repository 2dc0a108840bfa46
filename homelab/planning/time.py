"""Seconds per step, hours to the end, what every node adds: the ranks' speeds, the rows and the wire put together. Pure.

A step costs the rank that ends last, by the worker's own rule of who computes what (`homelab.worker.sampler`), and then the wire.
That all-reduces overlap with the backward pass is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from homelab.config.recipe import Recipe
from homelab.planning import memory, network
from homelab.planning.architecture import Architecture
from homelab.planning.model import NodeGain, RankPlan, RankTime, TimeEstimate
from homelab.planning.network import Wire
from homelab.planning.rows import Rows
from homelab.planning.speeds import DATA_SHEET, EQUAL, OWNER, Belief
from homelab.worker import interval, sampler
from homelab.worker.sampler import Limits
from homelab.worker.speed import Speed

# Assumed until a save was measured: an older disk, and the file is read again for its sha256; a large state is only copied.
_DISK_BYTES_PER_S, _COPY_BYTES_PER_S = 200e6, 1e9
_FORWARD_PART = 0.3  # of a training pass, assumed until an evaluation was measured


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
    """What a step pays for the wire: `measured_s` with `measured_ranks` ranks where an earlier run knows it, else from bytes."""

    size_bytes: int | None
    throughputs: Mapping[tuple[str, str], float]
    measured_s: float | None = None
    measured_ranks: int = 0

    def seconds(self, workers: Sequence[Worker]) -> float:
        """For these ranks; what was measured is scaled by the law of the ring when their number differs. One machine alone: 0."""
        names, ranks = {worker.node for worker in workers}, len(workers)
        if len(names) < 2:
            return 0.0
        if self.measured_s is not None and self.measured_ranks > 1:
            return self.measured_s * network.all_reduce_s(1, ranks, 1) / network.all_reduce_s(1, self.measured_ranks, 1)
        wire = network.wire_between(names, self.throughputs)
        return network.all_reduce_s(self.size_bytes or 0, ranks, wire.bytes_per_s)

    def because(self, wire: Wire, ranks: int) -> str:
        """Where the seconds come from."""
        if self.measured_s is not None:
            return "measured by an earlier run" + (
                f" with {self.measured_ranks} ranks" if ranks != self.measured_ranks else ""
            )
        if self.size_bytes is None:
            return "not known: the model's shape is not known here"
        return f"{self.size_bytes / 1e6:.3g} MB of gradient, {ranks} ranks, {wire}"


def estimate(
    recipe: Recipe, ranks: Sequence[RankPlan], belief: Belief, rows: Rows, *, shape: Architecture | None,
    throughputs: Mapping[tuple[str, str], float], held_out_rows: int | None, resume_step: int,
) -> TimeEstimate | None:  # fmt: skip
    """The estimate, or None where no speed is known. `held_out_rows`: rows of each evaluation, None where there is none or nobody knows."""
    if belief.speeds is None:
        return None
    assert recipe.train is not None and recipe.method is not None
    workers = workers_of(recipe, ranks, belief, padded=bool(rows.padded))
    lengths = rows.lengths(recipe.train.global_batch, recipe.train.seq_len)
    sync = sync_of(recipe, belief, shape, throughputs, len(workers))
    measured = recipe.parallel.shares == "auto"
    compute_s = busy_s(workers, lengths, None if measured else [worker.share for worker in workers])
    wire_s, tokens = sync.seconds(workers), sum(lengths)
    step_s = max(compute_s) + wire_s
    equal = sampler.quotas(len(lengths), [1] * len(workers))
    equal_step_s = max(busy_s(workers, lengths, equal)) + wire_s
    alone = [tokens / max(busy_s([worker], lengths, None)) for worker in workers]
    given = sampler.assign(
        lengths,
        [w.speed for w in workers],
        [w.limits for w in workers],
        None if measured else [w.share for w in workers],
    )
    steps = rows.steps(recipe)
    save_s, evaluate_s = _save_s(recipe, belief, shape), _evaluate_s(recipe, belief, rows, held_out_rows, sum(alone))
    seconds = (
        None
        if steps is None
        else _seconds(recipe, steps, resume_step, step_s, save_s, evaluate_s, held_out_rows is not None)
    )
    gains = _gains(workers, lengths, sync, tokens / step_s, fixed=not measured)
    wire = network.wire_between({worker.node for worker in workers}, throughputs)
    return TimeEstimate(
        is_measured=not {worker.source for worker in workers} & {DATA_SHEET, OWNER, EQUAL} and rows.is_measured,
        steps=steps, row_tokens=rows.tokens_mean, rows_because=rows.because, compute_s=max(compute_s), wire_s=wire_s,
        wire_because=sync.because(wire, len(workers)) if wire_s else "nothing goes over the LAN", step_s=step_s,
        best_step_s=best_s(workers, tokens, rows.tokens_mean) + wire_s, equal_step_s=equal_step_s, tokens_per_s=tokens / step_s,
        efficiency=tokens / step_s / sum(alone), equal_efficiency=tokens / equal_step_s / sum(alone), save_s=save_s,
        evaluate_s=evaluate_s, hours=None if seconds is None else seconds / 3600,
        ranks=tuple(
            RankTime(rank=worker.rank, node=worker.node, source=worker.source, alone_tokens_per_s=rate, tokens=sum(lengths[row] for row in mine), busy_s=busy)
            for worker, rate, mine, busy in zip(workers, alone, given, compute_s, strict=True)
        ),
        gains=gains,
    )  # fmt: skip


def workers_of(recipe: Recipe, ranks: Sequence[RankPlan], belief: Belief, *, padded: bool) -> list[Worker]:
    """The ranks of a plan with their limits as the worker will read them (`homelab.worker.task.Task.balance`)."""
    assert recipe.train is not None and belief.speeds is not None
    asked = recipe.parallel.micro_batch
    found = []
    for rank in ranks:
        cap = rank.token_cap
        tokens = max(1, rank.micro_batch) * recipe.train.seq_len if cap is None else cap
        limits = Limits(tokens, None if asked == "auto" else rank.micro_batch, cap, padded=padded)
        speed = belief.speeds[rank.node][rank.local_rank]
        found.append(Worker(rank.rank, rank.node, belief.sources[rank.node], speed, limits, rank.share))
    return found


def busy_s(workers: Sequence[Worker], lengths: Sequence[int], rows_of: Sequence[int] | None) -> list[float]:
    """Seconds that each rank computes in a step with rows of these lengths, by the worker's own rules. `rows_of` fixes their number."""
    speeds, limits = [worker.speed for worker in workers], [worker.limits for worker in workers]
    found = []
    for worker, positions in zip(workers, sampler.assign(lengths, speeds, limits, rows_of), strict=True):
        mine = [lengths[position] for position in positions]
        cuts = sampler.micro_batches(range(len(mine)), mine, worker.speed, worker.limits)
        passes = ([mine[row] for row in cut] for cut in cuts)
        found.append(worker.speed.seconds([worker.limits.tokens(len(cut), max(cut), sum(cut)) for cut in passes]))
    return found


def best_s(workers: Sequence[Worker], tokens: float, row_tokens: float) -> float:
    """The shortest step if rows could be cut anywhere: the smallest T at which all ranks together get through `tokens`.

    A rank computes from step_s to T at (micro_batch_s / tokens of a full pass + token_s) seconds per token; one whose step_s is
    above T would get nothing.
    """
    costs = []
    for worker in workers:
        full = max(1, int(worker.limits.pass_tokens // row_tokens))
        full = min(full, worker.limits.pass_rows or full)
        costs.append((worker.speed.step_s, worker.speed.micro_batch_s / (full * row_tokens) + worker.speed.token_s))
    costs.sort()
    best = 0.0
    for count in range(1, len(costs) + 1):
        rate = sum(1 / token_s for _, token_s in costs[:count])
        best = (tokens + sum(step_s / token_s for step_s, token_s in costs[:count])) / rate
        if count == len(costs) or best <= costs[count][0]:
            break
    return best


def sync_of(
    recipe: Recipe, belief: Belief, shape: Architecture | None, throughputs: Mapping[tuple[str, str], float], ranks: int
) -> Sync:
    """What is known of the wire: seconds of an earlier run on as many ranks or the next best number, else bytes and the slowest pair."""
    assert recipe.method is not None
    compress = recipe.parallel.compress
    size = network.sent_bytes(shape, recipe.method, compress) if shape else None
    files = [
        file
        for file in belief.files.values()
        if file.world_size > 1 and file.sync_s is not None and file.compress == compress
    ]
    if not files:
        return Sync(size, throughputs)
    nearest = min((file.world_size for file in files), key=lambda count: (abs(count - ranks), count))
    return Sync(size, throughputs, max(file.sync_s or 0.0 for file in files if file.world_size == nearest), nearest)


def _gains(
    workers: Sequence[Worker], lengths: Sequence[int], sync: Sync, rate: float, *, fixed: bool
) -> tuple[NodeGain, ...]:
    """Tokens per second with a node against those without it, and of the node alone, for every node when there are several."""

    def rate_of(some: Sequence[Worker]) -> float:
        rows_of = sampler.quotas(len(lengths), [worker.share for worker in some]) if fixed else None
        return sum(lengths) / (max(busy_s(some, lengths, rows_of)) + sync.seconds(some))

    names = list(dict.fromkeys(worker.node for worker in workers))
    return tuple(
        NodeGain(
            node=name,
            gain=rate / rate_of([worker for worker in workers if worker.node != name]) - 1,
            alone_tokens_per_s=rate_of([worker for worker in workers if worker.node == name]),
        )
        for name in (names if len(names) > 1 else ())
    )


def _save_s(recipe: Recipe, belief: Belief, shape: Architecture | None) -> float:
    """Seconds for which one checkpoint halts the training: the slowest node's, measured, else from 12 bytes for every trained weight."""
    seen = [file.save_s for file in belief.files.values() if file.save_s is not None]
    if seen:
        return max(seen)
    assert recipe.method is not None
    if shape is None:
        return 0.0
    size_bytes = 12 * memory.trainable_parameters(shape, recipe.method)
    return size_bytes / (_DISK_BYTES_PER_S if size_bytes < interval.BACKGROUND_BYTES else _COPY_BYTES_PER_S)


def _evaluate_s(recipe: Recipe, belief: Belief, rows: Rows, held_out_rows: int | None, rate: float) -> float:
    seen = [file.evaluate_s for file in belief.files.values() if file.evaluate_s is not None]
    if seen:
        return max(seen)
    return (held_out_rows or 0) * rows.tokens_mean * _FORWARD_PART / rate


def _seconds(
    recipe: Recipe, steps: int, resume_step: int, step_s: float, save_s: float, evaluate_s: float, evaluates: bool
) -> float:
    """From `resume_step` to the end, with checkpoints and evaluations (before the first and after the last step, and between)."""
    saves = interval.saves(recipe.checkpoint.every_steps, steps, resume_step, step_s, save_s)
    every = recipe.tracking.eval_every_steps
    evaluations = 2 + ((steps - 1) // every - resume_step // every if every else 0) if evaluates else 0
    return max(0, steps - resume_step) * step_s + saves * save_s + evaluations * evaluate_s
