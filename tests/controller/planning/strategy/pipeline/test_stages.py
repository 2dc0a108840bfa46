"""The cut of a model: the slowest stage as fast as memory allows, and a step played through."""

from __future__ import annotations

import itertools

import pytest

from homelab.controller.planning.strategy.pipeline import pipeline_plan, stage_time
from homelab.controller.planning.strategy.pipeline.stage_time import StageTimes


def every_cut(ranks: int, layers: int) -> list[tuple[int, ...]]:
    return [cut for cut in itertools.product(range(1, layers + 1), repeat=ranks) if sum(cut) == layers]


@pytest.mark.parametrize("rates", [(1.0, 2.0, 4.0), (3.0, 1.0, 1.0), (1.0, 1.0, 1.0)])
@pytest.mark.parametrize("caps", [(9, 9, 9), (3, 4, 9), (2, 9, 3)])
def test_the_best_cut_is_the_best_of_all(rates: tuple[float, ...], caps: tuple[int, ...]) -> None:
    def seconds(rank: int, stage: int, count: int) -> float:
        return rates[rank] * (count + (0.7 if stage == 2 else 0.0))

    best = pipeline_plan.best_cuts(3, 9, lambda rank, stage: caps[rank], seconds)
    all_of_them = [
        max(seconds(rank, stage, count) for stage, (rank, count) in enumerate(zip(order, cut, strict=True)))
        for order in itertools.permutations(range(3)) for cut in every_cut(3, 9)
        if all(count <= caps[rank] for rank, count in zip(order, cut, strict=True))
    ]  # fmt: skip
    assert (best[0].slowest_s if best else None) == (min(all_of_them) if all_of_them else None)
    if best:
        assert sum(best[0].layers) == 9 and sorted(best[0].order) == [0, 1, 2]


def test_a_rank_without_room_for_a_layer_has_no_cut() -> None:
    assert pipeline_plan.best_cuts(2, 4, lambda rank, stage: rank, lambda rank, stage, count: 1.0) == []


def even(passes: int, in_flight: int, *, message_s: float = 0.0) -> StageTimes:
    return StageTimes([1.0] * passes, [2.0] * passes, [message_s] * passes, in_flight)


@pytest.mark.parametrize(("stages", "passes"), [(2, 4), (3, 8), (4, 16)])
def test_the_gap_is_that_of_the_books(stages: int, passes: int) -> None:
    """Equal stages without a wire: (M + S - 1) passes of one stage (Narayanan et al., 2021)."""
    times = [even(passes, stages - number) for number in range(stages)]
    assert stage_time.step_s(times) == pytest.approx(3.0 * (passes + stages - 1))


def test_more_in_flight_hides_the_messages() -> None:
    least = [even(16, 3, message_s=1.0), even(16, 2, message_s=1.0), even(16, 1)]
    most = [even(16, 5, message_s=1.0), even(16, 3, message_s=1.0), even(16, 1)]
    assert stage_time.step_s(most) < stage_time.step_s(least)
    assert stage_time.step_s(most) <= 3.0 * (16 + 2) + 4 * 1.0 + 1e-9, "only the way there and back is left"


def test_a_stage_that_keeps_more_than_the_one_before_waits_for_ever() -> None:
    with pytest.raises(AssertionError, match="every stage waits for another"):
        stage_time.step_s([even(4, 1), even(4, 3)])


def test_one_message_after_the_other() -> None:
    """A wire that takes longer than a pass sets the pace."""
    slow = [even(8, 8, message_s=10.0), even(8, 8)]
    assert stage_time.step_s(slow) >= 8 * 10.0
