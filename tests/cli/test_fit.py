"""`homelab plan --fit` and the dry run of `homelab plan`: what they say, what they write, and that neither can spoil a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.config.load import load_recipe
from homelab.controller.features.preflight import memory_dry_run
from scripts.practice.desk import Desk
from tests.cli.conftest import complaint
from tests.controller.checks import healthy
from tests.controller.planning.memory import test_memory_dry_run as ranks

CARDS = """[cluster]
network = "10.0.0.0/24"
[[nodes]]
name = "tower"
host = "10.0.0.1"
lan_address = "10.0.0.1"
gpus = [{ model = "RTX 3060", vram_gb = 6 }]
"""
RECIPE = """# mine
[model]
name = "HuggingFaceTB/SmolLM3-3B"
[data]
train = "~/chats.jsonl"
[method]
kind = "qlora"     # 4 bits
[train]
global_batch = 8
steps = 2
learning_rate = 1e-4
seq_len = 4096     # long
fused_loss = false
"""
OFFLINE = ("--offline", "--cluster", "cards.toml")


@pytest.fixture
def small_card(quiet_desk: Desk) -> Desk:
    quiet_desk.write("cards.toml", CARDS)
    quiet_desk.write("long.toml", RECIPE)
    return quiet_desk


@pytest.mark.timeout(60)
def test_a_recipe_that_cannot_fit_is_made_to_fit(small_card: Desk, tmp_path: Path) -> None:
    found = complaint(small_card, "plan", "long.toml", *OFFLINE, code=2)
    assert "no rank has room for a row of 4096 tokens: rank 0 on tower lacks" in found["message"]
    assert "GB are free" in found["message"] and "--fit" in found["hint"] and "fused_loss" in found["hint"]
    said = small_card.homelab("plan", "long.toml", *OFFLINE, "--fit", code=0).stdout
    assert (
        "Written: long-fit.toml" in said
        and "Next: homelab plan long-fit.toml" in said
        and "[train] fused_loss = true (was false)" in said
        and "alters the training" in said
    )
    text = (tmp_path / "long-fit.toml").read_text()
    assert "# mine" in text and "# 4 bits" in text and "seq_len = 4096     # long" in text
    assert load_recipe(tmp_path / "long-fit.toml").train.fused_loss  # type: ignore[union-attr]
    small_card.homelab("plan", "long-fit.toml", *OFFLINE, code=0)
    assert "Every rank fits" in small_card.homelab("plan", "long-fit.toml", *OFFLINE, "--fit", code=0).stdout
    assert not (tmp_path / "long-fit-fit.toml").exists()
    again = complaint(small_card, "plan", "long.toml", *OFFLINE, "--fit", code=2)
    assert "not overwritten" in again["message"] and (tmp_path / "long-fit.toml").read_text() == text
    other = small_card.json("plan", "long.toml", *OFFLINE, "--fit", "--output", "other.toml", code=0)
    assert other["written"] == "other.toml" and other["mendings"][0]["alters_training"] is False
    assert (tmp_path / "other.toml").read_text() == text


@pytest.mark.timeout(60)
def test_where_nothing_helps(small_card: Desk, tmp_path: Path) -> None:
    small_card.write("cards.toml", CARDS.replace("vram_gb = 6", "vram_gb = 2"))
    found = complaint(small_card, "plan", "long.toml", *OFFLINE, "--fit", code=2)
    assert "no change of the recipe makes it fit" in found["message"] and "smaller model" in found["hint"]
    assert not (tmp_path / "long-fit.toml").exists()


class Node:
    """Stands where a Fleet and its agents are: one node that answers a dry run, or refuses."""

    def __init__(self, answer: dict[str, Any] | HomelabError) -> None:
        self.answer = answer
        self.request: dict[str, Any] = {}

    def agent(self, name: str) -> Node:
        return self

    def ask(self, verb: str, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        assert verb == "dry-run" and timeout_s > request["time_limit_s"]
        self.request = json.loads(json.dumps(request))
        if isinstance(self.answer, HomelabError):
            raise self.answer
        return self.answer


def test_a_dry_run_that_fails_is_a_warning_and_nothing_else() -> None:
    plan = ranks.plan((1, 8.0))
    evidence = healthy.packages(
        healthy.gpu(ranks.RECIPE, names=("tower",)), "tower", torch="2", transformers="5", peft="1", accelerate="1", bitsandbytes="1"
    )
    facts = {"n0": evidence.facts["tower"]}
    assert facts["n0"].model and facts["n0"].model.config, "the node knows the model's config"
    refusing = Node(HomelabError("the dry run did not end within 60 s"))
    after = memory_dry_run.improve(refusing, plan, ranks.RECIPE, facts, lambda text: None)  # type: ignore[arg-type]
    assert after.ranks == plan.ranks
    assert [warning for warning in after.warnings if "no dry run on n0" in warning and "60 s" in warning] == list(after.warnings)
    assert refusing.request["situations"] == [
        {"device": "cuda", "precision": "bf16", "micro_batch": 1, "seq_len": 1024, "masked": False, "repeats_keys": False}
    ]
    good = Node({"results": [ranks.result(plan, 0, 1.1)]})
    improved = memory_dry_run.improve(good, plan, ranks.RECIPE, facts, lambda text: None)  # type: ignore[arg-type]
    assert improved.ranks[0].memory and improved.ranks[0].memory.dry_run and not improved.warnings
