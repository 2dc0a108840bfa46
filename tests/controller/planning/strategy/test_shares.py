"""Shares: they sum to the batch, everyone gets work, proportions hold, and a wrong table is answered with a right one."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homelab.controller.base.errors import InputError
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.planning.machines.machines import Machines
from homelab.controller.planning.speed.dataset_size import Rows
from homelab.controller.planning.strategy.shares import decide, node_shares, split
from homelab.controller.planning.types import Choice
from homelab.controller.planning.work.job import Workload
from homelab.controller.planning.work.speed_estimate import SpeedEstimate
from homelab.shared.law.speed import Speed
from tests.controller.checks import healthy

WEIGHTS = st.lists(st.floats(1e-6, 1e15, allow_nan=False), min_size=1, max_size=12)


@given(weights=WEIGHTS, extra=st.integers(0, 5000))
def test_the_parts_sum_to_the_batch_and_everyone_works(weights: list[float], extra: int) -> None:
    shares = split(len(weights) + extra, weights)
    assert sum(shares) == len(weights) + extra
    assert min(shares) >= 1


@given(weights=WEIGHTS, extra=st.integers(0, 5000))
def test_a_faster_rank_never_gets_less(weights: list[float], extra: int) -> None:
    shares = split(len(weights) + extra, weights)
    for first, second in zip(range(len(weights)), range(1, len(weights)), strict=False):
        if weights[first] > weights[second]:
            assert shares[first] >= shares[second]
        if weights[first] < weights[second]:
            assert shares[first] <= shares[second]


@given(weights=st.lists(st.integers(1, 9), min_size=1, max_size=9), extra=st.integers(0, 3000))
def test_within_one_of_the_exact_proportion_where_all_are_worth_a_sample(weights: list[int], extra: int) -> None:
    batch = sum(weights) + extra  # every quota is at least 1
    for share, weight in zip(split(batch, weights), weights, strict=True):
        assert abs(share - Fraction(batch * weight, sum(weights))) < 1


@given(count=st.integers(1, 20), extra=st.integers(0, 300), weight=st.floats(1e-3, 1e3))
def test_equal_weights_differ_by_one_at_most(count: int, extra: int, weight: float) -> None:
    shares = split(count + extra, [weight] * count)
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)  # the earlier rank first


@given(weights=WEIGHTS, extra=st.integers(0, 500), power=st.integers(-20, 20))
def test_only_proportions_count(weights: list[float], extra: int, power: int) -> None:
    batch = len(weights) + extra
    assert split(batch, weights) == split(batch, [weight * 2.0**power for weight in weights])


def test_known_splits() -> None:
    assert split(33, [0.6, 0.3, 0.2]) == (18, 9, 6)
    assert split(16, [3, 1.5, 1]) == (9, 4, 3)
    assert split(3, [1e15, 1, 1]) == (1, 1, 1)
    assert split(10, [1000, 1, 1]) == (8, 1, 1)


def test_more_ranks_than_samples() -> None:
    with pytest.raises(InputError) as caught:
        split(2, [1, 1, 1])
    assert "2 samples" in caught.value.message and "3 ranks" in caught.value.message
    assert "global_batch = 3" in caught.value.hint and "global_batch" in caught.value.where


SPEEDS = {"tower": (4.0, 1.0), "laptop": (2.0,), "closet": (1.0,)}


def test_auto_and_equal() -> None:
    shares, choice = node_shares(16, "auto", SPEEDS)
    assert shares == {"tower": (8, 2), "laptop": (4,), "closet": (2,)}
    assert choice.value == "tower 8+2, laptop 4, closet 2"
    assert node_shares(16, "equal", SPEEDS)[0] == {"tower": (4, 4), "laptop": (4,), "closet": (4,)}


def test_a_table_is_split_over_a_nodes_cards_and_zero_leaves_a_node_out() -> None:
    shares, choice = node_shares(14, {"tower": 10, "laptop": 4, "closet": 0}, SPEEDS)
    assert shares == {"tower": (8, 2), "laptop": (4,)}
    assert "closet" in choice.because


@pytest.mark.parametrize(
    ("batch", "table", "message", "hint"),
    [
        (16, {"tower": 6, "laptop": 4, "closet": 2}, "sum to 12, but the global batch is 16", "{ tower = 8, laptop = 5, closet = 3 }"),
        (16, {"tower": 6, "laptop": 4, "closet": 2}, "sum to 12", "or global_batch = 12"),
        (16, {"tower": 6, "laptop": 6, "closet": 0}, "sum to 12", "{ tower = 8, laptop = 8, closet = 0 }"),
        (16, {"tower": 10, "laptpo": 4, "closet": 2}, 'Did you mean "laptop"', "tower, laptop, closet"),
        (16, {"tower": 10, "laptop": 6}, "no share is given for closet", "closet = 0"),
        (16, {"tower": 1, "laptop": 8, "closet": 7}, "tower has 2 ranks, but a share of 1 sample", "tower = 2"),
        (16, {"tower": 0, "laptop": 0, "closet": 0}, "all shares are 0", "auto"),
        (2, {"tower": 2, "laptop": 2, "closet": 2}, "sum to 6", "global_batch = 4 or more"),
    ],
)
def test_a_wrong_table_is_answered_with_a_right_one(batch: int, table: dict[str, int], message: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        node_shares(batch, table, SPEEDS)
    assert message in caught.value.message and hint in caught.value.hint and "shares" in caught.value.where


@given(counts=st.lists(st.integers(0, 40), min_size=3, max_size=3).filter(any), batch=st.integers(4, 200))
def test_the_hint_is_a_valid_table(counts: list[int], batch: int) -> None:
    table = dict(zip(SPEEDS, counts, strict=True))
    try:
        node_shares(batch, table, SPEEDS)
    except InputError as error:
        text = error.hint.split("{", 1)[1].split("}", 1)[0]
        mended = {name.strip(): int(count) for name, count in (pair.split("=") for pair in text.split(","))}
        shares, _ = node_shares(batch, mended, SPEEDS)
        assert sum(sum(per_rank) for per_rank in shares.values()) == batch


def test_an_absent_nodes_samples_go_to_the_others() -> None:
    table = {"tower": 10, "laptop": 4, "closet": 2}
    there = {"tower": (1.0,), "closet": (1.0,)}
    shares, choice = node_shares(16, table, there, absent=("laptop",))
    assert shares == {"tower": (13,), "closet": (3,)}
    assert "laptop" in choice.because
    with pytest.raises(InputError, match="no node is named"):
        node_shares(16, table, there)


def recipe(shares: Any, batch: int = 12) -> TrainRecipe:
    return healthy.recipe(train={"global_batch": batch, "steps": 1, "learning_rate": 1e-4, "seq_len": 100}, parallel={"shares": shares})


def belief(**weights: float) -> SpeedEstimate:
    """Relative speeds alone, one rank per node."""
    per_rank: dict[str, tuple[float, ...]] = {name: (weight,) for name, weight in weights.items()}
    return SpeedEstimate(per_rank, None, dict.fromkeys(weights, "owner"), Choice(subject="speeds", value="", because=""), {})


ROWS = Rows(100, 50.0, False, "a guess")


def decided(
    recipe: TrainRecipe, speeds: SpeedEstimate, rows: Rows, device: str, absent: tuple[str, ...] = ()
) -> tuple[tuple[int, ...], tuple[Choice, ...]]:
    return decide(recipe, Workload(speeds, rows, None), Machines(device, (), {}, absent=absent))


def test_decide() -> None:
    known = belief(tower=3, laptop=1)
    shares, choices = decided(recipe("auto"), known, ROWS, "cpu")
    assert shares == (9, 3) and [choice.subject for choice in choices] == ["speeds", "shares"]
    shares, choices = decided(recipe("equal"), known, ROWS, "cpu")
    assert shares == (6, 6) and [choice.subject for choice in choices] == ["shares"]
    assert decided(recipe({"tower": 7, "laptop": 5, "closet": 0}), known, ROWS, "cpu")[0] == (7, 5)
    assert decided(recipe({"tower": 4, "laptop": 4, "closet": 4}), known, ROWS, "cpu", absent=("closet",))[0] == (6, 6)


def test_auto_with_known_speeds_is_what_the_worker_will_do() -> None:
    """A fixed cost per step counts: the laptop needs as long for its optimizer as for four rows."""
    speeds: dict[str, tuple[Speed, ...]] = {"tower": (Speed(0.0, 0.0, 0.01),), "laptop": (Speed(2.0, 0.0, 0.01),)}
    known = replace(belief(tower=1, laptop=1), speeds=speeds)
    assert decided(recipe("auto"), known, ROWS, "cpu")[0] == (8, 4)
    assert decided(recipe("auto"), known, ROWS, "cpu") == decided(recipe("auto"), known, ROWS, "cpu")
    assert decided(recipe("equal"), known, ROWS, "cpu")[0] == (6, 6)


@given(
    token_s=st.lists(st.floats(1e-4, 1.0), min_size=1, max_size=5), step_s=st.floats(0, 100), extra=st.integers(0, 20), mean=st.floats(1, 100),
    micro_batch=st.sampled_from(["auto", 1, 3]),
)  # fmt: skip
def test_expected_shares_sum_to_the_batch_and_everyone_works(
    token_s: list[float], step_s: float, extra: int, mean: float, micro_batch: Any
) -> None:
    speeds: dict[str, tuple[Speed, ...]] = {f"n{index}": (Speed(step_s * index, 0.01, cost),) for index, cost in enumerate(token_s)}
    known = replace(belief(**dict.fromkeys(speeds, 1.0)), speeds=speeds)
    wanted = healthy.recipe(
        train={"global_batch": len(token_s) + extra, "steps": 1, "learning_rate": 1e-4, "seq_len": 100},
        parallel={"micro_batch": micro_batch},
    )
    shares = decided(wanted, known, Rows(None, mean, False, ""), "cuda")[0]
    assert sum(shares) == len(token_s) + extra and min(shares) >= 1


def test_more_ranks_than_samples_in_auto() -> None:
    known = replace(belief(a=1, b=1, c=1), speeds={name: (Speed(0.0, 0.0, 1.0),) for name in "abc"})
    with pytest.raises(InputError, match="cannot feed 3 ranks"):
        decided(recipe("auto", batch=2), known, ROWS, "cpu")
