"""The one place of builders for tests: every default is valid, and what is built from another builder's defaults fits to them.

A test names only what it is about: `recipe(parallel={"shares": "equal"})`, `make_plan(recipe=...)`, `reply(step=7)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from homelab.controller.config.cluster import Cluster
from homelab.controller.config.recipe import Recipe, TrainRecipe, parse_recipe
from homelab.controller.facts.node import Facts
from homelab.controller.facts.reading import read
from homelab.controller.launchers import registry
from homelab.controller.planning import plan as planning
from homelab.controller.planning.inputs import PlanInputs
from homelab.controller.planning.memory_estimate import MemoryEstimate, MemoryItem
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.model.families import known
from homelab.controller.planning.types import NodePlan, Plan, RankPlan
from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.memory_items import HELD
from homelab.shared.protocol.run_messages import Reply

NAMES = ("tower", "laptop", "oldtower")
MOMENT = "1970-01-01T00:16:40+00:00"
RUN = "2026-01-01-0000-run"
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
MODEL_FILES: dict[str, dict[str, Any]] = {
    "model.safetensors": {"size_bytes": 266_000_000, "sampled": "11" * 32, "sha256": None},
    "tokenizer.json": {"size_bytes": 3_500_000, "sampled": None, "sha256": "22" * 32},
}
ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


_RECIPES = Path(__file__).parents[1] / "recipes"
PROJECT_SUITES = tuple(path for path in sorted((_RECIPES / "bench").glob("*.toml")) if path.read_text().count("\nrecipe = "))
PROJECT_RECIPES = tuple(path for path in sorted(_RECIPES.rglob("*.toml")) if path not in PROJECT_SUITES)


def recipe(**sections: Any) -> TrainRecipe:
    """A small LoRA recipe with some sections replaced."""
    return train_recipe({**SECTIONS, **sections})


def train_recipe(content: object) -> TrainRecipe:
    """A recipe that trains a model."""
    found = parse_recipe(content)
    assert isinstance(found, TrainRecipe)
    return found


def architecture(name: str) -> Architecture:
    """That of a model that the planner knows."""
    found = known(name)
    assert found is not None
    return found


def script_recipe(path: str = "train.py", **sections: Any) -> Recipe:
    """A recipe that brings its own program."""
    return parse_recipe({"script": {"path": path}, **sections})


def address_of(name: str) -> str:
    """The LAN address of a node."""
    return f"192.168.1.{100 + NAMES.index(name) if name in NAMES else 110 + sum(name.encode()) % 100}"


def cluster(names: Iterable[str] = NAMES, *, with_gpus: bool = False, **changes: Any) -> Cluster:
    """A home network of these nodes; `changes` replace keys of the cluster, `nodes` (name -> keys) those of its nodes."""
    of_nodes: Mapping[str, Mapping[str, Any]] = changes.pop("nodes", {})
    nodes = []
    for name in names:
        node: dict[str, Any] = {"name": name, "host": address_of(name), "user": "me"}
        if with_gpus:
            node["gpus"] = [{"model": CARDS[name][3], "vram_gb": CARDS[name][4]}]
        nodes.append({**node, **of_nodes.get(name, {})})
    return Cluster.model_validate({"name": "home", "network": "192.168.1.0/24", "nodes": nodes, **changes}, strict=False)


def make_plan(cluster: Cluster, recipe: Recipe, facts: Mapping[str, Facts], **inputs: Any) -> Plan:
    """The plan of `homelab launch` for these nodes; `inputs` replaces fields of `PlanInputs`."""
    return registry.rendered(planning.make(plan_inputs(cluster, recipe, facts, **inputs)))


def plan_inputs(cluster: Cluster, recipe: Recipe, facts: Mapping[str, Facts], **inputs: Any) -> PlanInputs:
    """What the first attempt of RUN is planned from."""
    return replace(PlanInputs(cluster, recipe, facts, RUN, PORT, code="code/abc", script="data/def/train.py"), **inputs)


def rank_plan(rank: int, node: str, **fields: Any) -> RankPlan:
    """One rank of a plan that was not made by the planner."""
    return RankPlan(**{"rank": rank, "node": node, "local_rank": 0, "device_name": "RTX 3070 Ti", "share": 4, "micro_batch": 1, **fields})


def node_plan(number: int, name: str, *, run: str = RUN, **fields: Any) -> NodePlan:
    """The part of one node in a plan that was not made by the planner."""
    return NodePlan(**{
        "name": name, "node_rank": number, "lan_address": f"192.168.1.{100 + number}", "interface": "eth0", "rank_count": 1,
        "workdir": "/home/me/homelab", "run_dir": f"/home/me/homelab/runs/{run}", "environment": {}, "command": ("true",), **fields,
    })  # fmt: skip


def plan(ranks: Iterable[RankPlan] | None = None, **fields: Any) -> Plan:
    """A plan of these ranks (by default one on each of NAMES) as if it came from a file: nothing in it was computed."""
    ranks = tuple(rank_plan(number, name) for number, name in enumerate(NAMES)) if ranks is None else tuple(ranks)
    names = list(dict.fromkeys(rank.node for rank in ranks))
    run = fields.get("run", RUN)
    return Plan(**{
        "run": run, "attempt": 1, "world_size": len(ranks), "backend": "nccl", "device": "cuda", "precision": "bf16", "strategy": "ddp",
        "head": names[0] if names else NAMES[0], "master_address": "192.168.1.100", "master_port": PORT, "resume_step": 0, "ranks": ranks,
        "nodes": tuple(node_plan(number, name, run=run) for number, name in enumerate(names)), **fields,
    })  # fmt: skip


def memory(need_gib: float, *, total_gib: float | None = None, held_gib: float = 0.0) -> MemoryEstimate:
    """What a rank needs of a card and what others hold there, in GiB; without `total_gib` nobody knows the card's size."""
    items = (
        MemoryItem(name="base weights", size_bytes=round(need_gib * GIB)), MemoryItem(name=HELD, size_bytes=round(held_gib * GIB)),
    )  # fmt: skip
    return MemoryEstimate(items=items, available_bytes=None if total_gib is None else round(total_gib * GIB))


def raw_reply(
    node: str = NAMES[0], *, rank: int = 0, step: int = 7, phase: str = "training", age_s: float = 0.0, now_s: float = 1000.0, **run: Any
) -> dict[str, Any]:
    """What a node answers to `poll`: one rank at `step` that gave a sign of life `age_s` ago; `run` replaces keys of its "run"."""
    heartbeat = {"time": now_s - age_s, "phase": phase, "step": step}
    its_run = {
        "name": "r",
        "attempt": 1,
        "agent_alive": True,
        "torchrun_alive": True,
        "ranks": {str(rank): {"heartbeat": heartbeat, "metrics": []}},
    }
    return {"node": node, "time": now_s, "run": {**its_run, **run}}


def reply(node: str = NAMES[0], **changes: Any) -> Reply:
    """`raw_reply`, as the controller reads it."""
    return read(Reply, raw_reply(node, **changes))


def raw_status(*, rank: int = 0, step: int = 7, phase: str = "training", state: str = "S", **status: Any) -> dict[str, Any]:
    """What a node says while it is followed: one rank at work at `step`; `status` replaces keys of the line."""
    its_rank = {"pid": 7, "state": state, "phase": phase, "step": step, "still_s": 0.0, "step_still_s": 0.0, "error": False}
    return {
        "attempt": 1, "newest": 1, "started": True, "stopping": False, "agent": "S", "torchrun": "S", "exit": None, "checkpoint": 0,
        "ranks": {str(rank): its_rank}, "missing_s": {}, **status,
    }  # fmt: skip


def raw_end(returncode: int = 0, **changes: Any) -> dict[str, Any]:
    """`raw_status` of a node on which torchrun has ended."""
    phase = "done" if returncode == 0 else "training"
    return raw_status(**{"phase": phase, "state": "", "agent": "", "torchrun": "", "exit": {"returncode": returncode}, **changes})


def run_folder(parent: Path, name: str = RUN, *, recipe: Recipe | None = None, plan: Plan | None = None, **described: Any) -> RunPaths:
    """A run's folder on the controller as a launch leaves it: run.json with this recipe, and the plan of its attempt, if there is one."""
    paths = RunPaths(parent / name)
    law = (recipe or script_recipe()).model_dump(mode="json", exclude_unset=True)
    store.write_json(
        paths.run_json,
        {
            "schema": 1,
            "name": name,
            "created_at": 1000.0,
            "moment": MOMENT,
            "rows": 2,
            "draws": 2,
            "experts_in_4_bits": True,
            "recipe_file": "recipe.toml",
            "recipe": law,
            "data": {},
            **described,
        },
    )
    if plan is not None:
        store.write_json(paths.plan_json(plan.attempt), plan.model_dump(mode="json"))
    return paths


def facts(name: str = NAMES[0], *, with_gpus: bool = False, recipe: Recipe | None = None, **changes: Any) -> Facts:
    """What a well node says of itself, and of the model and the data of `recipe`; `changes` replaces what a probe answers."""
    address = address_of(name)
    build = "+cu130" if with_gpus else "+cpu"
    fields: dict[str, Any] = {
        "node": name,
        "system": {
            "time": 1e9, "hostname": name, "user": "me", "home": "/home/me", "os": "Debian GNU/Linux 12 (bookworm) x86_64",
            "cpu_count": 8, "memory_total_bytes": 16 * GIB, "memory_available_bytes": 12 * GIB,
        },
        "resources": {"workdir": "/home/me/homelab", "disk_free_bytes": 20 * 10**9, "disk_total_bytes": 100 * 10**9},
        "python": {
            "executable": "/home/me/.homelab/env/bin/python", "version": "3.11.7", "code_hash": CODE_HASH,
            "packages": {
                "torch": f"2.13.0{build}", "transformers": "5.23.0", "peft": "0.19.0", "accelerate": "1.15.0", "bitsandbytes": "0.50.2",
                "datasets": "5.2.0", "tensorboard": "2.20.0", "safetensors": "0.7.0", "tokenizers": "0.23.0", "unsloth": None,
            },
        },
        "network": {
            "interfaces": [
                {"name": "lo", "addresses": ["127.0.0.1/8"], "kind": "loopback", "mtu": 65536},
                {"name": f"eth{NAMES.index(name) if name in NAMES else 0}", "addresses": [f"{address}/24"], "mtu": 1500, "speed_mbit": 1000},
            ],
            "own_name_addresses": [address], "port": {"free": True},
        },
    }  # fmt: skip
    if isinstance(recipe, TrainRecipe):
        fields["model"] = {
            "found": True, "path": "/home/me/models/smol", "config": LLAMA, "size_bytes": 270_000_000,
            "files": MODEL_FILES, "has_chat_template": True,
        }  # fmt: skip
        fields["data"] = {"train": {"path": recipe.data.train, "found": True, "size_bytes": 5_000_000, "sha256": "ab" * 32}}
    if with_gpus:
        product, mebibytes, capability, _, _ = CARDS[name]
        fields["python"] |= {"torch_cuda": "13.0", "nccl": "2.29.7"}
        fields["gpu"] = {
            "nvidia_smi": "ok", "driver_version": "580.95.05", "driver_cuda": "13.0",
            "cards": [{
                "index": 0, "name": product, "memory_total_bytes": mebibytes * MIB, "memory_used_bytes": 300 * MIB,
                "compute_capability": f"{capability[0]}.{capability[1]}",
            }],
            "torch": {
                "torch": f"2.13.0{build}", "cuda_available": True, "arch_list": ARCHITECTURES,
                "devices": [{"name": product, "capability": capability, "bf16": True, "matmul_ok": True, "error": None}],
            },
        }  # fmt: skip
    return Facts.model_validate({**fields, **changes})
