"""Bytes that ranks hold at the peak of a step, measured storage by storage, beside what the plan says."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import material, ranks

from homelab.controller.config.recipe import Method, Train
from homelab.controller.planning.memory import division, rank_memory
from homelab.controller.planning.model.architecture import from_config
from homelab.shared.protocol.memory_items import EXCHANGED, GATHERED

RANKS = 3
_SHAPE = "small"
_SEQ_LEN, _MICRO_BATCH, _PASSES = 192, 2, 2
_LIMIT_S = 180.0
_COUNTED = (*rank_memory.SEEN_BY_A_DRY_RUN, GATHERED, EXCHANGED)


def measured(folder: Path) -> Iterator[dict[str, Any]]:
    """One measurement for each method, precision and strategy: the rank that held most, beside the plan."""
    model = material.model(folder / "model", _SHAPE, "float32")
    batch = RANKS * _MICRO_BATCH * _PASSES
    data = material.rows(folder / "rows.jsonl", [_SEQ_LEN] * (2 * batch))
    for kind, precision, strategy in itertools.product(("full", "lora"), ("bf16", "fp32"), ("ddp", "zero2", "zero3")):
        run = material.run(
            folder / f"{kind} {precision} {strategy}", model, data, method__kind=kind, train__global_batch=batch, train__seq_len=_SEQ_LEN,
            train__fused_loss=True, data__completion_only=False, train__gradient_checkpointing=kind == "full", checkpoint__keep=1,
        )  # fmt: skip
        shares = [_MICRO_BATCH * _PASSES] * RANKS
        material.plan(run, 1, shares, device="cpu", precision=precision, micro_batch=_MICRO_BATCH, strategy=strategy)
        peaks = _peaks(run)
        expected = _expected(kind, precision, strategy)
        material.remove(run, RANKS)
        held_bytes, plan_bytes = max(peak["peak_bytes"] for peak in peaks), sum(expected.values())
        yield {
            "what": "held", "method": kind, "precision": precision, "strategy": strategy, "held_bytes": held_bytes, "plan_bytes": plan_bytes,
            "error_percent": 100 * (plan_bytes / held_bytes - 1), "plan_items": expected, "ranks": peaks,
        }  # fmt: skip


def _peaks(run: Path) -> list[dict[str, Any]]:
    file = run / "held"
    ranks.checked(ranks.worker(run, 1, RANKS, program=("-m", "benchmarks.shards.rank", str(file))), _LIMIT_S)
    return [json.loads(file.with_name(f"{file.name}.{rank}").read_text()) for rank in range(RANKS)]


def _expected(kind: str, precision: str, strategy: str) -> dict[str, int]:
    """What `homelab plan` says, item by item, without the process."""
    shape = from_config(material.SHAPES[_SHAPE])
    assert shape is not None
    method = Method.model_validate({"kind": kind, "rank": 16, "alpha": 32, "targets": "all-linear"})
    train = Train(
        global_batch=12, steps=2, learning_rate=1e-3, seq_len=_SEQ_LEN, gradient_checkpointing=kind == "full", fused_loss=True, optimizer="adamw"
    )  # fmt: skip
    divided = division.of(strategy, [f"n{rank}" for rank in range(RANKS)])
    setup = rank_memory.RankSetup(precision, "cpu", _MICRO_BATCH, world_size=RANKS, division=divided)
    return {item.name: item.size_bytes for item in rank_memory.estimate(shape, method, train, setup) if item.name in _COUNTED}
