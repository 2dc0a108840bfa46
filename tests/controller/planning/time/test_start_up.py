"""What a launch costs before its first step: its parts, and that the hours hold them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from homelab.controller.checks.evidence import Evidence
from homelab.controller.planning.render import time_table
from homelab.controller.planning.speed.dataset_size import DataFile
from homelab.controller.planning.types import StartPart, TimeEstimate
from tests.controller.checks import healthy
from tests.controller.planning.speed.test_speeds import file, with_file
from tests.controller.planning.time.test_time import make

pytestmark = pytest.mark.timeout(20)
NAMES = healthy.NAMES
LLAMA_2 = {"model": {"name": "NousResearch/Llama-2-7b-hf"}, "train": {"global_batch": 12, "steps": 100, "learning_rate": 1e-3}}

TINY = {**LLAMA_2, "model": {"name": "TinyLlama/TinyLlama-1.1B-Chat-v1.0"}}


def time_of(seen: Evidence, recipe: Any, **more: Any) -> TimeEstimate:
    time = make(seen, recipe, **more).time
    assert time is not None
    return time


def parts_of(time: TimeEstimate) -> dict[str, StartPart]:
    for part in time.start:
        assert 0 <= part.seconds_low <= part.seconds <= part.seconds_high and part.because
    assert time.start_s == pytest.approx(sum(part.seconds for part in time.start))
    return {part.name: part for part in time.start}


def measured(recipe: Any, cores: int = 8) -> Evidence:
    seen, method = healthy.cpu(recipe), {"kind": recipe.method.kind, "rank": 16, "targets": "all-linear"}
    for name in NAMES:
        seen = with_file(
            healthy.with_facts(seen, name, system={"cpu_count": cores}), name, file(name, device_name=f"CPU, {cores} cores", method=method)
        )
    return seen


def offline(recipe: Any) -> Evidence:
    return replace(healthy.gpu(recipe), facts={})


def without_model(seen: Evidence, *names: str) -> Evidence:
    for name in names:
        seen = healthy.with_facts(seen, name, model={"found": False, "hub": "ok"})
    return seen


def test_the_hours_of_a_guess_hold_the_start_at_its_best_and_at_its_worst() -> None:
    recipe = healthy.recipe(**LLAMA_2)
    time = time_of(healthy.gpu(recipe), recipe)
    assert not time.is_measured and time.hours and time.hours_low and time.hours_high
    steps_s = time.hours * 3600 - time.start_s
    assert steps_s >= 100 * time.step_s > 0
    assert time.hours_low * 3600 - time.start_s_low == pytest.approx(steps_s / 1.4)
    assert time.hours_high * 3600 - time.start_s_high == pytest.approx(steps_s * 1.4)


def test_measured_speeds_have_a_start_too() -> None:
    recipe = healthy.recipe()
    time = time_of(measured(recipe), recipe)
    assert time.is_measured and time.hours_low is None
    assert list(parts_of(time)) == ["imports", "read", "connect", "first steps"]
    words = time_table._total(make(measured(recipe), recipe), time)
    assert "for the start and 10 steps" in words


def test_a_model_that_two_nodes_lack_comes_twice_over_one_way_to_the_internet() -> None:
    recipe = healthy.recipe(**LLAMA_2)
    seen = without_model(healthy.gpu(recipe), *NAMES[1:])
    download = parts_of(time_of(seen, recipe))["download"]
    assert download.seconds == pytest.approx(2 * 270e6 / 12.5e6)
    assert " and ".join(NAMES[1:]) in download.because and "100 Mbit/s assumed" in download.because
    assert "download" not in parts_of(time_of(healthy.gpu(recipe), recipe))
    tiny = healthy.recipe(**TINY)
    unasked = parts_of(time_of(offline(tiny), tiny))
    assert "download" not in unasked and "the nodes were not asked" in unasked["read"].because
    assert unasked["read"].seconds == pytest.approx(2 * 1.1e9 / 1.2e9, rel=0.01)


def test_a_folder_is_downloaded_by_nobody() -> None:
    recipe = healthy.recipe()
    assert "download" not in parts_of(time_of(without_model(measured(recipe), NAMES[0]), recipe))


def test_data_that_the_controller_holds_goes_to_every_node() -> None:
    recipe = healthy.recipe()
    pairs = {(a, b): 50e6 for a in NAMES for b in NAMES if a != b}
    ship = parts_of(time_of(measured(recipe), recipe, data={"train": DataFile(size_bytes=int(1e9))}, throughputs=pairs))["ship"]
    assert ship.seconds == pytest.approx(len(NAMES) * 1.0004e9 / 50e6) == ship.seconds_low and ship.seconds_high == pytest.approx(
        5 * ship.seconds
    )
    assert "50 MB/s (measured)" in ship.because


@pytest.mark.parametrize(("method", "is_kept"), [({"kind": "qlora"}, True), ({"kind": "lora", "base": "8bit"}, False)])
def test_a_quantised_base_is_made_at_the_start_and_one_of_4_bits_is_kept(method: dict[str, Any], is_kept: bool) -> None:
    recipe = healthy.recipe(**TINY, method=method)
    on_cards = parts_of(time_of(offline(recipe), recipe))
    assert on_cards["quantise"].seconds == pytest.approx(0.97e9 / 2e9, rel=0.01) and (on_cards["quantise"].seconds_low == 0) is is_kept
    sixteen = healthy.recipe(**TINY)
    plain = parts_of(time_of(offline(sixteen), sixteen))
    assert "quantise" not in plain and (on_cards["read"].seconds_low < 0.5 * plain["read"].seconds_low) is is_kept


def test_two_cores_quantise_slower_than_eight() -> None:
    recipe = healthy.recipe(method={"kind": "qlora"})
    few, many = (parts_of(time_of(measured(recipe, cores), recipe))["quantise"] for cores in (2, 8))
    assert few.seconds == pytest.approx(4 * many.seconds) and few.seconds_high == many.seconds_high, "at the worst, one core alone"


def test_a_stage_reads_its_own_layers_and_one_rank_connects_to_nobody() -> None:
    recipe = healthy.recipe(**LLAMA_2)
    staged = healthy.recipe(**LLAMA_2, parallel={"strategy": "pipeline"})
    plan = make(offline(staged), staged)
    assert plan.time
    most = max(rank.stage.end - rank.stage.begin for rank in plan.ranks if rank.stage)
    assert parts_of(plan.time)["read"].seconds == pytest.approx(2 * 6.74e9 / 1.2e9 * most / 32, rel=0.01) and most < 32
    alone = time_of(healthy.gpu(recipe, names=NAMES[:1]), recipe)
    assert "connect" not in parts_of(alone)


def test_the_plan_tells_what_each_part_rests_on() -> None:
    recipe = healthy.recipe(**LLAMA_2)
    made = make(healthy.gpu(recipe), recipe)
    assert made.time
    told = {choice.subject: choice.because for choice in made.choices if choice.subject.startswith("start: ")}
    assert told == {f"start: {part.name}": part.because for part in made.time.start}
    assert time_table._start(made.time).startswith("imports 8 s, read ")
    assert type(made).model_validate(made.model_dump(mode="json")).time == made.time


def test_the_base_reads_all_pairs_once_before_the_first_step() -> None:
    lengths = {"data": {"train": DataFile(rows=3000, size_bytes=3000 * 400)}}
    plain, pairs = (healthy.recipe(**LLAMA_2, **more) for more in ({}, {"objective": {"kind": "dpo"}}))
    without, time = (time_of(healthy.gpu(recipe), recipe, **lengths) for recipe in (plain, pairs))
    part = parts_of(time)["base reads rows"]
    assert "3000 rows" in part.because and part.seconds == pytest.approx(0.3 * 3000 * time.row_tokens / time.tokens_per_s)
    assert time.hours is not None and without.hours is not None
    assert (time.hours - without.hours) * 3600 == pytest.approx(part.seconds)
    assert "base reads rows" not in parts_of(time_of(healthy.gpu(pairs), pairs, **lengths, resume_step=50)), (
        "a later attempt has the numbers"
    )
    with_others = time_of(healthy.gpu(pairs), healthy.recipe(**LLAMA_2, objective={"kind": "kto"}), **lengths)
    assert with_others.compute_s == pytest.approx(1.3 * time.compute_s), "a judged answer has a forward pass over another one"
    judged = parts_of(time_of(healthy.gpu(pairs), healthy.recipe(**LLAMA_2, objective={"kind": "kto"}), **lengths))["base reads rows"]
    assert "6000 rows" in judged.because, "and as many answers to other prompts"
    of_orpo = healthy.recipe(**LLAMA_2, objective={"kind": "orpo"})
    assert "base reads rows" not in parts_of(time_of(healthy.gpu(of_orpo), of_orpo, **lengths)), "it asks no base"
