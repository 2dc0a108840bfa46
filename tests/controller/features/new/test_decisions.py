"""What `homelab new` decides: whatever the data and the model are, the recipe is one that trains."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homelab.controller.config.recipe import TrainRecipe, parse_recipe
from homelab.controller.features.new import decisions
from homelab.controller.features.new.decisions import Base, Rows
from homelab.controller.planning.model import families, known_models
from homelab.shared.law import order


def base_of(name: str) -> Base:
    config = known_models.config_of(name)
    assert config is not None
    return Base(config["model_type"], families.from_config(config), config["max_position_embeddings"])


LLAMA, QWEN, SMALL = (base_of(name) for name in ("meta-llama/Llama-2-7b-hf", "Qwen/Qwen3-4B", "HuggingFaceTB/SmolLM2-135M"))
CHATS = Rows(count=2000, longest=700, tokens=600_000, loss_part=0.5, is_counted=True)


def values(rows: Rows, base: Base = LLAMA, kind: str = "lora", ranks: int = 1) -> dict[str, object]:
    return {one.place: one.value for one in decisions.of_training(rows, base, kind, ranks)}


def recipe_of(rows: Rows, base: Base, kind: str, ranks: int) -> TrainRecipe:
    content: dict[str, dict[str, object]] = {"model": {"name": "a/b"}, "data": {"train": "x.jsonl"}, "method": {"kind": kind}}
    for one in decisions.of_training(rows, base, kind, ranks):
        content.setdefault(one.section, {})[one.key] = one.value
    recipe = parse_recipe(content)
    assert isinstance(recipe, TrainRecipe)
    return recipe


@given(
    count=st.integers(1, 3_000_000), longest=st.integers(1, 200_000), loss_part=st.floats(0, 1), is_counted=st.booleans(),
    base=st.sampled_from([LLAMA, QWEN, SMALL, Base("", None, None)]), kind=st.sampled_from(["lora", "qlora", "full"]), ranks=st.integers(1, 64),
)  # fmt: skip
def test_every_recipe_is_valid_and_can_be_trained(
    count: int, longest: int, loss_part: float, is_counted: bool, base: Base, kind: str, ranks: int
) -> None:
    rows = Rows(count, longest, count * max(1, longest // 2), loss_part, is_counted)
    recipe = recipe_of(rows, base, kind, ranks)
    train = recipe.train
    assert train.global_batch >= ranks
    assert train.seq_len >= min(longest, base.positions or longest)
    held_out = max(round(count * recipe.data.eval_fraction), 1) if recipe.data.eval_fraction else 0
    assert held_out < count and train.keep_best == (held_out > 0)
    steps = train.total_steps(count - held_out)
    assert train.warmup_steps <= max(1, steps // 10)
    assert 1 <= recipe.tracking.eval_every_steps <= steps if held_out else recipe.tracking.eval_every_steps == 0
    assert 1e-6 < train.learning_rate < 1e-2


def test_the_rate_falls_with_the_width_of_the_model_and_not_with_the_rank() -> None:
    rates = [values(CHATS, base)["train.learning_rate"] for base in (SMALL, LLAMA)]
    assert rates == [0.0015, 0.0003]
    assert values(CHATS, QWEN)["train.learning_rate"] == 0.0005
    many = replace(CHATS, count=200_000, tokens=400_000_000)
    assert values(many)["method.rank"] == 64 and values(many)["train.learning_rate"] == 0.0003


def test_full_training_has_a_tenth_of_the_rate_and_no_adapters() -> None:
    full = values(CHATS, kind="full")
    assert full["train.learning_rate"] == 0.00003
    assert not [key for key in full if key.startswith("method.")]


@pytest.mark.parametrize(
    ("count", "batch", "epochs"),
    [(3, 4, 8), (55, 4, 8), (150, 4, 8), (500, 8, 6), (2000, 16, 3), (9000, 16, 3), (50_000, 32, 2), (3_000_000, 32, 1)],
)
def test_few_rows_are_read_more_often_in_smaller_batches(count: int, batch: int, epochs: int) -> None:
    got = values(replace(CHATS, count=count, tokens=300 * count))
    assert (got["train.global_batch"], got["train.epochs"]) == (batch, epochs)


def test_three_rows_are_all_trained_on() -> None:
    got = values(replace(CHATS, count=3, tokens=900))
    assert got["data.eval_fraction"] == 0.0 and "train.keep_best" not in got


def test_few_rows_are_said_and_a_few_long_texts_are_not() -> None:
    few = replace(CHATS, count=55, tokens=55 * 60)
    assert few.few.startswith("55 rows are few: ") and replace(few, count=1).few.startswith("1 row is few: ")
    assert CHATS.few == replace(few, count=3, tokens=400_000).few == ""
    reasons = {one.place: one.reason for one in decisions.of_training(replace(few, count=1, tokens=60), LLAMA, "lora", 1)}
    assert "1 rows" not in str(reasons) and "300" not in reasons["train.epochs"]
    assert "make 300 steps" in str(decisions.of_training(replace(few, count=240), LLAMA, "lora", 1))


def test_a_short_run_learns_faster() -> None:
    short = replace(CHATS, count=12, tokens=3600)
    assert 8 * order.steps_per_epoch(12, 4) < 320
    assert values(short)["train.learning_rate"] == 0.0004
    long = values(replace(CHATS, count=6000, tokens=1_800_000))
    assert long["train.learning_rate"] == 0.0003


def test_a_row_that_is_longer_than_the_model_reads_is_said() -> None:
    cut = next(one for one in decisions.of_training(replace(CHATS, longest=9000), LLAMA, "lora", 1) if one.place == "train.seq_len")
    assert cut.value == 4096 and "cut" in cut.reason


def test_a_guessed_length_gets_room() -> None:
    assert values(replace(CHATS, is_counted=False))["train.seq_len"] == 1088
    assert values(CHATS)["train.seq_len"] == 704


def test_each_decision_has_a_reason_and_each_source_is_named() -> None:
    sources = decisions.__doc__ or ""
    for base in (LLAMA, Base("", None, None)):
        for one in decisions.of_training(CHATS, base, "lora", 3):
            assert one.reason, one
            for word in one.reason.rpartition("(")[2].rstrip(")").split(", ") if one.reason.endswith(")") else []:
                assert f"    {word} " in sources, one
