"""A run as the agents of three nodes would describe it, for looking at the dashboard and for testing it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from homelab.controller.dashboard.measured import Measured
from homelab.controller.dashboard.snapshot import Snapshot
from homelab.controller.dashboard.snapshot_builder import NodeAnswers, RunInfo, build, next_commands
from homelab.controller.planning.types import Plan
from homelab.controller.remote.poll_reply import parse_replies
from homelab.controller.run.ownership import Ownership
from homelab.shared.protocol.rank_messages import Metric
from homelab.shared.protocol.run_messages import Reply
from tests import builders

NOW = 1_795_268_700.0
RUN = "2026-11-21-1405-llama7b-lora"
CARDS = {
    "tower": ("NVIDIA GeForce RTX 5070 Ti", 16),
    "laptop": ("NVIDIA GeForce RTX 4070 Laptop GPU", 8),
    "old": ("NVIDIA GeForce GTX 1080 Ti", 11),
}
SHARES = {"tower": 18, "laptop": 9, "old": 6}


def metric_lines(rank: int, node: str, last_step: int, attempt: int = 1) -> list[dict[str, Any]]:
    """metrics.jsonl of one rank up to `last_step`."""
    lines: list[dict[str, Any]] = []
    for step in range(1, last_step + 1):
        loss = 1.1 + 1.3 * math.exp(-step / 120) + 0.05 * math.sin(step * 1.7) + 0.03 * math.sin(step * 0.31)
        compute_s = 3.1 + 0.2 * math.sin(step + rank)
        lines.append({
            "kind": "train", "time": NOW - (last_step - step) * 4.1, "attempt": attempt, "rank": rank, "node": node,
            "step": step, "epoch": step / 400, "loss": loss, "perplexity": math.exp(loss), "learning_rate": 2e-4,
            "grad_norm": 0.4, "tokens": 512 * SHARES[node], "samples": SHARES[node],
            "tokens_per_s": 512 * SHARES[node] / 4.1, "compute_s": compute_s - 0.15 * rank, "step_s": 4.1,
            "communication_s": 4.1 - compute_s + 0.15 * rank, "memory_bytes": 7 << 30, "share": SHARES[node],
        })  # fmt: skip
        if rank == 0 and step in (1, 200, 400):
            lines.append({
                "kind": "eval", "time": NOW, "attempt": attempt, "rank": 0, "step": step, "eval_loss": loss + 0.06,
                "eval_perplexity": math.exp(loss + 0.06),
            })  # fmt: skip
    return lines


def raw_reply(node: str, rank: int, step: int = 412, **run: Any) -> dict[str, Any]:
    """What the agent of one node answers; `run` replaces keys of its "run"."""
    card, vram_gb = CARDS[node]
    beat = {"time": NOW - 2.0, "rank": rank, "pid": 4242, "phase": "training", "step": step, "total_steps": 1000}
    return {
        "node": node, "time": NOW, "hostname": node,
        "load": {"cpu_percent": 12.0 + 9 * rank, "memory_used_bytes": 9 << 30, "memory_total_bytes": 32 << 30},
        "gpus": [{
            "index": 0, "name": card, "memory_total_bytes": vram_gb << 30,
            "memory_used_bytes": int((vram_gb - 1.7) * 2**30), "temperature_c": 66.0 + 11 * rank,
            "utilization_percent": 97.0 - 4 * rank,
        }],
        "run": {
            "name": RUN, "attempt": 1, "agent_alive": True, "torchrun_alive": True, "exit": None,
            "started_at": NOW - 1750.0, "torchrun_tail": [], "checkpoints": [350, 400], "final": False,
            "ranks": {str(rank): {
                "heartbeat": beat, "metrics": metric_lines(rank, node, step),
                "log_tail": {"stdout": [f"step {n} of 1000" for n in range(step - 30, step + 1)], "stderr": []},
                "error": None,
            }},
            **run,
        },
    }  # fmt: skip


def plan(attempt: int = 1) -> Plan:
    """The plan of the three nodes."""
    ranks = [
        builders.rank_plan(rank, node, device_name=CARDS[node][0], share=SHARES[node], micro_batch=2) for rank, node in enumerate(CARDS)
    ]
    return builders.plan(ranks, run=RUN, attempt=attempt, precision="fp16")


def replies(**changes: dict[str, Any]) -> dict[str, Reply]:
    """All three answers; `changes` maps a node to replaced keys of its "run"."""
    return parse_replies({node: raw_reply(node, rank, **changes.get(node, {})) for rank, node in enumerate(CARDS)})


EVENTS = (
    {"time": NOW - 1760, "what": "launched", "recipe": "llama7b-lora.toml", "nodes": ["tower", "laptop", "old"]},
    {"time": NOW - 1750, "what": "attempt 1 started", "head": "tower", "port": 29500, "shares": {"0": 18}},
)


def snapshot(**changes: Any) -> Snapshot:
    """The run in full swing; `changes` replace fields of RunInfo and NodeAnswers, `metrics` are lines of before, `expected_nodes` (names) those of the plan."""
    of_run: dict[str, Any] = {"name": RUN, "recipe": "qlora · Llama-2-7b · global batch 33", "plan": plan()}
    observed: dict[str, Any] = {"now": NOW, "replies": replies(), "events": EVENTS}
    diagnosis = changes.pop("diagnosis", None)
    before: Sequence[Metric] = changes.pop("metrics", ())
    of_run["owner"] = Ownership(changes.pop("supervisor", ""))
    expected = changes.pop("expected_nodes", None)
    fields = {field.name for field in dataclasses.fields(NodeAnswers)}
    observed |= {name: value for name, value in changes.items() if name in fields}
    of_run |= {name: value for name, value in changes.items() if name not in fields}
    if expected and of_run["plan"]:
        of_run["plan"] = of_run["plan"].model_copy(update={"nodes": tuple(node for node in of_run["plan"].nodes if node.name in expected)})
    newer = [line for reply in observed["replies"].values() if reply.run for rank in reply.run.ranks.values() for line in rank.metrics]
    observed["measured"] = Measured(
        {(line.kind, line.attempt, line.rank, line.step, line.message): line for line in (*before, *newer)}.values()
    )
    made = build(RunInfo(**of_run), NodeAnswers(**observed))
    following = next_commands(made.state, made.run, diagnosis)
    return made.model_copy(update={"diagnosis": diagnosis, "next_commands": following})
