"""What makes a training fit: the smallest changes first, those that leave the training alone before all others; and their writing."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from homelab.controller.base.errors import InputError
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.planning.memory import recipe_edits, scenario
from homelab.controller.planning.memory.recipe_edits import Edit
from homelab.controller.planning.memory.scenario import MemoryScenario, RankMemory
from tests import builders

LLAMA_7B, SMOLLM3 = builders.architecture("meta-llama/Llama-2-7b-hf"), builders.architecture("HuggingFaceTB/SmolLM3-3B")
assert LLAMA_7B and SMOLLM3
GB = 10**9


def recipe(**changes: Any) -> TrainRecipe:
    content: dict[str, Any] = {
        "model": {"name": "HuggingFaceTB/SmolLM3-3B"}, "data": {"train": "hub:a/b"}, "method": {"kind": "qlora", "rank": 16},
        "train": {"global_batch": 8, "steps": 10, "learning_rate": 1e-4, "seq_len": 2048, "fused_loss": False}, "parallel": {},
    }  # fmt: skip
    for name, value in changes.items():
        section, key = name.split("__")
        content[section][key] = value
    return builders.train_recipe(content)


def on(*gigabytes: float, shape: Any = SMOLLM3, held: float = 0.0) -> MemoryScenario:
    places = tuple(RankMemory(rank, f"node{rank}", round(size * GB), round(held * GB)) for rank, size in enumerate(gigabytes))
    return MemoryScenario(shape, "bf16", "cuda", max(2, len(gigabytes)), places)


def keys(mending: recipe_edits.RecipeFix) -> tuple[str, ...]:
    return tuple(edit.key for edit in mending.edits)


def test_nothing_is_changed_where_everything_fits() -> None:
    assert recipe_edits.fixes(recipe(), on(24, 24)) == ()
    assert scenario.token_cap(recipe(), on(24), on(24).ranks[0]) is None


def test_what_leaves_the_training_alone_comes_first() -> None:
    ways = recipe_edits.fixes(recipe(), on(6.5))
    assert keys(ways[0]) == ("fused_loss",) and not ways[0].alters_training
    # 2048 x 128256 logits of 12 bytes, less a layer's work that has the same room later.
    assert 2.0 < ways[0].gain_bytes / GB < 3.2
    assert any(keys(way) == ("seq_len",) and way.alters_training for way in ways)
    kinds = [way.alters_training for way in ways]
    assert kinds == sorted(kinds)
    assert "saves 3." in str(ways[0]) and "same training" in str(ways[0]) and "[train] fused_loss = true (was false)" in str(ways[0])


def test_pairs_where_no_single_change_is_enough() -> None:
    asked = recipe(train__gradient_checkpointing=False)
    ways = recipe_edits.fixes(asked, on(6.5))
    assert set(keys(ways[0])) == {"fused_loss", "gradient_checkpointing"} and not ways[0].alters_training
    assert recipe_edits.fixes(recipe_edits.changed(asked, ways[0].edits), on(6.5)) == ()


def test_sixteen_bit_weights_are_quantised() -> None:
    """In 8 bits where that is enough, else in 4; a recipe with the one can be changed to the other."""
    eight, four = recipe_edits.fixes(recipe(method__kind="lora", train__fused_loss=True), on(6.5))[:2]
    assert (keys(eight), keys(four)) == (("base",), ("kind",)) and eight.alters_training and eight.gain_bytes < four.gain_bytes
    ways = recipe_edits.fixes(recipe(method__kind="lora", train__fused_loss=True), on(4.5))
    assert ways and all("kind" in keys(way) and "base" not in keys(way) for way in ways)
    ways = recipe_edits.fixes(recipe(method__kind="lora", method__base="8bit", train__fused_loss=True), on(4.5))
    assert ways and all({"kind", "base"} <= set(keys(way)) for way in ways)


def test_every_place_must_fit_and_the_worst_counts() -> None:
    assert keys(recipe_edits.fixes(recipe(), on(24, 6.5))[0]) == ("fused_loss",)
    assert recipe_edits.fixes(recipe(), on(24, 1.0)) == ()


def test_a_named_micro_batch_is_made_smaller_before_anything_else() -> None:
    ways = recipe_edits.fixes(recipe(parallel__micro_batch=4), on(12.5))
    assert all(not way.alters_training for way in ways[:2])
    smaller = next(way for way in ways if keys(way) == ("micro_batch",))
    assert smaller.edits[0].value in (1, 2)


@settings(deadline=None, max_examples=40)
@given(size=st.floats(0.5, 20), checkpointing=st.booleans(), kind=st.sampled_from(["qlora", "lora", "full"]), seq_len=st.integers(8, 8192))
def test_mendings_mend_and_are_minimal(size: float, checkpointing: bool, kind: str, seq_len: int) -> None:
    asked = recipe(train__gradient_checkpointing=checkpointing, method__kind=kind, train__seq_len=seq_len)
    situation = on(size)
    for way in recipe_edits.fixes(asked, situation):
        place = situation.ranks[0]
        before = scenario.needed_bytes(asked, situation, place)
        after = scenario.needed_bytes(recipe_edits.changed(asked, way.edits), situation, place)
        assert before > place.available_bytes >= after and before - after == way.gain_bytes
        for edit in way.edits:
            fewer = [other for other in way.edits if other != edit]
            assert scenario.needed_bytes(recipe_edits.changed(asked, fewer), situation, place) > place.available_bytes


@settings(deadline=None)
@given(size=st.floats(1.0, 12), seq_len=st.integers(8, 16384))
def test_the_cap_is_the_longest_row_that_fits(size: float, seq_len: int) -> None:
    asked, situation = recipe(train__seq_len=seq_len), on(size)
    place = situation.ranks[0]
    cap = scenario.token_cap(asked, situation, place)

    def fits(tokens: int) -> bool:
        return scenario.needed_bytes(asked, situation, place, tokens=tokens) <= place.available_bytes

    if cap is None:
        assert fits(seq_len)
    elif cap == 0:
        assert not fits(scenario.SHORTEST_ROW)
    else:
        assert scenario.SHORTEST_ROW <= cap < seq_len and fits(cap) and not fits(cap + 1)


def test_what_others_hold_counts() -> None:
    free, busy = on(6.5), on(6.5, held=2.0)
    assert scenario.token_cap(recipe(train__seq_len=1024), free, free.ranks[0]) is None
    assert scenario.token_cap(recipe(train__seq_len=1024), busy, busy.ranks[0])


def test_the_impossible_is_an_error_that_names_nodes_and_gigabytes() -> None:
    situation = on(6.5, 6.0, held=0.5)
    error = recipe_edits.impossible(recipe(), situation)
    assert isinstance(error, InputError) and error.exit_code == 2 and error.scenario is situation
    assert "2048 tokens" in error.message and "node0 lacks" in error.message and "6.0 GB are free" in error.message
    assert error.message.index("node0") < error.message.index("node1"), "the nearest first"
    assert "--fit" in error.hint and "fused_loss" in error.hint
    assert "smaller model" in recipe_edits.impossible(recipe(method__kind="full"), dataclasses.replace(situation, shape=LLAMA_7B)).hint


TEXT = """# A recipe.
[model]
name = "HuggingFaceTB/SmolLM3-3B"   # 3B

[data]
train = "hub:a/b"
[method]
kind = "lora"      # 16 bits
rank = 16
[train]
global_batch = 8
steps = 10
learning_rate = 1e-4   # the usual
seq_len = 2048   # halve this first
# gradient_checkpointing = false would be faster

[parallel]
micro_batch = 4
"""
EDITS = (
    Edit("train", "seq_len", 1024, 2048, True), Edit("train", "fused_loss", True, False, False),
    Edit("method", "kind", "qlora", "lora", True), Edit("parallel", "micro_batch", 1, 4, False),
)  # fmt: skip


def test_comments_and_order_are_kept() -> None:
    result = recipe_edits.edited(TEXT, EDITS)
    assert "seq_len = 1024   # halve this first\nfused_loss = true\n# gradient_checkpointing" in result
    assert 'kind = "qlora"      # 16 bits\n' in result and result.endswith("micro_batch = 1\n")
    left = [line for line in result.splitlines() if line not in TEXT.splitlines()]
    assert len(left) == 4
    assert builders.train_recipe(tomllib.loads(result)) == recipe_edits.changed(builders.train_recipe(tomllib.loads(TEXT)), EDITS)


def test_a_missing_section_is_added_and_what_cannot_be_edited_is_refused() -> None:
    added = recipe_edits.edited(TEXT.split("[parallel]")[0].rstrip(), [EDITS[3]])
    assert added.endswith("\n\n[parallel]\nmicro_batch = 1\n")
    with pytest.raises(InputError, match="its own line"):
        recipe_edits.edited("train = { seq_len = 2048 }\n", [EDITS[0]])
    assert recipe_edits.edited("train.seq_len = 2048  # half\n", EDITS[:2]) == "train.seq_len = 1024  # half\ntrain.fused_loss = true\n"


def test_a_key_is_added_above_the_comments_that_lead_the_next_section() -> None:
    text = "[train]\nsteps = 1  # few\n\n# The house.\n[parallel]\n\n# The rest.\n[log]\n"
    assert recipe_edits.edited(text, [EDITS[1], EDITS[3]]) == (
        "[train]\nsteps = 1  # few\nfused_loss = true\n\n# The house.\n[parallel]\nmicro_batch = 1\n\n# The rest.\n[log]\n"
    )


@pytest.mark.parametrize("path", builders.PROJECT_RECIPES, ids=lambda path: path.name)
def test_the_recipes_of_the_project_can_be_edited(path: Path) -> None:
    text = path.read_text()
    before = builders.train_recipe(tomllib.loads(text))
    edits = [
        Edit("train", "seq_len", 64, 0, True),
        Edit("train", "fused_loss", True, False, False),
        Edit("train", "optimizer", "adamw_8bit", "adamw", True),
    ]
    after = recipe_edits.edited(text, edits)
    assert builders.train_recipe(tomllib.loads(after)) == recipe_edits.changed(before, edits)
    assert [line for line in text.splitlines() if line.lstrip().startswith("#")] == [
        line for line in after.splitlines() if line.lstrip().startswith("#")
    ]
