"""Seconds per step, hours, gains and what follows from them: by hand where a hand can reckon, and for a cluster that people really have."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.recipe import Recipe, parse_recipe
from homelab.controller.planning.memory import attention
from homelab.controller.planning.model.families import known
from homelab.controller.planning.render import time_table
from homelab.controller.planning.speed import dataset_size
from homelab.controller.planning.speed.dataset_size import DataFile, Rows
from homelab.controller.planning.time import network_cost, step_time
from homelab.controller.planning.time.step_time import Sync, Worker
from homelab.controller.planning.types import Plan
from homelab.shared.law.limits import Limits
from homelab.shared.law.speed import Speed
from tests import builders
from tests.controller.checks import healthy
from tests.controller.planning.speed.test_speeds import all_measured, file, gpu_file, with_file

NAMES = healthy.NAMES


def make(seen: Evidence, recipe: Recipe, **more: Any) -> Plan:
    return builders.make_plan(seen.cluster, recipe, seen.facts, **more)


def workers(*costs: tuple[float, float, float], rows: int = 1, node: str = "") -> list[Worker]:
    """One rank per node with these (step_s, micro_batch_s, token_s), and passes of `rows` rows of 100 tokens."""
    return [Worker(rank, node or f"n{rank}", "measured", Speed(*cost), Limits(100 * rows), 1) for rank, cost in enumerate(costs)]


def test_a_step_by_hand() -> None:
    """8 rows of 100 tokens; one rank takes 1 s a row, the other 3 s: 6 and 2 rows end together after 6 s."""
    two = workers((0, 0, 0.01), (0, 0, 0.03))
    assert step_time.busy_s(two, [100] * 8, None) == pytest.approx([6.0, 6.0])
    assert step_time.busy_s(two, [100] * 8, [4, 4]) == pytest.approx([4.0, 12.0])
    assert step_time.best_s(two, 800, 100) == pytest.approx(6.0)
    # Fixed costs: 2 s per step on the first, 1 s per pass on the second.
    fixed = workers((2, 0, 0.01), (0, 1, 0.03))
    assert step_time.best_s(fixed, 800, 100) == pytest.approx((800 + 2 / 0.01) / (1 / 0.01 + 1 / 0.04))
    assert step_time.busy_s(fixed, [100] * 8, None) == pytest.approx([8.0, 8.0])


def test_a_rank_that_is_not_ready_in_time_gets_nothing_in_the_best_division() -> None:
    assert step_time.best_s(workers((0, 0, 0.01), (50, 0, 0.01)), 800, 100) == pytest.approx(8.0)


@given(
    costs=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 1), st.floats(1e-4, 0.1)), min_size=1, max_size=4), rows_at_once=st.integers(1, 4),
    count=st.integers(4, 40),
)  # fmt: skip
def test_no_division_of_rows_beats_the_best_one(costs: list[tuple[float, float, float]], rows_at_once: int, count: int) -> None:
    ranks = workers(*costs, rows=rows_at_once)
    best = step_time.best_s(ranks, 100 * count, 100)
    assert best <= max(step_time.busy_s(ranks, [100] * count, None)) * (1 + 1e-9)
    done = sum(max(0.0, best - w.speed.step_s) / (w.speed.token_s + w.speed.micro_batch_s / (100 * rows_at_once)) for w in ranks)
    assert done == pytest.approx(100 * count), "in the best step exactly the batch gets done"


def test_the_wire_of_a_step() -> None:
    size = 117_600_000
    three = workers((0, 0, 1), (0, 0, 1), (0, 0, 1))
    assert Sync(network_cost.all_reduce_s, size, {}).seconds(three, ()) == pytest.approx((4 / 3, 0.0))
    assert Sync(network_cost.all_reduce_s, size, {}).seconds(three[:2], ()) == pytest.approx((1.0, 0.0))
    assert Sync(network_cost.all_reduce_s, size, {}).seconds(three[:1], ()) == (0, 0)
    assert Sync(network_cost.all_reduce_s, size, {}).seconds(workers((0, 0, 1), (0, 0, 1), node="one"), ()) == (0, 0), (
        "cards of one machine use no LAN"
    )
    slow = {(a, b): 58.8e6 if "n2" in (a, b) else 500e6 for a in ("n0", "n1", "n2") for b in ("n0", "n1", "n2") if a != b}
    assert Sync(network_cost.all_reduce_s, size, slow).seconds(three, ())[0] == pytest.approx(8 / 3)
    assert Sync(network_cost.all_reduce_s, size, slow).seconds(three[:2], ())[0] == pytest.approx(size / 500e6)
    # What a run measured counts more than bytes, and shrinks with the ring.
    measured = Sync(network_cost.all_reduce_s, size, slow, measured_s=0.8, measured_ranks=3)
    assert measured.seconds(three, ())[0] == pytest.approx(0.8) and measured.seconds(three[:2], ())[0] == pytest.approx(0.6)


def test_the_slowest_measured_wire() -> None:
    pairs = {("a", "b"): 90e6, ("b", "a"): 80e6}
    assert network_cost.wire_between(["a", "b"], pairs) == network_cost.Wire(80e6, True)
    assert network_cost.wire_between(["a", "b", "c"], pairs) == network_cost.Wire(80e6, True)
    assert network_cost.wire_between(["a", "c"], pairs) == network_cost.Wire() and "assumed" in str(network_cost.Wire())
    fast = dict.fromkeys(pairs, 900000000.0)
    assert network_cost.wire_between(["a", "b"], fast) == network_cost.Wire(900e6, True)
    assert network_cost.wire_between(["a", "b", "c"], fast) == network_cost.Wire(), (
        "a pair that nobody measured is assumed, not believed fast"
    )


def test_what_compression_sends() -> None:
    shape, recipe = (known("meta-llama/Llama-2-7b-hf"), healthy.recipe(method={"kind": "lora", "targets": ["q_proj", "v_proj"]}))
    assert shape and recipe.method
    assert network_cost.sent_bytes(shape, recipe.method) == 4 * 8_388_608
    assert network_cost.sent_bytes(shape, recipe.method, "bf16") == 2 * 8_388_608
    from homelab.shared.law.wire_bytes import powersgd_elements

    assert network_cost.sent_bytes(shape, recipe.method, "powersgd") == 4 * 64 * 2 * powersgd_elements(16, 4096)
    full = replace(recipe.method, kind="full")
    assert network_cost.sent_bytes(shape, full, "powersgd") < network_cost.gradient_bytes(shape, full) / 50


def test_rows_as_an_earlier_run_counted_them() -> None:
    seen = all_measured(healthy.cpu(healthy.recipe()))
    recipe = healthy.recipe()
    made = make(seen, recipe)
    assert made.time and made.time.row_tokens == 61.2 and made.time.is_measured
    assert "2026-01-01-0000-smol" in made.time.rows_because
    other = healthy.with_facts(
        seen, "tower", data={"train": {"path": "x", "found": True, "size_bytes": 5_000_000, "sha256": "cd" * 32, "rows": 10_000}}
    )
    made = make(other, recipe)
    assert made.time and not made.time.is_measured and made.time.row_tokens == pytest.approx(125) and "a guess" in made.time.rows_because


def test_rows_guessed_from_lines_and_bytes() -> None:
    recipe = healthy.recipe(train={"global_batch": 12, "epochs": 3, "learning_rate": 1e-3, "seq_len": 256})
    found = dataset_size.of_data(recipe, DataFile(400_000, 1000, "x"), [])
    assert (found.count, found.tokens_mean, found.is_measured) == (1000, 100.0, False) and found.steps(recipe) == 3 * 84
    assert dataset_size.of_data(recipe, DataFile(40_000_000, 1000, "x"), []).tokens_mean == 256, "rows are cut at seq_len"
    unknown = dataset_size.of_data(recipe, DataFile(400_000, None, "x"), [])
    assert (unknown.count, unknown.tokens_mean, unknown.steps(recipe)) == (None, 256.0, None)
    packed = recipe.model_copy(update={"data": recipe.data and replace(recipe.data, packing=True)})
    assert dataset_size.of_data(packed, DataFile(400_000, 1000, "x"), []).count == 391
    held = recipe.model_copy(update={"data": recipe.data and replace(recipe.data, eval_fraction=0.1)})
    assert dataset_size.of_data(held, DataFile(400_000, 1000, "x"), []).count == 900


@given(mean=st.floats(1, 512), batch=st.integers(1, 300))
def test_the_lengths_of_a_typical_batch(mean: float, batch: int) -> None:
    lengths = Rows(None, mean, False, "").lengths(batch, 512)
    assert len(lengths) == batch and min(lengths) >= 1 and max(lengths) <= 512
    assert sum(lengths) / batch == pytest.approx(mean, abs=0.5)


def test_hours_with_saves_and_evaluations() -> None:
    recipe = healthy.recipe(
        data={"train": "/data/train.jsonl", "eval": "/data/eval.jsonl"}, train={"global_batch": 12, "steps": 100, "learning_rate": 1e-3},
        checkpoint={"every_steps": 30}, tracking={"eval_every_steps": 25},
    )  # fmt: skip
    seen = healthy.cpu(recipe)
    for name in NAMES:
        seen = with_file(seen, name, file(name, save_s=2.0, evaluate_s=5.0))
    found = make(seen, recipe).time
    assert found and found.hours is not None
    # Saved after 30, 60, 90 and 100; evaluated before the first and after 25, 50, 75 and the last.
    assert found.hours * 3600 == pytest.approx(found.start_s + 100 * found.step_s + 4 * 2.0 + 5 * 5.0)
    resumed = make(seen, recipe, resume_step=60).time
    assert resumed and resumed.hours is not None
    assert resumed.hours * 3600 == pytest.approx(found.start_s + 40 * found.step_s + 2 * 2.0 + 3 * 5.0)


def test_the_estimate_of_a_measured_cluster() -> None:
    """Speeds 4 : 2 : 1. Shares by speed reach nearly the sum, equal ones 3/7 of it, and more as the slowest gets the shortest rows."""
    recipe = healthy.recipe(train={"global_batch": 70, "steps": 10, "learning_rate": 1e-3})
    seen = healthy.cpu(recipe)
    for name, token_s in zip(NAMES, (1e-3, 2e-3, 4e-3), strict=True):
        ranks = [{"local_rank": 0, "step_s": 0.0, "micro_batch_s": 0.0, "token_s": token_s}]
        seen = with_file(seen, name, file(name, ranks=ranks, sync_s=0.0))
    made = make(seen, recipe)
    found = made.time
    assert found
    assert found.efficiency > 0.97 and 3 / 7 < found.equal_efficiency < 0.6
    assert found.best_step_s <= found.step_s < 1.03 * found.best_step_s and found.compute_s == found.step_s
    assert [gain.gain for gain in found.gains] == pytest.approx([7 / 3 - 1, 7 / 5 - 1, 7 / 6 - 1], rel=0.08)
    assert sum(rank.tokens for rank in found.ranks) == pytest.approx(70 * 61.2, rel=0.01)
    assert Plan.model_validate(made.model_dump(mode="json")) == made


def test_who_should_stay_away_is_named() -> None:
    """The third node is 50 times as slow as the others and has a slow wire: the worker would give it a row, and all would wait."""
    recipe = healthy.recipe(train={"global_batch": 8, "steps": 10, "learning_rate": 1e-3})
    seen = all_measured(healthy.cpu(healthy.recipe()), (1e-3, 1e-3, 5e-2))
    found = make(seen, recipe).time
    assert found and found.gains[2].gain < -0.5
    assert any(line.startswith("leave oldtower out") and "--nodes tower,laptop" in line for line in found.verdict)
    slow = seen
    for name in NAMES:
        slow = with_file(slow, name, file(name, sync_s=30.0))
    found = make(slow, recipe).time
    assert found and any(line.startswith("stay on tower: alone it does") for line in found.verdict)


def test_the_verdict_prices_what_is_not_done() -> None:
    found = make(all_measured(healthy.cpu(healthy.recipe())), healthy.recipe()).time
    assert found
    assert found.verdict[0].startswith("ddp on 3 machines: 0.05 s") and any(line.startswith("FSDP would gather") for line in found.verdict)
    alone = healthy.cpu(healthy.recipe(), names=("tower",))
    one = make(with_file(alone, "tower", file(world_size=1, sync_s=None)), healthy.recipe()).time
    assert one and one.wire_s == 0 and one.verdict == ("one machine, one rank: nothing goes over the LAN",) and one.gains == ()


def test_a_model_that_does_not_fit_is_to_be_quantised_harder() -> None:
    found = make(healthy.gpu(), healthy.recipe(model={"name": "meta-llama/Llama-2-7b-hf"}, parallel={"strategy": "ddp"})).time
    assert (
        found
        and found.verdict[-1].startswith("quantise harder: it does not fit on laptop, oldtower")
        and "3.9 GB instead of 13" in found.verdict[-1]
    )
    assert [rank.tokens for rank in found.ranks][1:] == [0, 0] and any(line.startswith("stay on tower") for line in found.verdict)


def test_a_script_and_unknown_speeds_have_no_time() -> None:
    script = parse_recipe({"script": {"path": "train.py"}})
    assert make(healthy.cpu(), script).time is None
    made = make(healthy.cpu(), healthy.recipe())
    because = next(choice.because for choice in made.choices if choice.subject == "time")
    assert made.time is None and because.startswith("speeds: the speed of the CPUs is not known")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0421, "42.1 ms"), (1.5, "1.5 s"), (90, "90 s"), (600, "10 min"), (9000, "2.5 h"), (864_000, "10 days")]
)
def test_durations(seconds: float, text: str) -> None:
    assert time_table.duration(seconds) == text


def test_the_wires_of_a_plan_are_the_measured_ones() -> None:
    seen = healthy.gpu()
    recipe = healthy.recipe(model={"name": "meta-llama/Llama-2-7b-hf"}, method={"kind": "qlora"})
    pairs = {(a, b): 11e6 if "laptop" in (a, b) else 117e6 for a in NAMES for b in NAMES if a != b}
    assumed, measured = make(seen, recipe), make(seen, recipe, throughputs=pairs)
    assert assumed.time and measured.time and _total_wire_s(measured) == pytest.approx(_total_wire_s(assumed) * 117.6 / 11)
    assert "(measured)" in measured.time.wire_because and "assumed: 1 Gbit/s" in assumed.time.wire_because
    assert "11 MB/s (measured)" in next(choice.because for choice in measured.choices if choice.subject == "strategy")


def _total_wire_s(plan: Plan) -> float:
    assert plan.time
    return plan.time.wire_s + plan.time.wire_hidden_s


def test_an_earlier_run_knows_the_wire_best() -> None:
    seen = healthy.gpu()
    for name in NAMES:
        seen = with_file(seen, name, gpu_file(name, sync_s=0.7))
    made = make(seen, healthy.recipe())
    assert made.time and made.time.wire_s == pytest.approx(0.7) and made.time.wire_because == "measured by an earlier run"
    alone = make(replace(seen, cluster=seen.cluster.only(("tower", "laptop"))), healthy.recipe())
    assert alone.time and alone.time.wire_s == pytest.approx(0.7 * 3 / 4) and "with 3 ranks" in alone.time.wire_because
    made = make(seen, healthy.recipe(parallel={"compress": "bf16"}))
    assert made.time and made.time.wire_s < 0.7, "measured without compression"
    made = make(seen, healthy.recipe(parallel={"bucket_mb": 1.0}))
    assert made.time and made.time.wire_s < 0.7 and "measured by" not in made.time.wire_because, "measured with other buckets"


def test_the_rows_of_a_typical_batch_are_as_different_as_those_that_were_counted() -> None:
    draw = random.Random(1)
    lengths = sorted(min(512, max(4, round(math.exp(draw.gauss(4, 0.8))))) for _ in range(2000))
    quantiles = tuple(float(lengths[round(part * 1999 / 32)]) for part in range(33))
    mean = statistics.fmean(lengths)
    counted = Rows(2000, mean, True, "", quantiles).lengths(60, 512)
    assert len(counted) == 60 and statistics.fmean(counted) == pytest.approx(mean, rel=0.02)
    assert statistics.median(counted) == pytest.approx(lengths[1000], rel=0.15) and max(counted) > 3 * mean
    assert max(Rows(2000, mean, True, "").lengths(60, 512)) < 1.5 * mean, "unless they were counted, nothing is known of the long ones"


@pytest.mark.parametrize(
    ("config", "backend", "words"),
    [
        ({}, "transformers", ""),
        ({"sliding_window": None}, "transformers", ""),
        ({"sliding_window": 4096, "use_sliding_window": False}, "transformers", ""),
        ({"sliding_window": 4096}, "transformers", "its config has sliding_window"),
        ({"text_config": {"layer_types": ["full_attention", "sliding_attention"]}}, "transformers", "layers with sliding_attention"),
        ({"attn_logit_softcapping": 50.0}, "transformers", "its config has attn_logit_softcapping"),
        ({}, "unsloth", "Unsloth has its own attention"),
    ],
)
def test_where_the_worker_pads_the_plan_counts_the_padding(config: dict[str, Any], backend: str, words: str) -> None:
    seen = healthy.cpu()
    for name in NAMES:
        seen = healthy.with_facts(seen, name, model={"found": True, "config": {**healthy.LLAMA, **config}})
    recipe = healthy.recipe(method={"kind": "lora", "backend": backend}, parallel={"micro_batch": 4})
    data = {"train": DataFile(160_000, 100, "x")}  # 400 tokens a row, half as many to half as many again
    made, plain = (make(all_measured(one), recipe, data=data) for one in (seen, healthy.cpu()))
    if backend == "unsloth":  # whose speed nobody has measured here
        assert attention.why_padded(recipe, seen.facts) == words
        return
    said = [choice.because for choice in made.choices if choice.subject == "padding"]
    assert (words in said[0]) if words else not said
    assert made.time is not None and plain.time is not None
    assert (made.time.step_s > 1.02 * plain.time.step_s) is bool(words)


def test_each_strategy_has_the_wire_that_it_had() -> None:
    """A file knows the wire of several strategies; the newest run's alone is not that of the others."""
    from homelab.controller.planning.speed.speed_profiles import SpeedProfile

    content = file("tower")
    syncs = [
        {"strategy": "zero2", "compress": "none", "world_size": 3, "sync_s": 0.2},
        {"strategy": "ddp", "compress": "none", "world_size": 2, "sync_s": 0.4},
    ]
    new = SpeedProfile.model_validate(content | {"world_size": 1, "sync_s": None, "syncs": syncs})
    assert [(sync.strategy, sync.world_size) for sync in new.syncs] == [("zero2", 3), ("ddp", 2)]


def test_a_step_also_costs_what_ranks_wait_for_each_other() -> None:
    """Measured by earlier runs: on average the last rank ends later than the rank that ends last on average."""
    seen = all_measured(healthy.cpu(healthy.recipe()))
    plain = make(seen, healthy.recipe()).time
    for name, token_s in zip(NAMES, (1e-3, 2e-3, 4e-3), strict=True):
        syncs = [{"strategy": "ddp", "compress": "none", "world_size": 3, "sync_s": 0.05, "wait_s": 0.5}]
        seen = with_file(seen, name, file(name, token_s=token_s, syncs=syncs))
    waiting = make(seen, healthy.recipe()).time
    assert plain and waiting and plain.wait_s == 0 and waiting.wait_s == pytest.approx(0.5)
    assert waiting.step_s == pytest.approx(plain.step_s + 0.5) and waiting.wire_s == plain.wire_s
