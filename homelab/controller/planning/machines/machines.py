"""The machines that take part in a training, and the processes on them: one per CUDA card, or one per machine on CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from homelab.controller.base import hardware
from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.facts import card_generation, nvidia_answer
from homelab.controller.facts.card_generation import Capability
from homelab.controller.facts.machine import SystemFacts
from homelab.controller.facts.node import Facts
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.speed.speed_profiles import cpu_name
from homelab.controller.planning.types import Choice
from homelab.shared.protocol.card_messages import GpuFacts


@dataclass(frozen=True)
class RankSlot:
    """The place of one process: a card of a node, or the node's CPU. `facts` is None where the node was not asked. `held_bytes`: what others hold of
    its memory, where the facts count the process itself as one of them."""

    rank: int
    node: Node
    local_rank: int
    device: str
    facts: Facts | None
    held_bytes: int | None = None

    @property
    def name(self) -> str:
        """How the plan names the card or the CPU."""
        if self.device == "cpu":
            return cpu_name(self.facts) if self.facts else "CPU"
        return self.facts.gpu.cards[self.local_rank].name if self.facts else self.node.gpus[self.local_rank].model

    @property
    def card(self) -> str | None:
        """The uuid of the card; None where it is not known."""
        return self.facts.gpu.cards[self.local_rank].uuid if self.device == "cuda" and self.facts else None

    @property
    def capability(self) -> Capability | None:
        """CUDA's number of the card's generation; None where it is not known, and for a CPU."""
        if self.device != "cuda":
            return None
        if self.facts is None:
            return hardware.generation(self.name)
        return card_generation.of_card(self.facts.gpu.cards[self.local_rank], self.facts.gpu)

    def memory(self) -> tuple[int | None, int]:
        """(memory of the card or the machine, what of it is not free now), in bytes: other processes hold it, or the driver keeps it."""
        size_bytes, held_bytes = self._memory_now()
        return size_bytes, held_bytes if self.held_bytes is None else self.held_bytes

    def _memory_now(self) -> tuple[int | None, int]:
        if self.device == "cpu":
            return host_memory(self.facts.system) if self.facts is not None else (None, 0)
        if self.facts is None:
            belief = self.node.gpus[self.local_rank]
            return hardware.usable_bytes(belief.model, int(belief.vram_gb * 2**30)), 0
        card = self.facts.gpu.cards[self.local_rank]
        return host_memory(self.facts.system) if nvidia_answer.shares_memory(card, self.facts) else _card_memory(card)


@dataclass(frozen=True)
class Machines:
    """The nodes that take part. `left_out` are nodes that this plan leaves out, `absent` all nodes of cluster.toml that have no card or did not answer.

    `held_bytes` is for machines that train while they are planned for: rank -> what others hold of its memory.
    """

    device: str  # cuda | cpu
    nodes: tuple[Node, ...]
    facts: Mapping[str, Facts]
    left_out: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    choices: tuple[Choice, ...] = ()
    held_bytes: Mapping[int, int] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """The nodes' names, in rank order."""
        return [node.name for node in self.nodes]

    @property
    def slots(self) -> tuple[RankSlot, ...]:
        """Every process, in rank order."""
        places = [(node, local) for node in self.nodes for local in range(self.ranks_on(node))]
        return tuple(
            RankSlot(rank, node, local, self.device, self.facts.get(node.name), self.held_bytes.get(rank))
            for rank, (node, local) in enumerate(places)
        )

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return sum(self.ranks_on(node) for node in self.nodes)

    def ranks_on(self, node: Node) -> int:
        """Processes of a node: one per card, one for a CPU."""
        return card_count(node, self.facts) if self.device == "cuda" else 1


def card_count(node: Node, facts: Mapping[str, Facts]) -> int:
    """CUDA cards of a node: as the node reports, or offline as its owner says."""
    return len(facts[node.name].gpu.cards) if node.name in facts else len(node.gpus)


def device_of(cluster: Cluster, facts: Mapping[str, Facts]) -> str:
    """What the cluster trains on: "cuda" where any node has a card, else "cpu"."""
    return "cuda" if any(card_count(node, facts) for node in cluster.nodes) else "cpu"


def choose(inputs: PlanInputs) -> Machines:
    """The nodes that take part. Raises InputError where the recipe's shares name no node, or fewer nodes are left than it wants."""
    cluster, facts, recipe = inputs.cluster, inputs.facts, inputs.recipe
    device = device_of(cluster, facts)
    nodes = [node for node in cluster.nodes if device == "cpu" or card_count(node, facts)]
    without_card = [node.name for node in cluster.nodes if node not in nodes]
    because = f"{len(nodes)} of {len(cluster.nodes)} nodes have CUDA cards" if device == "cuda" else "no node has a CUDA card"
    choices = [Choice(subject="device", value=device, because=because)]
    choices += [_left_out(name, f"{name} has no CUDA card, and CPU ranks would slow every step") for name in without_card]
    without_share: list[str] = []
    if isinstance(recipe, TrainRecipe) and isinstance(recipe.parallel.shares, dict):
        nodes, without_share = _without_zero_shares(cluster, nodes, recipe.parallel.shares)
        choices += [_left_out(name, f"the share of {name} in the recipe is 0") for name in without_share]
    if len(nodes) < recipe.recovery.min_nodes:
        raise InputError(
            f"{len(nodes)} node{' is' if len(nodes) == 1 else 's are'} left, the recipe needs at least {recipe.recovery.min_nodes}",
            where="recipe, [recovery] min_nodes",
            hint=Hint("bring a node back ({}), or lower min_nodes", homelab("preflight")),
        )
    absent = (*cluster.left_out, *without_card)
    return Machines(device, tuple(nodes), facts, (*without_card, *without_share), absent, tuple(choices))


def _left_out(node: str, because: str) -> Choice:
    return Choice(subject=f"node {node}", value="left out", because=because)


def _without_zero_shares(cluster: Cluster, nodes: list[Node], shares: Mapping[str, int]) -> tuple[list[Node], list[str]]:
    names = [node.name for node in cluster.nodes] + list(cluster.left_out)
    for name in shares:
        if name not in names:
            raise InputError(
                f'no node is named "{name}".{did_you_mean(name, names)}',
                where="recipe, [parallel] shares", hint=f"the nodes are: {', '.join(names)}",
            )  # fmt: skip
    left_out = [node.name for node in nodes if shares.get(node.name) == 0]
    kept = [node for node in nodes if node.name not in left_out]
    if not kept:
        raise InputError(
            f"the recipe gives no samples to {', '.join(left_out)}, and there is no other node",
            where="recipe, [parallel] shares", hint='give one of them a share, or shares = "auto"',
        )  # fmt: skip
    return kept, left_out


def host_memory(system: SystemFacts) -> tuple[int | None, int]:
    """Of the machine, or of the control group where that leaves less room (a container)."""
    total = system.memory_total_bytes
    held = 0 if total is None else total - (system.memory_available_bytes or 0)
    limit, used = system.memory_limit_bytes, system.memory_limit_used_bytes or 0
    if limit is not None and (total is None or limit - used < total - held):
        return limit, used
    return total, held


def _card_memory(card: GpuFacts) -> tuple[int | None, int]:
    """Of a card that MIG has split, its smallest instance: a process gets one of them, and CUDA chooses which."""
    total, free = card.memory_total_bytes, card.free_bytes
    if card.mig and any(card.mig_bytes):
        index = min((i for i, size in enumerate(card.mig_bytes) if size), key=lambda i: card.mig_bytes[i])
        total, free = card.mig_bytes[index], (*card.mig_free_bytes, *[None] * len(card.mig_bytes))[index]
    return total, max(0, total - free) if total is not None and free is not None else 0
