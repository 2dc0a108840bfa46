"""What would change with another card in the cluster, without a node, or with another wire: hypothetical machines for the planner. Nothing is executed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.base.hardware import CARDS, Card, lookup
from homelab.controller.base.units import decimal_size, gibibytes
from homelab.controller.config.cluster import Cluster, Gpu, Node
from homelab.controller.config.recipe import Recipe
from homelab.controller.facts.gpu import NvidiaFacts
from homelab.controller.facts.machine import ResourcesFacts, SystemFacts
from homelab.controller.facts.node import Facts
from homelab.controller.planning.inputs import Throughputs
from homelab.controller.planning.time import network_cost
from homelab.shared.protocol.card_messages import GpuFacts

_WHERE = "--what-if"
_LEAST_GBIT, _MOST_GBIT = 0.001, 800.0
_WIRE = re.compile(r"wire=(\d+(?:\.\d+)?)\s*([gm])bit(?:/s)?", re.IGNORECASE)
_ADD = re.compile(r"\+(?:(\d+)\s*x\s*)?(.+)")


@dataclass(frozen=True)
class Change:
    """`card` and `count`: one more machine with so many of these cards. `node`: without this node. `bytes_per_s`: the wire between all nodes."""

    text: str
    card: Card | None = None
    count: int = 1
    node: str | None = None
    bytes_per_s: float | None = None


def parse(texts: Sequence[str], cluster: Cluster, *, device: str) -> tuple[Change, ...]:
    """Read "+RTX3090", "+2xRTX3090" (one machine with two cards), "-laptop", "wire=2.5gbit". Raises InputError for cards and nodes that are not known.

    `device` is what the cluster trains on now.
    """
    changes = []
    names = [node.name for node in cluster.nodes]
    for text in texts:
        added = _ADD.fullmatch(text.strip())
        if text.strip().lower().startswith("wire"):
            changes.append(_wire(text))
        elif added is not None:
            changes.append(_added(text, int(added[1] or 1), added[2].strip(), device))
        elif text.strip().startswith("-") and text.strip()[1:]:
            name = text.strip()[1:]
            if name not in names:
                raise InputError(
                    f'no node is named "{name}".{did_you_mean(name, names)}',
                    where=f"{_WHERE} {text}",
                    hint=f"the nodes are: {', '.join(names)}",
                )
            changes.append(Change(text, node=name))
        else:
            near = f"+{text}" if lookup(text) else f"-{text}" if text in names else "+RTX3090"
            raise InputError(
                f'"{text}" names neither a machine to add nor a node to remove', where=_WHERE,
                hint=f"--what-if {near} (+CARD: one more machine with it; -NODE: without this node; wire=2.5gbit: another network)",
            )  # fmt: skip
    removed = {change.node for change in changes}
    if set(names) <= removed and not any(change.card for change in changes):
        raise InputError("no node is left to train on", where=_WHERE, hint=f"keep one of: {', '.join(names)}")
    return tuple(changes)


def apply(changes: Sequence[Change], cluster: Cluster, facts: Mapping[str, Facts]) -> tuple[Cluster, dict[str, Facts]]:
    """The cluster with these changes, and its facts: a new machine has all memory of its cards free, and 1 Gbit/s to the others."""
    removed = {change.node for change in changes if change.node}
    nodes = [node for node in cluster.nodes if node.name not in removed]
    changed_facts = {name: facts[name] for name in facts if name not in removed}
    for change in changes:
        if change.card is None:
            continue
        name = _free_name(change.card, [node.name for node in cluster.nodes] + [node.name for node in nodes])
        address = f"192.0.2.{len(nodes) % 254 + 1}"  # of the network that is kept for examples (RFC 5737): no connection is ever made to it
        gpu = Gpu(model=change.card.name, vram_gb=gibibytes(change.card.memory_bytes))
        nodes.append(Node(name=name, host=address, lan_address=address, interface="lan", gpus=(gpu,) * change.count))
        changed_facts[name] = _facts(name, change.card, change.count)
    left_out = (*cluster.left_out, *(node.name for node in cluster.nodes if node.name in removed))
    return cluster.model_copy(update={"nodes": tuple(nodes), "left_out": left_out}), changed_facts


def with_wire(
    changes: Sequence[Change], cluster: Cluster, facts: Mapping[str, Facts], throughputs: Throughputs
) -> tuple[dict[str, Facts], Throughputs]:
    """Facts and throughputs with the wire that is asked for, the same between all nodes. Seconds on the wire of earlier runs shrink or grow with it."""
    rate = next((change.bytes_per_s for change in changes if change.bytes_per_s), None)
    names = [node.name for node in cluster.nodes]
    if rate is None:
        return dict(facts), throughputs
    times = network_cost.wire_between(names, throughputs).bytes_per_s / rate
    pairs = {(source, target): rate for source in names for target in names if source != target}
    return {name: _with_sync(one, times) for name, one in facts.items()}, pairs


def assumed(changes: Sequence[Change], cluster: Cluster, throughputs: Throughputs) -> list[str]:
    """What a person should know of a wire that nobody has measured."""
    wire = network_cost.wire_between([node.name for node in cluster.nodes], throughputs)
    now = (
        f"measured now: {decimal_size(int(wire.bytes_per_s))}/s on the slowest pair"
        if wire.is_measured
        else "the present network was not measured: 1 Gbit/s is assumed"
    )
    return [
        f"{change.text} is assumed between all nodes, {decimal_size(int(change.bytes_per_s))}/s; {now}"
        for change in changes
        if change.bytes_per_s
    ]


def _wire(text: str) -> Change:
    match = _WIRE.fullmatch(text.strip())
    gbit = float(match[1]) / (1 if match[2].lower() == "g" else 1000) if match else 0.0
    if not _LEAST_GBIT <= gbit <= _MOST_GBIT:
        raise InputError(f'"{text}" is no wire', where=_WHERE, hint="--what-if wire=2.5gbit (or 100mbit, 1gbit, 10gbit)")
    return Change(text.strip(), bytes_per_s=gbit * network_cost.GIGABIT_BYTES_PER_S)


def _with_sync(facts: Facts, times: float) -> Facts:
    """The facts of a node whose file of measured speeds knows a wire that takes `times` as long, with every strategy and number of ranks."""
    profiles = facts.speed_profiles
    if profiles is None or not profiles.content:
        return facts
    content = _slower(profiles.content, times)
    if isinstance(content.get("syncs"), list):
        content["syncs"] = [_slower(sync, times) if isinstance(sync, dict) else sync for sync in content["syncs"]]
    return facts.model_copy(update={"speed_profiles": profiles.model_copy(update={"content": content})})


def _slower(measured: Mapping[str, Any], times: float) -> dict[str, Any]:
    sync_s = measured.get("sync_s")
    return {**measured, "sync_s": sync_s * times} if isinstance(sync_s, int | float) else {**measured}


def recipe_for(changes: Sequence[Change], recipe: Recipe) -> Recipe:
    """The recipe itself; where it divides the batch by a table, which no new machine can be in, with shares by speed."""
    if isinstance(recipe.parallel.shares, str) or not any(change.card for change in changes):
        return recipe
    return recipe.model_copy(update={"parallel": replace(recipe.parallel, shares="auto")})


def _added(text: str, count: int, name: str, device: str) -> Change:
    card = lookup(name)
    if card is None:
        names = {data_sheet.name.replace(" ", "").lower(): data_sheet.name for data_sheet in CARDS}
        near = did_you_mean(name.replace(" ", "").lower(), names)
        for short, full in names.items():
            near = near.replace(f'"{short}"', f'"{full}"')
        raise InputError(
            f'homelab has no data sheet of a card named "{name}".{near}',
            where=f"{_WHERE} {text}",
            hint="a name like RTX 3090 or RTX 4070 Laptop",
        )
    if device == "cpu":
        raise InputError(
            f"this cluster trains on CPUs: with a {card.name} it would train on that card alone, and speeds of CPUs and cards are not compared",
            where=f"{_WHERE} {text}", hint="--what-if -NODE shows the gain of a node; for a card, write a cluster file with nodes that have gpus = [...]",
        )  # fmt: skip
    if not 1 <= count <= 16:
        raise InputError(f"{count} cards in one machine", where=f"{_WHERE} {text}", hint=f"--what-if +2x{card.name.replace(' ', '')}")
    return Change(text, card=card, count=count)


def _free_name(card: Card, taken: Sequence[str]) -> str:
    name = f"new-{card.name.replace(' ', '-')}"
    return next(one for one in (name, *(f"{name}-{number}" for number in range(2, 1000))) if one not in taken)


def _facts(name: str, card: Card, count: int) -> Facts:
    cards = tuple(
        GpuFacts(index=index, name=card.name, memory_total_bytes=card.usable_bytes(), memory_used_bytes=0) for index in range(count)
    )
    return Facts(
        node=name,
        system=SystemFacts(time=0.0, hostname=name, home="/", cpu_count=8),
        resources=ResourcesFacts(workdir="/homelab"),
        gpu=NvidiaFacts(nvidia_smi="ok", cards=cards),
    )
