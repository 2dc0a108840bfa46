"""gpu: the cards are those of cluster.toml, nobody else fills their memory, and torch can compute on them."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.checks import gpu_driver, gpu_health, gpu_memory, gpu_xid, torch_cuda
from homelab.checks.check import Check, Problem, Subject
from homelab.checks.commands import GIB, answered, binary_size, listed, on_node
from homelab.checks.evidence import Evidence
from homelab.config.cluster import Node
from homelab.facts import Facts
from homelab.planning import cards
from homelab.planning.cards import same_card, short

VRAM_TOLERANCE = 0.10  # an "8 GB" card answers 8188 MiB, a "24 GB" L4 with ECC 23034 MiB


def inventory(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """Count, names and memory against cluster.toml: fail where the owner counts on more than is there, or points at a card that is not, else warn.

    Cards beyond those that are named take no part (`homelab.planning.cards`): that is a choice, and no fault.
    """
    if facts.nvidia_smi != "ok":
        return
    if node.gpus:
        lacking = cards.missing(node, facts)
        yield from (Problem("fail", message, cards.choose(node, facts)) for message in lacking)
        if not lacking:
            yield from _against_belief(node, cards.chosen(node, facts))
    elif facts.gpus:
        message = f"cluster.toml names no GPU here, but there is {_names(facts)}: a plan uses it, and leaves nodes without a card out"
        yield Problem("warn", message, cards.edit(node, facts.gpus))


def amd(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where the owner counts on a card of AMD: nothing would be trained on it."""
    if node.gpus and facts.amd_gpus and not facts.gpus:
        there = listed(card.name for card in facts.amd_gpus)
        message = f"{there} is a card of AMD, and training needs CUDA: this node would compute on its CPU, or be left out beside NVIDIA nodes"
        yield Problem("fail", message, f"edit cluster.toml, node {node.name}: gpus = []")


def mixed(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """warn for nodes without a card beside nodes with one: the plan leaves them out (`homelab.planning.plan`).

    NCCL needs a card for every rank, and gloo over all CPUs would give the cards away. Nodes whose cards are only missing, and
    cards that cluster.toml does not name, are the business of the other checks.
    """
    nodes = [(node, facts) for node, facts in answered(evidence) if "gpu" not in facts.broken]
    with_cards = [node.name for node, facts in nodes if facts.gpus and node.gpus]
    without = [(node, facts) for node, facts in nodes if not facts.gpus and not node.gpus]
    if not with_cards:
        return
    for node, facts in without:
        what = f"only {listed(card.name for card in facts.amd_gpus)}" if facts.amd_gpus else "no card"
        message = (
            f"it has {what}, so it takes no part in training: {listed(with_cards)} compute{'s' if len(with_cards) == 1 else ''} "
            f"without it over NCCL, and its {facts.cpu_count} cores would slow every step down"
        )
        hint = f"take {node.name} out of cluster.toml, or train on CPUs alone with a cluster.toml of nodes without cards (gloo)"
        yield node.name, Problem("warn", message, hint)


def _against_belief(node: Node, facts: Facts) -> Iterator[Problem]:
    believed, there = len(node.gpus), len(facts.gpus)
    if believed > there:
        message = f"cluster.toml names {believed} GPU{'s' if believed > 1 else ''}, nvidia-smi shows {_names(facts) or 'none'}"
        yield Problem("fail", message, cards.edit(node, facts.gpus) if there else on_node(node, "lspci | grep -i nvidia"))
    for belief, card in cards.pairs(node.gpus, facts.gpus):
        if not same_card(belief.model, card.name):
            message = f'GPU {card.index} is a {short(card.name)}, not a "{belief.model}"'
            yield Problem("warn", message, cards.edit(node, facts.gpus))
        if card.memory_total_bytes is None:
            continue
        ratio = card.memory_total_bytes / (belief.vram_gb * GIB)
        if abs(ratio - 1) > VRAM_TOLERANCE:
            message = (
                f"GPU {card.index} has {binary_size(card.memory_total_bytes)}, cluster.toml says {belief.vram_gb:g}"
            )
            yield Problem("fail" if ratio < 1 else "warn", message, cards.edit(node, facts.gpus))


def _names(facts: Facts) -> str:
    return listed(short(card.name) for card in facts.gpus)


def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    if not node.gpus:
        others = [card.name for card in facts.amd_gpus]
        return f"CPU node ({listed(others)} is not used: training needs CUDA)" if others else "CPU node"
    shown = []
    for card in facts.gpus:
        free = "" if card.free_bytes is None else f", {binary_size(card.free_bytes)} free"
        shown.append(f"{short(card.name)}{free}")
    shown += [f"{short(card.name)} is left out" for card in facts.gpus_left_out]
    return "; ".join(shown)


SUBJECT = Subject(
    "gpu",
    "the cards are those of cluster.toml, well and free, and torch computes on them",
    (
        *gpu_driver.CHECKS,
        Check(
            "gpu.inventory", "the cards and their memory are those of cluster.toml", "fail", "gpu", of_node=inventory
        ),
        Check("gpu.memory", "nobody else fills the memory of the cards", "fail", "gpu", of_node=gpu_memory.memory),
        *torch_cuda.CHECKS,
        *gpu_health.CHECKS,
        *gpu_xid.CHECKS,
        Check("gpu.amd", "the cards of cluster.toml are NVIDIA's", "fail", "amd", of_node=amd),
        Check("gpu.mixed", "all nodes have a card, or none has", "warn", "gpu", of_cluster=mixed),
    ),
    _summary,
)
