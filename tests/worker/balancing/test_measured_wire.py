"""What a node keeps of the wire: one line for each strategy and number of ranks, through runs of one rank and of others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from homelab.worker.balancing import speed_profile


def speeds(strategy: str, world_size: int, sync_s: float | None, **more: Any) -> dict[str, Any]:
    return {
        "method": {"kind": "lora"}, "precision": "bf16", "device": "cpu", "backend": "transformers", "compress": "none", "bucket_mb": 25.0,
        "strategy": strategy, "world_size": world_size, "sync_s": sync_s, "wait_s": 0.0, **more,
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


def test_a_spoilt_file_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "model-lora.json"
    for text in ("{", "[]", '{"syncs": 5}', json.dumps(speeds("ddp", 2, 0.1) | {"syncs": [{"strategy": "ddp"}]})):
        path.write_text(text)
        speed_profile.write(path, speeds("zero2", 2, 0.2))
        assert kept(path) == [("zero2", 2, 0.2)]
