"""The memory of every rank of a training: what is there, what is needed, what is lacking."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.memory import division, rank_memory
from homelab.controller.planning.memory.attention import repeats_keys_of
from homelab.controller.planning.memory.division import Division
from homelab.controller.planning.memory.rank_memory import RankSetup
from homelab.controller.planning.memory.wsl import without_paging
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.types import Plan
from homelab.shared.protocol.memory_items import HELD

SHORTEST_ROW = 8  # tokens: the least that a recipe may say


@dataclass(frozen=True, slots=True)
class RankMemory:
    """A rank's card or machine: all its memory, and what of it is not free now, in bytes. `repeats_keys`, `measured`: as in `memory.estimate`."""

    rank: int
    node: str
    available_bytes: int
    held_bytes: int = 0
    repeats_keys: bool = False
    measured: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MemoryScenario:
    """What the memory of every rank depends on, beside the recipe. `ranks` are those whose memory is known. `pages`: every card can (`wsl`).

    `lacking_of_cut`: of a model that is cut into stages, the bytes that the best cut lacks with this recipe; 0 or less where one fits.
    """

    shape: Architecture
    precision: str
    device: str
    world_size: int
    ranks: tuple[RankMemory, ...]
    pages: bool = True
    division: Division = division.WHOLE
    lacking_of_cut: Callable[[TrainRecipe], int] | None = None


class DoesNotFit(InputError):
    """No rank has room for a row of `seq_len` tokens. Carries the scenario, so that `--fit` can look for a fix."""

    def __init__(self, message: str, *, where: str, hint: str, scenario: MemoryScenario) -> None:
        super().__init__(message, where=where, hint=hint)
        self.scenario = scenario


class NodesWithoutRoom(DoesNotFit):
    """Some nodes have no room for the least part of the model; without them it may be planned. `others` are the nodes that are left."""

    def __init__(self, nodes: Sequence[str], others: Sequence[str], part: str, scenario: MemoryScenario) -> None:
        leave = f"leave it out: --nodes {','.join(others)}" if others else Hint("{}, or a shorter seq_len", homelab("plan RECIPE --fit"))
        super().__init__(f"not even {part} fits on {', '.join(nodes)}", where="recipe, [parallel] strategy", hint=leave, scenario=scenario)
        self.nodes, self.others, self.part = tuple(nodes), tuple(others), part


def needed_bytes(recipe: TrainRecipe, scenario: MemoryScenario, rank: RankMemory, *, tokens: int | None = None) -> int:
    """Bytes at the peak for one row of `tokens` (default: seq_len), others' memory included; in the recipe's own micro-batch
    where it names one and `tokens` is not given."""
    train = recipe.train if tokens is None else replace(recipe.train, seq_len=tokens)
    micro_batch = recipe.parallel.micro_batch
    rows = micro_batch if isinstance(micro_batch, int) and tokens is None else 1
    setup = RankSetup(
        scenario.precision, scenario.device, rows, scenario.world_size, rows > 1 or recipe.data.packing, recipe.parallel.compress,
        rank.repeats_keys, rank.held_bytes, rank.measured, scenario.division,
    )  # fmt: skip
    items = rank_memory.estimate(scenario.shape, recipe.method, train, setup)
    return sum(item.size_bytes for item in items)


def token_cap(recipe: TrainRecipe, scenario: MemoryScenario, rank: RankMemory) -> int | None:
    """The longest row that fits into this rank alone; None when one of seq_len does, 0 when not even the shortest does."""

    def fits(tokens: int) -> bool:
        return needed_bytes(recipe, scenario, rank, tokens=tokens) <= rank.available_bytes

    if fits(recipe.train.seq_len):
        return None
    if not fits(SHORTEST_ROW):
        return 0
    low, high = SHORTEST_ROW, recipe.train.seq_len  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def lacking_bytes(recipe: TrainRecipe, scenario: MemoryScenario) -> int:
    """By how many bytes the rank that lacks most lacks room, or the best cut of a pipeline; 0 or less when all fit."""
    if scenario.lacking_of_cut is not None:
        return scenario.lacking_of_cut(recipe)
    return max(needed_bytes(recipe, scenario, rank) - rank.available_bytes for rank in scenario.ranks)


def each_lacking(recipe: TrainRecipe, scenario: MemoryScenario) -> list[tuple[int, RankMemory]]:
    """How many bytes every rank lacks for one row of seq_len tokens, the least first."""
    shortages = [
        (needed_bytes(recipe, scenario, rank, tokens=recipe.train.seq_len) - rank.available_bytes, rank) for rank in scenario.ranks
    ]
    return sorted(shortages, key=lambda entry: (entry[0], entry[1].rank))


def of_plan(plan: Plan, shape: Architecture, facts: Mapping[str, Facts]) -> MemoryScenario | None:
    """The scenario that a plan was made for; None where no rank's memory is known."""
    ranks = []
    for rank in plan.ranks:
        if rank.memory is not None and rank.memory.available_bytes is not None:
            items = {item.name: item.size_bytes for item in rank.memory.items}
            beside = {name: items.get(name, 0) for name in rank_memory.BESIDE_TORCH} if plan.device == "cuda" else {}
            repeats = repeats_keys_of(plan, rank)
            held_bytes = items.get(HELD, 0)
            ranks.append(RankMemory(rank.rank, rank.node, rank.memory.available_bytes, held_bytes, repeats, beside))
    pages = not without_paging((rank.node for rank in plan.ranks), facts)
    parts = division.of(plan.strategy, [rank.node for rank in plan.ranks])
    return MemoryScenario(shape, plan.precision, plan.device, plan.world_size, tuple(ranks), pages, parts) if ranks else None
