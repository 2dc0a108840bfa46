"""How many samples of every global batch each rank computes. Shares decide speed, never the training."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Literal

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.planning.machines.machines import Machines
from homelab.controller.planning.speed.dataset_size import Rows
from homelab.controller.planning.types import Choice
from homelab.controller.planning.work.job import Workload
from homelab.shared.law import assignment
from homelab.shared.law.limits import Limits
from homelab.shared.law.speed import Speed

_WHERE = "recipe, [parallel] shares"
CPU_MICRO_BATCH = 4  # on a CPU larger batches gain little (measured: 135M parameters, two cores) and cost memory


def split(global_batch: int, weights: Sequence[float]) -> tuple[int, ...]:
    """`global_batch` samples over ranks in proportion to their weights, each rank at least 1; the shares sum to the batch.

    Largest remainder (Hamilton): everyone gets the whole part of its quota, what is left goes to the largest fractions, the
    earlier rank first among equals. Ranks whose quota is below 1 get 1, and the rest is split among the others. Exact
    arithmetic, so every machine comes to the same shares. Raises InputError when there are more ranks than samples.
    """
    assert weights and all(0 < weight < float("inf") for weight in weights)
    if global_batch < len(weights):
        raise InputError(
            f"a global batch of {_samples(global_batch)} cannot feed {len(weights)} ranks: each needs at least one",
            where="recipe, [train] global_batch",
            hint=f"global_batch = {len(weights)} or more, or leave nodes out: [parallel] shares = {{ NODE = 0, ... }}",
        )
    exact = [Fraction(weight) for weight in weights]
    shares = [1] * len(exact)
    open_ranks = list(range(len(exact)))
    while True:
        left = global_batch - (len(exact) - len(open_ranks))
        total = sum(exact[rank] for rank in open_ranks)
        quotas = {rank: exact[rank] * left / total for rank in open_ranks}
        below = [rank for rank in open_ranks if quotas[rank] < 1]
        if not below:
            break
        open_ranks = [rank for rank in open_ranks if quotas[rank] >= 1]
    for rank in open_ranks:
        shares[rank] = int(quotas[rank])
    by_fraction = sorted(open_ranks, key=lambda rank: (int(quotas[rank]) - quotas[rank], rank))
    for rank in by_fraction[: global_batch - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)


def decide(recipe: TrainRecipe, workload: Workload, machines: Machines) -> tuple[tuple[int, ...], tuple[Choice, ...]]:
    """A share for every rank, in rank order, and the reasons.

    With "auto" and known speeds it is what is expected: the worker gives rows of different lengths to the rank that finishes soonest.
    The errors are those of `node_shares`.
    """
    setting, speeds = recipe.parallel.shares, workload.speeds
    if not isinstance(setting, str):
        setting = {name: count for name, count in setting.items() if count > 0}
    shares, choice = node_shares(recipe.train.global_batch, setting, speeds.weights, machines.absent)
    if setting == "auto" and speeds.speeds is not None:
        shares = _soonest(recipe, speeds.speeds, workload.rows, machines.device)
        because = "each rank gets the rows that it computes while the others compute theirs; the longest rows go first, to the rank that finishes first"
        choice = Choice(subject="shares", value=_table(shares), because=because)
    flat = tuple(share for per_rank in shares.values() for share in per_rank)
    return flat, (choice,) if setting == "equal" else (speeds.choice, choice)


def _soonest(recipe: TrainRecipe, speeds: Mapping[str, tuple[Speed, ...]], rows: Rows, device: str) -> dict[str, tuple[int, ...]]:
    """How many rows of a typical batch the worker's own rule gives to every rank; at least one row each."""
    micro_batch = recipe.parallel.micro_batch
    pass_rows = micro_batch if micro_batch != "auto" else CPU_MICRO_BATCH if device == "cpu" else 1
    lengths = rows.lengths(recipe.train.global_batch, recipe.train.seq_len)
    flat = [speed for per_rank in speeds.values() for speed in per_rank]
    limits = [Limits.planned(pass_rows, None, seq_len=recipe.train.seq_len, asked=micro_batch, padded=bool(rows.padded))] * len(flat)
    counts = iter(len(positions) for positions in assignment.assign(lengths, flat, limits))
    return {name: tuple(next(counts) for _ in per_rank) for name, per_rank in speeds.items()}


def node_shares(
    global_batch: int,
    setting: Literal["auto", "equal"] | Mapping[str, int],
    weights: Mapping[str, tuple[float, ...]],
    absent: Collection[str] = (),
) -> tuple[dict[str, tuple[int, ...]], Choice]:
    """Every node's shares, one per rank, in the order of `weights` (node -> a weight per rank); nodes left out are absent.

    "auto" splits by the weights, "equal" gives every rank the same (give or take one), a table gives each node its number of
    samples, split over its ranks by their weights; 0 leaves the node out. Where the table names nodes of the cluster that are
    `absent` now (unreachable, dead), the others take over their samples in the table's proportions. Raises InputError for a
    table with unknown or missing nodes, a sum other than the global batch, or fewer samples on a node than it has ranks.
    """
    if isinstance(setting, Mapping):
        return _given(global_batch, setting, weights, absent)
    flat = [1.0 if setting == "equal" else weight for per_rank in weights.values() for weight in per_rank]
    shares = iter(split(global_batch, flat))
    result = {name: tuple(next(shares) for _ in per_rank) for name, per_rank in weights.items()}
    because = "the same for every rank, as the recipe says" if setting == "equal" else "in proportion to the speeds"
    return result, Choice(subject="shares", value=_table(result), because=because)


def _given(
    global_batch: int, table: Mapping[str, int], weights: Mapping[str, tuple[float, ...]], absent: Collection[str]
) -> tuple[dict[str, tuple[int, ...]], Choice]:
    names = [*weights, *(name for name in absent if name not in weights)]
    unknown = [name for name in table if name not in names]
    if unknown:
        raise InputError(
            f'no node is named "{unknown[0]}".{did_you_mean(unknown[0], names)}', where=_WHERE, hint=f"the nodes are: {', '.join(names)}"
        )
    missing = [name for name in weights if name not in table]
    if missing:
        raise InputError(
            f"no share is given for {', '.join(missing)}",
            where=_WHERE,
            hint=f"add {', '.join(f'{name} = 0' for name in missing)} to leave {'it' if len(missing) == 1 else 'them'} out",
        )
    assert all(count >= 0 for count in table.values())
    total = sum(table.values())
    without_share = [name for name in table if name not in weights and table[name] > 0]
    taking_part = {name: per_rank for name, per_rank in weights.items() if table[name] > 0}
    if not taking_part:
        raise InputError("every node is left out: all shares are 0", where=_WHERE, hint='shares = "auto"')
    if without_share and total == global_batch:
        flat = _flat(table, taking_part)
        shares = iter(split(global_batch, flat))
        result = {name: tuple(next(shares) for _ in per_rank) for name, per_rank in taking_part.items()}
        because = f"the recipe's proportions without {', '.join(without_share)}"
        return result, Choice(subject="shares", value=_table(result), because=because)
    crowded = [name for name, per_rank in taking_part.items() if table[name] < len(per_rank)]
    if total != global_batch or crowded:
        if total != global_batch:
            message = f"the shares sum to {total}, but the global batch is {global_batch}"
        else:
            name = crowded[0]
            message = f"{name} has {len(weights[name])} ranks, but a share of {_samples(table[name])}: each needs at least one"
        parts = {name: weights.get(name, (1.0,)) for name in table if table[name] > 0}
        raise InputError(message, where=_WHERE, hint=_nearest(global_batch, table, parts))
    result = {name: split(table[name], per_rank) for name, per_rank in taking_part.items()}
    left_out = [name for name in weights if name not in taking_part]
    because = "as the recipe says" + (f"; {', '.join(left_out)}: left out (share 0)" if left_out else "")
    return result, Choice(subject="shares", value=_table(result), because=because)


def _nearest(global_batch: int, table: Mapping[str, int], taking_part: Mapping[str, tuple[float, ...]]) -> str:
    """The hint with the nearest valid table: the same proportions, for this batch. Nodes of share 0 stay out."""
    ranks = sum(len(per_rank) for per_rank in taking_part.values())
    if global_batch < ranks:
        return f"global_batch = {ranks} or more: this many ranks take part"
    parts = iter(split(global_batch, _flat(table, taking_part)))
    nearest = {name: sum(next(parts) for _ in taking_part[name]) if name in taking_part else 0 for name in table}
    total = sum(table.values())
    other = f", or global_batch = {total}" if total != global_batch and total >= ranks else ""
    return f"shares = {{ {', '.join(f'{name} = {count}' for name, count in nearest.items())} }}{other}"


def _flat(table: Mapping[str, int], taking_part: Mapping[str, tuple[float, ...]]) -> list[float]:
    """Each rank's part of its node's count in the table, by the ranks' weights."""
    return [table[name] * weight / sum(per_rank) for name, per_rank in taking_part.items() for weight in per_rank]


def _samples(count: int) -> str:
    return f"{count} sample{'' if count == 1 else 's'}"


def _table(shares: Mapping[str, tuple[int, ...]]) -> str:
    return _list((name, "+".join(str(share) for share in per_rank)) for name, per_rank in shares.items())


def _list(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in pairs)


def equal(total: int, parts: int) -> list[int]:
    """As many for each; the first ones take what does not divide."""
    return [total // parts + (number < total % parts) for number in range(parts)]
