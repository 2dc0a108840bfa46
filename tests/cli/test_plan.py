"""`homelab plan` over real nodes: what they have measured, how their wire is, and what it would be without one of them."""

from __future__ import annotations

import json
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.config.load import load_cluster
from scripts.practice.desk import Desk
from tests.cli.conftest import LAW

pytestmark = pytest.mark.timeout(300)


def remember(desk: Desk, **changes: Any) -> list[Path]:
    """Both nodes have measured this recipe: the first is three times as fast as the second."""
    files = []
    for node, token_s in zip(load_cluster(desk.cluster).nodes, (1e-3, 3e-3), strict=True):
        file = Path(node.workdir) / "speeds" / "model-lora.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "schema": 1, "model": "/nowhere/model", "method": {"kind": "lora", "rank": 16, "targets": "all-linear"}, "precision": "fp32",
            "device": "cpu", "gradient_checkpointing": True, "fused_loss": True, "torch": version("torch"), "measured_at": time.time(),
            "run": "an-earlier-run", "world_size": 2, "sync_s": 0.2, "seq_len": 1024,
            "syncs": [{"strategy": "ddp", "compress": "none", "world_size": 2, "sync_s": 0.2}],
            "ranks": [{"local_rank": 0, "step_s": 0.0, "micro_batch_s": 0.0, "token_s": token_s}], **changes,
        }  # fmt: skip
        file.write_text(json.dumps(content))
        files.append(file)
    return files


def test_what_was_measured_is_planned_with(desk: Desk) -> None:
    files = remember(desk)
    try:
        desk.write("law.toml", LAW + "[parallel]\nmicro_batch = 1\n")
        first, second = (node.name for node in load_cluster(desk.cluster).nodes)
        found = desk.json("plan", "law.toml", code=1)  # the model is on no node: nobody can judge the memory
        assert [rank["speed"]["token_s"] for rank in found["ranks"]] == [1e-3, 3e-3] and found["balance"] == "measured"
        assert [rank["share"] for rank in found["ranks"]] == [6, 2]
        assert found["time"]["wire_s"] == 0.2 and found["time"]["wire_because"] == "measured by an earlier run"
        assert found["time"]["steps"] == 2 and found["time"]["hours"] > 0
        shown = desk.homelab("plan", "law.toml", "--why", code=1).stdout
        for words in ("tokens/s", "measured on", "an-earlier-run", "computing", "on the network"):
            assert words in shown, shown
        compared = desk.json("plan", "law.toml", "--what-if", f"-{second}", code=0)
        assert compared["after"]["nodes"] == [first] and compared["after"]["time"]["wire_s"] == 0
        curve = desk.json("plan", "law.toml", "--what-if-nodes", "1..3", code=0)
        assert {point["basis"] for point in curve["points"]} == {"guess"} and not found["time"]["is_measured"], (
            "nobody has counted the rows yet"
        )
        assert curve["like"] == second and curve["points"][0]["nodes"] == [first]
        assert curve["points"][1]["step_s"] == found["time"]["step_s"], "two machines are those that are there"
    finally:
        for file in files:
            file.unlink()


def test_a_damaged_file_is_a_warning_and_a_launch_may_raise_the_batch(desk: Desk) -> None:
    files = remember(desk)
    try:
        # 8 rows of 15 tokens are 0.1 s of computing, the wire takes 0.2 s: 18 times as many rows make it a tenth.
        desk.write("chats.jsonl", json.dumps({"messages": [{"role": "user", "content": "q" * 40}]}).ljust(59) + "\n")
        desk.write(
            "slow.toml", LAW.replace("global_batch = 8", "global_batch = 8\nglobal_batch_max = 1000").replace("steps = 2", "steps = 200")
        )
        launched = desk.json("launch", "slow.toml", "--dry-run", "--skip", "model", "--skip", "python", code=0)
        total = sum(rank["share"] for rank in launched["ranks"])
        assert total % 8 == 0 and 64 < total <= 1000 and any(warning.startswith("law: global_batch is") for warning in launched["warnings"])
        assert desk.json("plan", "slow.toml", code=1)["ranks"] == launched["ranks"], "what plan shows is what launch does"
        files[1].write_text("{")
        found = desk.json("plan", "slow.toml", code=1)
        assert any("damaged" in warning and "measured again" in warning for warning in found["warnings"])
        assert found["time"] is None and sum(rank["share"] for rank in found["ranks"]) == 8
    finally:
        for file in files:
            file.unlink()


def test_a_plan_may_come_before_its_data(quiet_desk: Desk) -> None:
    (quiet_desk.folder / "chats.jsonl").unlink(missing_ok=True)
    said = quiet_desk.homelab("plan", "law.toml", "--offline").stdout
    assert said.startswith("It may run: this file does not exist"), said
    (quiet_desk.folder / "chats.jsonl").mkdir()
    assert quiet_desk.homelab("plan", "law.toml", "--offline", code=1).stdout.startswith("It cannot run: this is not a file")
