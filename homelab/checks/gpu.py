"""gpu: the cards are those of cluster.toml, nobody else fills their memory, and torch can compute on them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from homelab import hardware
from homelab.checks import torch_cuda
from homelab.checks.commands import GIB, answered, binary_size, listed, on_node
from homelab.checks.evidence import Evidence, Finding
from homelab.config.cluster import Gpu, Node
from homelab.facts import Facts, GpuFacts
from homelab.planning.command import quote_words

ID = "gpu"
VRAM_TOLERANCE = 0.10  # an "8 GB" card answers 8188 MiB, a "24 GB" L4 with ECC 23034 MiB
_FEW_FREE_BYTES = GIB  # less does not even hold a CUDA context and a small model's step
_DESKTOP_BYTES = GIB  # what a desktop session takes without anybody's asking


def judge(evidence: Evidence) -> Iterator[Finding]:
    """fail where training cannot start or the owner counts on more than is there; warn where the file is merely wrong."""
    for node, facts in answered(evidence):
        found = list(_of_node(evidence, node, facts))
        yield from found or [Finding(ID, node.name, "ok", _summary(node, facts))]


def _of_node(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Finding]:
    if not node.gpus:
        if facts.gpus:
            yield Finding(
                ID,
                node.name,
                "warn",
                f"cluster.toml names no GPU here, but there is {_names(facts)}",
                _edit(node, facts),
            )
        return
    if facts.nvidia_smi == "missing":
        yield Finding(
            ID, node.name, "fail", "nvidia-smi is not there: no NVIDIA driver is installed", install_driver(node, facts)
        )
        return
    if facts.nvidia_smi != "ok":
        yield Finding(ID, node.name, "fail", f"nvidia-smi: {_first_line(facts.nvidia_smi)}", _mend_driver(node, facts))
        return
    yield from _against_belief(node, facts)
    for card in facts.gpus:
        yield from _memory(evidence, node, facts, card)
    if facts.gpus:
        for message, hint in torch_cuda.problems(evidence.recipe, node, facts, install_driver(node, facts)):
            yield Finding(ID, node.name, "fail", message, hint)


def _against_belief(node: Node, facts: Facts) -> Iterator[Finding]:
    believed, there = len(node.gpus), len(facts.gpus)
    if believed > there:
        message = f"cluster.toml names {believed} GPU{'s' if believed > 1 else ''}, nvidia-smi shows {_names(facts) or 'none'}"
        yield Finding(
            ID, node.name, "fail", message, _edit(node, facts) if there else on_node(node, "lspci | grep -i nvidia")
        )
    elif believed < there:
        yield Finding(
            ID, node.name, "warn", f"cluster.toml names {believed} of {there} GPUs: {_names(facts)}", _edit(node, facts)
        )
    for belief, card in _pairs(node.gpus, facts.gpus):
        if not same_card(belief.model, card.name):
            yield Finding(
                ID,
                node.name,
                "warn",
                f'GPU {card.index} is a {_short(card.name)}, not a "{belief.model}"',
                _edit(node, facts),
            )
        if card.memory_total_bytes is None:
            continue
        ratio = card.memory_total_bytes / (belief.vram_gb * GIB)
        if abs(ratio - 1) > VRAM_TOLERANCE:
            message = (
                f"GPU {card.index} has {binary_size(card.memory_total_bytes)}, cluster.toml says {belief.vram_gb:g}"
            )
            yield Finding(ID, node.name, "fail" if ratio < 1 else "warn", message, _edit(node, facts))


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


def _memory(evidence: Evidence, node: Node, facts: Facts, card: GpuFacts) -> Iterator[Finding]:
    total, used = card.memory_total_bytes, card.memory_used_bytes
    if total is None or used is None:
        return
    free = total - used
    if used <= max(_DESKTOP_BYTES, VRAM_TOLERANCE * total) and free >= _FEW_FREE_BYTES:
        return
    by = f" by {listed(card.holders)}" if card.holders else ""
    message = f"{binary_size(used)} of GPU {card.index}'s {binary_size(total)} is in use{by}"
    look = f"close what holds it; to see it: {on_node(node, 'nvidia-smi')}"
    hint = quote_words(["homelab", "stop", facts.runs_alive[0]]) if facts.runs_alive else look
    yield Finding(ID, node.name, "fail" if free < _FEW_FREE_BYTES else "warn", message, hint)


def install_driver(node: Node, facts: Facts) -> str:
    """The command that installs or renews the NVIDIA driver on this distribution."""
    command = "sudo ubuntu-drivers install" if "ubuntu" in facts.system.lower() else "sudo apt install nvidia-driver"
    return on_node(node, f"{command} && sudo reboot")


def _mend_driver(node: Node, facts: Facts) -> str:
    if "version mismatch" in facts.nvidia_smi.lower():  # the driver was updated under a running kernel module
        return on_node(node, "sudo reboot")
    return f"{on_node(node, 'sudo reboot')}; if that does not help: {install_driver(node, facts)}"


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


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "an error without words")[:200]


def _summary(node: Node, facts: Facts) -> str:
    if not node.gpus:
        return "CPU node"
    shown = []
    for card in facts.gpus:
        total, used = card.memory_total_bytes, card.memory_used_bytes
        free = "" if total is None or used is None else f", {binary_size(total - used)} free"
        shown.append(f"{_short(card.name)}{free}")
    return "; ".join(shown)
