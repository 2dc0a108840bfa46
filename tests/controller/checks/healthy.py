"""Clusters on which nothing is wrong, and the means to break one thing in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from homelab.controller.base import hardware
from homelab.controller.checks.evidence import Evidence, Finding, Link
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.recipe import Recipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.types import Plan
from homelab.shared.protocol.message import as_json
from tests import builders
from tests.builders import CARDS, CODE_HASH, GIB, LLAMA, MIB, MODEL_FILES, NAMES, PORT, SECTIONS, recipe

__all__ = ["CARDS", "CODE_HASH", "GIB", "LLAMA", "MIB", "MODEL_FILES", "NAMES", "PORT", "SECTIONS", "recipe"]
script = builders.script_recipe


def cpu(of: Recipe | None = None, names: tuple[str, ...] = NAMES) -> Evidence:
    """Nodes without GPUs, all well."""
    return _evidence(of, names, with_gpus=False)


def gpu(of: Recipe | None = None, names: tuple[str, ...] = NAMES) -> Evidence:
    """One card of another kind in each node, all well."""
    return _evidence(of, names, with_gpus=True)


def with_facts(evidence: Evidence, node: str, **changes: Any) -> Evidence:
    """The same evidence, where `node` says something else of itself."""
    return replace(evidence, facts={**evidence.facts, node: changed(evidence.facts[node], **changes)})


def changed(facts: Facts, **changes: Any) -> Facts:
    """Facts with some fields replaced, validated again: of a probe that always answers only those that are named, of another one all."""
    answer = facts.model_dump()
    for probe, fields in changes.items():
        is_merged = isinstance(fields, dict) and isinstance(Facts.model_fields[probe].default, BaseModel)
        answer[probe] = {**answer[probe], **fields} if is_merged else fields
    return Facts.model_validate(answer)


def packages(evidence: Evidence, node: str, **versions: str | None) -> Evidence:
    """The same evidence, where `node` has other package versions."""
    return with_facts(evidence, node, python={"packages": {**evidence.facts[node].python.packages, **versions}})


def card(evidence: Evidence, node: str, **changes: Any) -> Evidence:
    """The same evidence, where the first card of `node` answers otherwise. One of another name is of that card's generation."""
    first, *rest = [as_json(entry) for entry in evidence.facts[node].gpu.cards]
    if "name" not in changes:
        return with_facts(evidence, node, gpu={"cards": [{**first, **changes}, *rest]})
    capability = changes.get("compute_capability", ".".join(map(str, hardware.generation(changes["name"]) or ())) or None)
    device = {"name": changes["name"], "capability": [int(number) for number in capability.split(".")] if capability else []}
    return probe(
        with_facts(evidence, node, gpu={"cards": [{**first, **changes, "compute_capability": capability}, *rest]}), node, device=device
    )


def probe(evidence: Evidence, node: str, *, device: dict[str, Any] | None = None, **changes: Any) -> Evidence:
    """The same evidence, where torch on `node` answers otherwise; `device` changes its first card."""
    known = dict(evidence.facts[node].gpu.torch or {})
    devices = [{**entry, **(device or {})} for entry in known["devices"]]
    return with_facts(evidence, node, gpu={"torch": {**known, "devices": devices, **changes}})


def with_node(evidence: Evidence, node: str, **changes: Any) -> Evidence:
    """The same evidence, where cluster.toml says something else of `node`."""
    nodes = [{**entry.model_dump(exclude_unset=True), **(changes if entry.name == node else {})} for entry in evidence.cluster.nodes]
    data = {**evidence.cluster.model_dump(exclude={"nodes"}), "nodes": nodes}
    return replace(evidence, cluster=Cluster.model_validate(data, strict=False))


def unreachable(evidence: Evidence, node: str, error: Any) -> Evidence:
    """The same evidence without an answer of `node`."""
    facts = {name: facts for name, facts in evidence.facts.items() if name != node}
    links = tuple(link for link in evidence.links if node not in (link.source, link.target))
    return replace(evidence, facts=facts, unreachable={node: error}, links=links)


def cut(evidence: Evidence, *pairs: tuple[str, str], error: str = "no answer within 2 s", only: str = "") -> Evidence:
    """The same evidence, where the dials of these (source, target) pairs failed; `only` "rendezvous" or "ephemeral" ports."""

    def broken(link: Link) -> Link:
        meant = not only or link.is_rendezvous == (only == "rendezvous")
        if (link.source, link.target) in pairs and meant:
            return replace(link, latency_ms=None, error=error)
        return link

    return replace(evidence, links=tuple(broken(link) for link in evidence.links))


def bad(findings: list[Finding]) -> list[Finding]:
    """Those that are not ok."""
    return [finding for finding in findings if finding.level != "ok"]


def plan(ranks: list[dict[str, Any]]) -> Plan:
    """A plan with these ranks: {"node", "need_gib", "held_gib", "total_gib", "micro_batch", "token_cap"}; without total_gib nobody knows it."""
    return builders.plan(
        [
            builders.rank_plan(
                number, one["node"], micro_batch=one.get("micro_batch", 1), token_cap=one.get("token_cap"),
                memory=builders.memory(one["need_gib"], total_gib=one.get("total_gib"), held_gib=one.get("held_gib", 0.0)),
            )
            for number, one in enumerate(ranks)
        ],
        run="lora", nodes=(),
    )  # fmt: skip


def _evidence(of: Recipe | None, names: tuple[str, ...], *, with_gpus: bool) -> Evidence:
    cluster = builders.cluster(names, with_gpus=with_gpus)
    address = {node.name: node.host for node in cluster.nodes}
    links = tuple(
        Link(source, target, address[target], port, is_rendezvous=port == PORT, latency_ms=0.3)
        for source in names
        for target in names
        if source != target
        for port in ((41000, 41001, PORT) if target == names[0] else (41000, 41001))
    )
    on_nodes = {"train": of.data.train} if of is not None and of.data is not None and of.data.train.startswith(("/", "~")) else {}
    return Evidence(
        cluster=cluster, head=names[0], master_port=PORT,
        facts={name: builders.facts(name, with_gpus=with_gpus, recipe=of) for name in names},
        clock_offsets_s=dict.fromkeys(names, 0.0), latencies_ms=dict.fromkeys(names, 0.4), links=links,
        lan={name: (address[name], f"eth{number}") for number, name in enumerate(names)}, recipe=of, data=on_nodes,
        code_hash=CODE_HASH,
    )  # fmt: skip
