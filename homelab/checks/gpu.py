"""gpu: the cards are those of cluster.toml, nobody else fills their memory, and torch can compute on them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from homelab import hardware
from homelab.checks import gpu_driver, gpu_health, gpu_memory, gpu_xid, torch_cuda
from homelab.checks.check import Check, Problem, Subject
from homelab.checks.commands import GIB, answered, binary_size, listed, on_node
from homelab.checks.evidence import Evidence
from homelab.config.cluster import Gpu, Node
from homelab.facts import Facts, GpuFacts

VRAM_TOLERANCE = 0.10  # an "8 GB" card answers 8188 MiB, a "24 GB" L4 with ECC 23034 MiB


def inventory(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """Count, names and memory against cluster.toml: fail where the owner counts on more than is there, else warn."""
    if facts.nvidia_smi != "ok":
        return
    if node.gpus:
        yield from _against_belief(node, facts)
    elif facts.gpus:
        message = f"cluster.toml names no GPU here, but there is {_names(facts)}: a plan uses it, and leaves nodes without a card out"
        yield Problem("warn", message, _edit(node, facts))


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
        yield Problem("fail", message, _edit(node, facts) if there else on_node(node, "lspci | grep -i nvidia"))
    elif believed < there:
        message = f"cluster.toml names {believed} of {there} GPUs: {_names(facts)}"
        yield Problem("warn", message, _edit(node, facts))
    for belief, card in _pairs(node.gpus, facts.gpus):
        if not same_card(belief.model, card.name):
            message = f'GPU {card.index} is a {_short(card.name)}, not a "{belief.model}"'
            yield Problem("warn", message, _edit(node, facts))
        if card.memory_total_bytes is None:
            continue
        ratio = card.memory_total_bytes / (belief.vram_gb * GIB)
        if abs(ratio - 1) > VRAM_TOLERANCE:
            message = (
                f"GPU {card.index} has {binary_size(card.memory_total_bytes)}, cluster.toml says {belief.vram_gb:g}"
            )
            yield Problem("fail" if ratio < 1 else "warn", message, _edit(node, facts))


def _pairs(beliefs: tuple[Gpu, ...], cards: tuple[GpuFacts, ...]) -> list[tuple[Gpu, GpuFacts]]:
    """Each card the owner named with the one that is meant: the same name first, what is left in order."""
    left_beliefs, left_cards = list(beliefs), list(cards)
    pairs = []
    for belief in beliefs:
        card = next((card for card in left_cards if same_card(belief.model, card.name)), None)
        if card is not None:
            pairs.append((belief, card))
            left_beliefs.remove(belief)
            left_cards.remove(card)
    return pairs + list(zip(left_beliefs, left_cards, strict=False))


def same_card(believed: str, answered_name: str) -> bool:
    """Whether the owner's name and nvidia-smi's mean one card: "3070ti" is "NVIDIA GeForce RTX 3070 Ti", not its laptop part.

    Memory sizes in the name do not count here (they are compared in bytes). Cards that the table does not know match when
    every word of the owner is in the driver's name.
    """
    first, second = hardware.lookup(believed), hardware.lookup(answered_name)
    if first and second:
        return _without_size(first.name) == _without_size(second.name)
    words = re.findall(r"[a-z]+|\d+", _without_size(believed).lower())
    answered_words = re.findall(r"[a-z]+|\d+", answered_name.lower())
    return all(word in answered_words for word in words)


def _without_size(name: str) -> str:
    return re.sub(r"\s*\b\d+\s*GB\b", "", name, flags=re.IGNORECASE).removesuffix(" PCIe")


def _edit(node: Node, facts: Facts) -> str:
    """The line of cluster.toml that says what is there."""
    believed = {card.index: belief for belief, card in _pairs(node.gpus, facts.gpus)}
    entries = []
    for card in facts.gpus:
        if card.memory_total_bytes is not None:
            vram = f"{round(card.memory_total_bytes / GIB)}"
        else:
            known = hardware.lookup(card.name)
            belief = believed.get(card.index)
            vram = f"{belief.vram_gb:g}" if belief else f"{round(known.memory_bytes / GIB) if known else '?'}"
        entries.append(f"{{ model = {json.dumps(_short(card.name))}, vram_gb = {vram} }}")
    return f"edit cluster.toml, node {node.name}: gpus = [{', '.join(entries)}]"


def _short(name: str) -> str:
    return re.sub(r"^(NVIDIA\s+)?(GeForce\s+)?|\s+GPU$", "", name)


def _names(facts: Facts) -> str:
    return listed(_short(card.name) for card in facts.gpus)


def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    if not node.gpus:
        others = [card.name for card in facts.amd_gpus]
        return f"CPU node ({listed(others)} is not used: training needs CUDA)" if others else "CPU node"
    shown = []
    for card in facts.gpus:
        free = "" if card.free_bytes is None else f", {binary_size(card.free_bytes)} free"
        shown.append(f"{_short(card.name)}{free}")
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
