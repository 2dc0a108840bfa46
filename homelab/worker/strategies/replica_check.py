"""Are the ranks' copies of the weights the same? To the last bit where a training starts, to rounding while it runs.

DDP would send rank 0's weights to all others at every start, frozen ones too: 33 s for 7B in NF4 on 1 Gbit/s. Here only digests are
sent; an error names the ranks that hold something else, and no rank trains on it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from homelab.shared.protocol import checkpoint_copies
from homelab.worker.errors import TrainingError
from homelab.worker.model import inspection, weight_digests
from homelab.worker.runtime import process_group
from homelab.worker.runtime.task import Task

ROUNDING = 1e-5  # relative; rounding differences of unequal processors stay far below
_NOTED = 1e-6
_PROJECTIONS = 8
_BLOCK = 1 << 14


def refuse_unequal(model: Any, task: Task, where: str) -> str | None:
    """Raises TrainingError, the same on every rank, where a rank's weights differ from the others' in a bit. Collective.

    Frozen weights count as they were read. What was quantised from the same weights may differ between unlike devices (`weight_digests.base`):
    that is no error, and what a person should know of it is returned. Between cards of the same name it is one.
    """
    if len(task.ranks) == 1:
        return None
    # A rank with layers from its host has loaded no part for images.
    own_numbers = numbers(model, without=inspection.towers(model) if any(rank.streaming for rank in task.ranks) else ())
    process_group.wait_for_all("weights", len(task.ranks))  # disks of different speed delivered them
    everyone = process_group.gather(own_numbers)
    trained, read, held = (
        {rank: str(values[start : start + checkpoint_copies.NUMBERS]) for rank, values in enumerate(everyone)}
        for start in range(0, 3 * checkpoint_copies.NUMBERS, checkpoint_copies.NUMBERS)
    )
    odd = _odd(read) or [rank for alike in _alike(task) for rank in _odd({rank: held[rank] for rank in alike})]
    if odd:
        nodes, others = _nodes(task, odd), task.named(*(rank for rank in read if rank not in odd))
        raise TrainingError(
            f"the ranks do not hold the same base model: that of {task.named(*odd)} differs from {others}",
            where=f"{nodes}: {task.model.name} ([model] name in the recipe)",
            hint=f"homelab preflight RECIPE --deep --only model.files reads every file and names the one that differs, and how to fix it; if none"
            f" differs, test the memory of {nodes} (memtester); then: homelab recover {task.run_dir.name}",
        )
    odd = _odd(trained)
    if odd:
        raise TrainingError(
            f"the ranks do not start from the same weights: those of {task.named(*odd)} differ from {task.named(*(rank for rank in trained if rank not in odd))}",
            where=where,
            hint=f"homelab recover {task.run_dir.name}; if it happens again, test the memory of {_nodes(task, odd)} (memtester)",
        )
    odd = _odd(held)
    if odd:
        return f"{task.named(*odd)}: the same 16-bit weights were quantised to other numbers than on the other ranks; different devices round differently"
    return None


def numbers(model: Any, *, without: tuple[str, ...] = ()) -> list[float]:
    """Digests of a rank's weights as floats for a collective: of the trained, of the frozen as read, and as held. `without`: as in `weight_digests.base`."""
    digests = weight_digests.trained(model), *weight_digests.base(model, without)
    return [number for digest in digests for number in checkpoint_copies.numbers(digest)]


def _odd(digests: Mapping[int, str]) -> list[int]:
    """The ranks whose digest is not the one of most ranks."""
    right = checkpoint_copies.right(digests)
    return [rank for rank, value in digests.items() if value != right]


def _alike(task: Task) -> list[list[int]]:
    """Ranks whose cards have the same name. A CPU's threads decide in which order it adds, so no two CPUs are taken to be alike."""
    groups: dict[str, list[int]] = {}
    for rank in task.ranks if task.device == "cuda" else ():
        groups.setdefault(rank.device_name, []).append(rank.rank)
    return list(groups.values())


def marks(weights: Mapping[str, torch.Tensor]) -> list[float]:
    """The squared length of these weights, and their sums under random signs, in float64.

    The squared difference of such a sum between two copies is that of the copies themselves, on average: no difference cancels, and a
    few numbers say how far copies are apart (Achlioptas, Database-friendly random projections, 2003).
    """
    totals = torch.zeros(1 + _PROJECTIONS, dtype=torch.float64)
    columns = _signs(_BLOCK, _PROJECTIONS, seed=1)
    for number, (_, parameter) in enumerate(sorted(weights.items())):
        flat = parameter.detach().flatten()
        for start in range(0, len(flat), _BLOCK * 64):
            part = flat[start : start + _BLOCK * 64].double()
            rows = -(-len(part) // _BLOCK)
            part = torch.nn.functional.pad(part, (0, rows * _BLOCK - len(part))).view(rows, _BLOCK)
            signs = _signs(rows, _PROJECTIONS, seed=2 + number + start).to(part.device)
            totals[1:] += ((part @ columns.to(part.device)) * signs).sum(0).cpu()
            totals[0] += float((part * part).sum())
    return [float(value) for value in totals]


def apart(everyone: Sequence[Sequence[float]]) -> tuple[float, list[int]]:
    """From the `marks` of all ranks: how far apart the two most different copies are, of their size, and which ranks are not near the most.

    "The most": the copy that is nearest to all others together. With two ranks neither is known to be right, and both are named.
    """
    size = max(everyone[0][0], 1e-60) ** 0.5

    def between(first: Sequence[float], second: Sequence[float]) -> float:
        return float(statistics.fmean((a - b) ** 2 for a, b in zip(first[1:], second[1:], strict=True)) ** 0.5 / size)

    far = [[between(first, second) for second in everyone] for first in everyone]
    middle = min(range(len(far)), key=lambda rank: sum(far[rank]))
    odd = [rank for rank, value in enumerate(far[middle]) if value > ROUNDING]
    return max(map(max, far)), list(range(len(far))) if len(far) == 2 and odd else odd


class Comparison:
    """Compares the copies at every checkpoint, and reports a difference that has become ten times as large. `holders`: the ranks that have one."""

    def __init__(self, task: Task, holders: Sequence[int] | None = None) -> None:
        self._task = task
        self._holders = range(len(task.ranks)) if holders is None else holders
        self._told = 0.0

    def compare(self, weights: Mapping[str, torch.Tensor], step: int) -> str | None:
        """A sentence for the user; None where there is nothing new. Collective, also for ranks without a copy."""
        everyone = process_group.gather(marks(weights))
        everyone = [everyone[rank] for rank in self._holders]
        far, odd = apart(everyone)
        if far <= max(_NOTED, 10 * self._told):
            return None
        self._told = far
        if not odd:
            return f"the weights of the ranks differ by {far:.0e} of their size: unequal hardware rounds differently"
        names = self._task.named(*(self._holders[place] for place in odd))
        difference = f"{names} differ from each other" if len(odd) == len(everyone) else f"those of {names} differ from the others"
        return (
            f"the copies of the weights have become different: after step {step} {difference} by {far:.0e} of their size, which is more than"
            f" rounding: they no longer train the same model. homelab stop {self._task.run_dir.name}, then homelab recover {self._task.run_dir.name} makes"
            " them equal again; if it happens again, test the memory of these nodes (memtester)"
        )


def trained(model: Any) -> Mapping[str, torch.Tensor]:
    """The weights that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _signs(rows: int, columns: int, *, seed: int) -> torch.Tensor:
    """Random signs from a generator whose numbers are the same on every machine."""
    drawn = torch.randint(0, 2, (rows, columns), generator=torch.Generator().manual_seed(seed))
    return drawn.double() * 2 - 1


def _nodes(task: Task, numbers: Sequence[int]) -> str:
    """The nodes of these ranks, each once."""
    return ", ".join(sorted({task.nodes[rank] for rank in numbers}))
