"""The formulas and the dry run against a real card: recorded/memory_h100.json has the bytes that torch allocated at the peak of a step.

A step is `one_on_cuda` of scripts/benchmarks/memory.py. Its `dry_run_bytes` are what the dry run says of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.memory.rank_memory import RankSetup
from homelab.controller.planning.model.families import from_config
from homelab.shared.recipe import Method, Train

RECORDED = json.loads((Path(__file__).parent / "recorded" / "memory_h100.json").read_text(encoding="utf-8"))
# Two of 32 MiB on Hopper; a plan counts two of 8.125 MiB, which is what every other card has.
WORKSPACES = 2 * 32 * 2**20
BOUND = 0.03


def name_of(step: dict[str, Any]) -> str:
    used = [name for name in ("gradient_checkpointing", "fused_loss") if step[name]]
    return "-".join([step["method"], f"{step['rows']}x{step['seq_len']}", *used])


def settings_of(step: dict[str, Any]) -> dict[str, Any]:
    return {name: step[name] for name in ("seq_len", "gradient_checkpointing", "fused_loss")} | {"optimizer": RECORDED["optimizer"]}


@pytest.mark.parametrize("step", RECORDED["steps"], ids=name_of)
def test_formulas_and_recorded_dry_run_are_within_three_percent_of_the_card(step: dict[str, Any]) -> None:
    shape = from_config(RECORDED["model"])
    assert shape is not None
    items = rank_memory.estimate(
        shape, Method(kind=step["method"], rank=RECORDED["rank"]), Train(global_batch=8, steps=1, learning_rate=1e-3, **settings_of(step)),
        RankSetup(RECORDED["precision"], "cuda", step["rows"]),
    )  # fmt: skip
    estimated = sum(item.size_bytes for item in items if item.name in rank_memory.SEEN_BY_A_DRY_RUN)
    assert estimated + WORKSPACES == pytest.approx(step["allocated_bytes"], rel=BOUND)
    assert step["dry_run_bytes"] + WORKSPACES == pytest.approx(step["allocated_bytes"], rel=BOUND)


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [3, 9, 13, 16], ids=lambda number: name_of(RECORDED["steps"][number]))
def test_the_dry_run_says_what_is_recorded(number: int) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    from homelab.worker.tools.memory_dry_run import Situation, dry_run

    step = RECORDED["steps"][number]
    method = {"kind": step["method"], "rank": RECORDED["rank"], "alpha": 32, "dropout": 0.0, "targets": "all-linear", "backend": "auto"}
    situation = Situation("cuda", RECORDED["precision"], step["rows"], masked=step["rows"] > 1)
    said = dry_run(RECORDED["model"], method, settings_of(step) | {"seed": 1}, situation)
    assert said["peak_bytes"] == pytest.approx(step["dry_run_bytes"], rel=0.01), said["items"]
