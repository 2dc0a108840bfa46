"""What a node keeps of the wire: one line for each strategy and number of ranks, through runs of one rank and of others."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.planning.speed.speed_profiles import SpeedProfile
from homelab.shared.law.speed import Speed
from homelab.worker.balancing.balancer import Report
from homelab.worker.training import speed_profile
from tests.worker.runtime.test_card_memory import task


def speeds(strategy: str, world_size: int, sync_s: float | None, **more: Any) -> dict[str, Any]:
    return {
        "method": {"kind": "lora"}, "precision": "bf16", "device": "cpu", "backend": "transformers", "compress": "none", "bucket_mb": 25.0,
        "strategy": strategy, "world_size": world_size, "sync_s": sync_s, "wait_s": 0.0, "ranks": [], **more,
    }  # fmt: skip


def kept(path: Path) -> list[tuple[str, int, float]]:
    return [(sync["strategy"], sync["world_size"], sync["sync_s"]) for sync in json.loads(path.read_text())["syncs"]]


def test_the_wire_of_other_strategies_and_numbers_of_ranks_stays(tmp_path: Path) -> None:
    path = tmp_path / "speeds" / "model-lora.json"
    for strategy, ranks, sync_s in (("ddp", 2, 0.5), ("zero2", 2, 0.4), ("zero2", 3, 0.6), ("ddp", 2, 0.7), ("ddp", 1, None)):
        speed_profile.write(path, speeds(strategy, ranks, sync_s))
    assert kept(path) == [("ddp", 2, 0.7), ("zero2", 3, 0.6), ("zero2", 2, 0.4)]
    speed_profile.write(path, speeds("ddp", 3, 0.9, precision="fp32"))
    assert kept(path) == [("ddp", 3, 0.9)], "another precision is another training"


def test_the_planner_takes_the_file_of_a_rank_alone(tmp_path: Path) -> None:
    """It gathers with nobody, in no time: that is no wire."""
    path = tmp_path / "model-lora.json"
    for names in ("A", "BC", "A"):
        measured = speed_profile.Measurements(9, [1e-5] * 8, [0.0] * 8, [5, 6], save_s=None, evaluate_s=None, torch_version="2")
        content = speed_profile.content(task(*names), [Report(Speed(0.1, 0.1, 0.1), 10, 1.0, 1.0, 0.1)] * len(names), measured)
        assert content is not None
        speed_profile.write(path, content)
        kept_now = SpeedProfile.model_validate(json.loads(path.read_text()))
    assert [sync.world_size for sync in kept_now.syncs] == [2] and kept_now.world_size == 1 and kept_now.sync_s is None
    assert [sync["world_size"] for sync in json.loads(path.read_text())["syncs"]] == [2]


def test_a_spoilt_file_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "model-lora.json"
    for text in ("{", "[]", '{"syncs": 5}', json.dumps(speeds("ddp", 2, 0.1) | {"syncs": [{"strategy": "ddp"}]})):
        path.write_text(text)
        speed_profile.write(path, speeds("zero2", 2, 0.2))
        assert kept(path) == [("zero2", 2, 0.2)]


def test_short_runs_are_remembered_together(tmp_path: Path) -> None:
    """Each run once, however often it writes; a run of another precision knows nothing of them."""
    path = tmp_path / "model-lora.json"
    steps = speed_profile.LEAST_STEPS
    for name, precision, token_s in (
        ("one", "fp32", 0.1),
        ("one", "fp32", 0.2),
        ("two", "fp32", 0.4),
        ("one", "fp32", 0.3),
        ("three", "bf16", 0.5),
    ):
        measured = speed_profile.Measurements(steps, [], [], [5, 6], save_s=None, evaluate_s=None, torch_version="2")
        training = dataclasses.replace(task("A"), run_dir=tmp_path / "runs" / name)
        content = speed_profile.content(training, [Report(Speed(0.0, 0.0, token_s), 10, 1.0, 1.0, 0.1)], measured)
        assert content is not None
        speed_profile.write(path, content | {"precision": precision})
        ranks = SpeedProfile.model_validate(json.loads(path.read_text())).ranks
        if name == "one" and token_s == 0.3:
            assert [(run.run, run.token_s, run.steps) for run in ranks[0].runs] == [("one", 0.3, steps - 2), ("two", 0.4, steps - 2)]
            assert ranks[0].speed.token_s == pytest.approx(0.35)
    assert [run.run for run in ranks[0].runs] == ["three"]
