"""Clusters on which nothing is wrong, and the means to break one thing in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from homelab.checks.evidence import Evidence, Finding, Link
from homelab.config.cluster import Cluster
from homelab.config.recipe import Recipe
from homelab.facts import Facts
from homelab.planning.memory import HELD
from homelab.planning.model import MemoryEstimate, MemoryItem, Plan, RankPlan

NAMES = ("tower", "laptop", "oldtower")
MIB = 2**20
GIB = 2**30
PORT = 29500
LLAMA = {
    "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
}  # fmt: skip
SECTIONS: dict[str, Any] = {
    "model": {"name": "~/models/smol"},
    "data": {"train": "/data/train.jsonl"},
    "method": {"kind": "lora"},
    "train": {"global_batch": 12, "steps": 10, "learning_rate": 1e-3},
}
CARDS = {  # name as nvidia-smi answers, MiB in total, compute capability, name as the owner writes it, vram_gb
    "tower": ("NVIDIA GeForce RTX 5070 Ti", 16303, [12, 0], "RTX 5070 Ti", 16),
    "laptop": ("NVIDIA GeForce RTX 4070 Laptop GPU", 8188, [8, 9], "RTX 4070 Laptop", 8),
    "oldtower": ("NVIDIA GeForce RTX 3070 Ti", 8192, [8, 6], "3070ti", 8),
}
CODE_HASH = "0123456789abcdef"
MODEL_FILES = {
    "model.safetensors": {"size_bytes": 266_000_000, "sampled": "11" * 32, "sha256": None},
    "tokenizer.json": {"size_bytes": 3_500_000, "sampled": None, "sha256": "22" * 32},
}
ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


def recipe(**sections: Any) -> Recipe:
    """A small LoRA recipe with some sections replaced."""
    return Recipe.model_validate({**SECTIONS, **sections})


def script() -> Recipe:
    """A recipe that brings its own program."""
    return Recipe.model_validate({"script": {"path": "train.py"}})


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
    """Facts with some fields replaced, validated again."""
    return Facts.model_validate({**facts.model_dump(), **changes})


def packages(evidence: Evidence, node: str, **versions: str | None) -> Evidence:
    """The same evidence, where `node` has other package versions."""
    return with_facts(evidence, node, packages={**evidence.facts[node].packages, **versions})


def card(evidence: Evidence, node: str, **changes: Any) -> Evidence:
    """The same evidence, where the first card of `node` answers otherwise."""
    first, *rest = [entry.model_dump() for entry in evidence.facts[node].gpus]
    return with_facts(evidence, node, gpus=[{**first, **changes}, *rest])


def probe(evidence: Evidence, node: str, *, device: dict[str, Any] | None = None, **changes: Any) -> Evidence:
    """The same evidence, where torch on `node` answers otherwise; `device` changes its first card."""
    known = dict(evidence.facts[node].gpu_probe or {})
    devices = [{**entry, **(device or {})} for entry in known["devices"]]
    return with_facts(evidence, node, gpu_probe={**known, "devices": devices, **changes})


def with_node(evidence: Evidence, node: str, **changes: Any) -> Evidence:
    """The same evidence, where cluster.toml says something else of `node`."""
    nodes = [
        {**entry.model_dump(exclude_unset=True), **(changes if entry.name == node else {})}
        for entry in evidence.cluster.nodes
    ]
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
    planned = []
    for number, one in enumerate(ranks):
        items = [MemoryItem(name="base weights", size_bytes=round(one["need_gib"] * GIB))]
        items.append(MemoryItem(name=HELD, size_bytes=round(one.get("held_gib", 0.0) * GIB)))
        total = round(one["total_gib"] * GIB) if "total_gib" in one else None
        planned.append(RankPlan(
            rank=number, node=one["node"], local_rank=0, device_name="RTX 3070 Ti", share=4, micro_batch=one.get("micro_batch", 1),
            token_cap=one.get("token_cap"), memory=MemoryEstimate(items=tuple(items), available_bytes=total),
        ))  # fmt: skip
    return Plan(
        run="lora", attempt=1, world_size=len(planned), backend="nccl", device="cuda", precision="bf16", strategy="ddp", head=NAMES[0],
        master_address="192.168.1.100", master_port=PORT, resume_step=0, ranks=tuple(planned), nodes=(),
    )  # fmt: skip


def _evidence(of: Recipe | None, names: tuple[str, ...], *, with_gpus: bool) -> Evidence:
    nodes = []
    for number, name in enumerate(names):
        node: dict[str, Any] = {"name": name, "host": f"192.168.1.{100 + number}", "user": "me"}
        if with_gpus:
            node["gpus"] = [{"model": CARDS[name][3], "vram_gb": CARDS[name][4]}]
        nodes.append(node)
    cluster = Cluster.model_validate({"name": "home", "network": "192.168.1.0/24", "nodes": nodes}, strict=False)
    address = {node.name: node.host for node in cluster.nodes}
    links = tuple(
        Link(source, target, address[target], port, is_rendezvous=port == PORT, latency_ms=0.3)
        for source in names
        for target in names
        if source != target
        for port in ((41000, 41001, PORT) if target == names[0] else (41000, 41001))
    )
    on_nodes = (
        {"train": of.data.train}
        if of is not None and of.data is not None and of.data.train.startswith(("/", "~"))
        else {}
    )
    return Evidence(
        cluster=cluster, head=names[0], master_port=PORT,
        facts={name: _facts(name, address[name], with_gpus, of) for name in names},
        clock_offsets_s={name: 0.0 for name in names}, latencies_ms={name: 0.4 for name in names}, links=links,
        lan={name: (address[name], f"eth{number}") for number, name in enumerate(names)}, recipe=of, data=on_nodes,
        code_hash=CODE_HASH,
    )  # fmt: skip


def _facts(name: str, address: str, with_gpus: bool, of: Recipe | None) -> Facts:
    build = "+cu130" if with_gpus else "+cpu"
    facts: dict[str, Any] = {
        "node": name, "time": 1e9, "hostname": name, "user": "me", "home": "/home/me", "workdir": "/home/me/homelab",
        "system": "Debian GNU/Linux 12 (bookworm) x86_64", "cpu_count": 8,
        "memory_total_bytes": 16 * GIB, "memory_available_bytes": 12 * GIB,
        "python_executable": "/home/me/.homelab/env/bin/python", "python_version": "3.11.7",
        "packages": {
            "torch": f"2.13.0{build}", "transformers": "5.23.0", "peft": "0.19.0", "accelerate": "1.15.0", "bitsandbytes": "0.50.2",
            "datasets": "5.2.0", "tensorboard": "2.20.0", "safetensors": "0.7.0", "tokenizers": "0.23.0", "unsloth": None,
        },
        "interfaces": [
            {"name": "lo", "addresses": ["127.0.0.1/8"], "kind": "loopback", "mtu": 65536},
            {"name": f"eth{NAMES.index(name)}", "addresses": [f"{address}/24"], "mtu": 1500, "speed_mbit": 1000},
        ],
        "own_name_addresses": [address], "disk_free_bytes": 20 * 10**9, "disk_total_bytes": 100 * 10**9,
        "port": {"free": True}, "code_hash": CODE_HASH,
    }  # fmt: skip
    if of is not None and of.model is not None:
        facts["model"] = {
            "found": True, "path": "/home/me/models/smol", "config": LLAMA, "size_bytes": 270_000_000,
            "files": MODEL_FILES, "has_chat_template": True,
        }  # fmt: skip
    if of is not None and of.data is not None:
        facts["data"] = {"train": {"path": of.data.train, "found": True, "size_bytes": 5_000_000, "sha256": "ab" * 32}}
    if with_gpus:
        product, mebibytes, capability, _, _ = CARDS[name]
        facts |= {
            "torch_cuda": "13.0", "nccl": "2.29.7", "nvidia_smi": "ok", "driver_version": "580.95.05", "driver_cuda": "13.0",
            "gpus": [{
                "index": 0, "name": product, "memory_total_bytes": mebibytes * MIB, "memory_used_bytes": 300 * MIB,
                "compute_capability": f"{capability[0]}.{capability[1]}",
            }],
            "gpu_probe": {
                "torch": f"2.13.0{build}", "cuda_available": True, "arch_list": ARCHITECTURES,
                "devices": [{"name": product, "capability": capability, "bf16": True, "matmul_ok": True, "error": None}],
            },
        }  # fmt: skip
    return Facts.model_validate(facts)
