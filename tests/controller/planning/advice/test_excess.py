"""A plan says what its recipe asks for beyond what there is: rows longer than the model's rotary positions, more rows at once than a step has."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.planning.advice import excess
from tests.controller.checks import healthy
from tests.controller.planning.test_plan import make

SMALL = {**healthy.LLAMA, "max_position_embeddings": 8192}
LONG = {"global_batch": 8, "steps": 10, "learning_rate": 1e-3, "seq_len": 16_384}


def said(word: str, config: dict[str, Any] | None = None, **sections: Any) -> list[str]:
    """The lines of a plan with this word, where the nodes have a model with this config.json."""
    seen = healthy.cpu()
    for name in healthy.NAMES:
        model = {"found": True, "config": config} if config is not None else {"found": False, "config": None, "files": {}, "path": None}
        seen = healthy.with_facts(seen, name, model=model)
    return [line for line in make(seen, healthy.recipe(**sections)).warnings if word in line]


@pytest.mark.parametrize(("config", "name"), [(SMALL, "~/models/smol"), (None, "HuggingFaceTB/SmolLM2-135M")])
def test_rows_beyond_the_positions_are_said_with_both_edits(config: dict[str, Any] | None, name: str) -> None:
    (line,) = said("positions", config, train=LONG, model={"name": name})
    assert line.startswith("seq_len 16384 is beyond the 8192 positions that the model was trained with (max_position_embeddings)")
    assert "seq_len = 8192 or less" in line and '"rope_type": "yarn", "factor": 2.0 in its rope_parameters' in line
    assert said("positions", config, train={**LONG, "seq_len": 8192}, model={"name": name}) == []


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, 8192), ({"max_position_embeddings": None}, None), ({"max_position_embeddings": "8192"}, None), ({"max_position_embeddings": -1}, None),
        ({"max_position_embeddings": 1e30}, None), ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 32_768), ({"rope_scaling": [1]}, 8192),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, 8192), ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 512}}, 8192),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}}, 65_536),
        ({"model_type": "opt"}, None), ({"model_type": "gpt_neox", "rotary_pct": 0.25}, 8192), ({"model_type": "falcon", "rope_theta": 1e4, "alibi": True}, None),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_config_says_of_its_positions(keys: dict[str, Any], expected: int | None) -> None:
    assert excess.of_config({**SMALL, **keys}) == expected
    assert excess.of_config({"model_type": "composed", "text_config": {**SMALL, **keys}}) == expected


@pytest.mark.parametrize(("asked", "is_said"), [(512, True), (9, True), (8, False), ("auto", False)])
def test_more_rows_at_once_than_a_step_has_are_said_and_change_nothing(asked: Any, is_said: bool) -> None:
    train = {"global_batch": 8, "steps": 10, "learning_rate": 1e-3}
    lines = said("micro_batch", healthy.LLAMA, train=train, parallel={"micro_batch": asked})
    assert [
        f"micro_batch = {asked} is more rows than a step has (global_batch = 8)" in line and "micro_batch = 8 or less" in line
        for line in lines
    ] == [True] * is_said


@pytest.mark.parametrize(("rank", "is_said"), [(1024, True), (577, True), (576, False)])
def test_adapters_wider_than_the_model_are_said(rank: int, is_said: bool) -> None:
    lines = said("hidden_size", healthy.LLAMA, method={"kind": "lora", "rank": rank})
    assert [f"rank = {rank} is more than the model's hidden_size of 576" in line and "rank = 144 or less" in line for line in lines] == [
        True
    ] * is_said
