"""The plan of a training whose machines nobody knows yet: node-0, node-1, ... with equal first shares, moved by what the ranks measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from homelab.controller.attempt import inputs, planner
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.config.cluster import Cluster, Gpu, Node
from homelab.controller.config.recipe import ScriptRecipe, TrainRecipe
from homelab.controller.planning.alternatives import global_batch
from homelab.controller.planning.strategy import shares
from homelab.controller.planning.types import Plan, RankPlan

# The scheduler may give cards of another generation than those that the plan was made for.
_ON_OTHERS = {
    "bf16": 'which cards before Ampere do not have. If the scheduler may give one: [train] precision = "fp16" in the recipe, then export again',
    "fp16": 'which every card has. If all cards are Ampere or newer: [train] precision = "bf16" in the recipe, then export again',
}


@dataclass(frozen=True)
class RequestedMachines:
    """What the scheduler is asked for: so many machines, each with these cards (none: CPUs)."""

    count: int
    cards: tuple[Gpu, ...]

    @property
    def ranks_each(self) -> int:
        """Processes of one machine."""
        return max(1, len(self.cards))

    @property
    def vram_gb(self) -> float | None:
        """Memory of the smallest card; None without cards."""
        return min((card.vram_gb for card in self.cards), default=None)


def machines_of(cluster: Cluster) -> tuple[RequestedMachines, str]:
    """As many cards as cluster.toml has, in machines that are all alike, and what a person should know of it.

    Every scheduler here starts the same command on machines of one kind: where the nodes have different numbers of cards, each card is a machine.
    """
    counts = [len(node.gpus) for node in cluster.nodes]
    cards = [gpu for node in cluster.nodes for gpu in node.gpus]
    if not cards:
        return RequestedMachines(len(counts), ()), ""
    if 0 in counts:
        without = [node.name for node in cluster.nodes if not node.gpus]
        raise InputError(
            f"some nodes of cluster.toml have cards, and {', '.join(without)} {'have' if len(without) > 1 else 'has'} none", where="export",
            hint="describe the machines of the scheduler: --machines 3 --gpus 1 --vram 12, or leave nodes out: --nodes NAMES",
        )  # fmt: skip
    smallest = min(cards, key=lambda card: card.vram_gb)
    if len(set(counts)) == 1:
        return RequestedMachines(len(counts), (smallest,) * counts[0]), ""
    note = (
        f"the nodes of cluster.toml have {', '.join(map(str, counts))} cards, but a job needs machines of one kind. Each card counts as one machine here, and"
        " cards of one computer exchange over its network"
    )
    return RequestedMachines(len(cards), (smallest,)), note


def make(
    recipe: TrainRecipe | ScriptRecipe, recipe_path: Path, machines: RequestedMachines, run: str
) -> tuple[TrainRecipe, Plan, list[RecipeInput], list[str]]:
    """The settled recipe, its plan, its files, and what of it does not travel. Raises InputError for what cannot be a job."""
    if not isinstance(recipe, TrainRecipe):
        raise InputError(
            "this recipe starts your own program, and only homelab's own training can be exported: no scheduler finds the checkpoints of another program",
            where=f"{recipe_path}, [script]",
            hint=Hint("its torchrun command for your own job: {}", homelab("plan", str(recipe_path))),
        )
    items = inputs.of_recipe(recipe, recipe_path)
    _refuse_unknown_data(items, recipe_path)
    notes = [
        "Only the scheduler watches the job: there is no dashboard and no diagnosis, and no node is left out. After a fault it starts again from the newest complete"
        " checkpoint in the folder."
    ]
    if isinstance(recipe.parallel.shares, dict):
        notes.append(
            "[parallel] shares names nodes, but the scheduler has other machines. The shares begin equal and then follow the measured speeds. The training is the same."
        )
    if recipe.model.is_folder:
        notes.append(f"The model's folder {recipe.model.name} has to be on every machine.")
    neutral = recipe.model_copy(update={"parallel": replace(recipe.parallel, shares="auto")})
    cards = [card.model_copy(update={"uuid": None, "index": None}) for card in machines.cards]
    nodes = [_node(number, cards) for number in range(machines.count)]
    of = planner.inputs_of(Cluster.model_validate({"name": "job", "nodes": nodes}, strict=False), {}, neutral, items, run)
    settled, plan = global_batch.settle(of)
    assert isinstance(settled, TrainRecipe)
    if len(plan.nodes) < machines.count:
        raise InputError(
            f"{', '.join(plan.left_out)} of {machines.count} machines would have no work", where=f"{recipe_path}",
            hint=f"use fewer: --machines {len(plan.nodes)}; the reason: {next(iter(plan.left_out_because.values()), '')}",
        )  # fmt: skip
    if neutral.train.precision == "auto" and plan.device == "cuda":
        notes.append(f"The recipe leaves the precision open, and this job trains in {plan.precision}, {_ON_OTHERS[plan.precision]}.")
    parts = shares.equal(settled.train.global_batch, plan.world_size)
    first = plan.model_copy(
        update={"attempt": 0, "ranks": _alike(plan.ranks, parts), "launch": None, "strategies": (), "time": None, "choices": ()}
    )
    return settled, first.model_copy(update={"launch": plan.launch}), items, notes


def _node(number: int, cards: Sequence[Gpu]) -> Node:
    """A machine for the planner, which wants an address of it. It goes into no file (198.18.0.0/15 is nobody's: RFC 2544)."""
    address = f"198.18.{number // 250}.{number % 250 + 1}"
    return Node.model_validate(
        {"name": f"node-{number}", "host": address, "lan_address": address, "interface": "eth0", "gpus": cards}, strict=False
    )


def _alike(ranks: Sequence[RankPlan], parts: Sequence[int]) -> tuple[RankPlan, ...]:
    """Ranks that fit on any of the cards: nobody knows which rank gets the smallest one."""
    caps = [rank.token_cap for rank in ranks if rank.token_cap is not None]
    passes = min((rank.micro_batch for rank in ranks if rank.micro_batch), default=1)
    unknown = {"memory": None, "speed": None, "card": None, "micro_batch": passes, "token_cap": min(caps, default=None)}
    return tuple(rank.model_copy(update={**unknown, "share": share}) for rank, share in zip(ranks, parts, strict=True))


def _refuse_unknown_data(items: Sequence[RecipeInput], recipe_path: Path) -> None:
    """Data on a node is not here: it can neither travel nor be told from other data."""
    for item in items:
        if item.kind == "on-node":
            raise InputError(
                f"{item.path} is on your nodes, but a scheduler has other machines", where=f"{recipe_path}, key data.{item.role}",
                hint="give a path relative to the recipe (the job's folder then has the file), or a data set of the hub: hub:NAME",
            )  # fmt: skip
