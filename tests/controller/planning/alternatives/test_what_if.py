"""Machines that nobody has yet, and nodes that go: parsed, put into the plan, refused with the nearest that can be."""

from __future__ import annotations

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.recipe import Recipe
from homelab.controller.planning.alternatives import what_if
from homelab.controller.planning.render import time_table
from homelab.controller.planning.types import Plan
from homelab.shared.protocol import memory_items
from tests import builders
from tests.controller.checks import healthy
from tests.controller.planning.speed.test_speeds import all_measured, gpu_file, with_file

NAMES = healthy.NAMES
GPUS = healthy.gpu(healthy.recipe())


def changed(seen: Evidence, *texts: str, recipe: Recipe | None = None, device: str = "cuda") -> tuple[Plan, Plan]:
    """(as it is, as it would be)."""
    wanted = recipe or healthy.recipe()
    changes = what_if.parse(texts, seen.cluster, device=device)
    wanted = what_if.recipe_for(changes, wanted)
    cluster, facts = what_if.apply(changes, seen.cluster, seen.facts)
    facts, throughputs = what_if.with_wire(changes, cluster, facts, {})
    before, after = (
        builders.make_plan(of, wanted, known, throughputs=rates)
        for of, known, rates in ((seen.cluster, seen.facts, {}), (cluster, facts, throughputs))
    )
    return before, after


@pytest.mark.parametrize(
    "text",
    [
        "+RTX3090",
        *(pytest.param(text, marks=pytest.mark.thorough) for text in ("+rtx 3090", "+1xRTX3090", "+NVIDIA GeForce RTX 3090")),
        "+1x RTX 3090",
    ],
)
def test_one_more_machine(text: str) -> None:
    large = healthy.recipe(train={"global_batch": 600, "steps": 10, "learning_rate": 1e-3})  # with few rows a step is mostly wire
    before, after = changed(GPUS, text, recipe=large)
    assert [rank.device_name for rank in after.ranks][3:] == ["RTX 3090"] and after.world_size == 4
    new = after.ranks[3]
    assert new.node == "new-RTX-3090" and new.memory and new.memory.available_bytes == int(24 * 2**30 * 0.995) and new.memory.fits
    assert memory_items.HELD not in [item.name for item in new.memory.items], "all of its memory is free"
    assert before.time and after.time and after.time.tokens_per_s > 1.3 * before.time.tokens_per_s
    assert [rank.device_name for rank in after.ranks[:3]] == [rank.device_name for rank in before.ranks]


def test_two_cards_in_one_machine_and_twice_the_same() -> None:
    _, after = changed(GPUS, "+2xRTX3090")
    assert [(rank.node, rank.local_rank) for rank in after.ranks[3:]] == [("new-RTX-3090", 0), ("new-RTX-3090", 1)]
    _, after = changed(GPUS, "+RTX3090", "+RTX3090", "-laptop")
    assert [rank.node for rank in after.ranks] == ["tower", "oldtower", "new-RTX-3090", "new-RTX-3090-2"]
    text = time_table.before_and_after(*changed(GPUS, "-laptop"), ["now", "-laptop"])
    from rich.console import Console

    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(text)
    shown = console.export_text()
    for words in ("tokens/s", "efficiency", "on the wire", "fits", "yes", "-laptop", "partly guessed"):
        assert words in shown


def test_a_new_card_is_scaled_by_what_was_measured() -> None:
    seen = GPUS
    guess = changed(seen, "+RTX3090")[1].ranks[3].speed
    for name in NAMES:
        slow = {"local_rank": 0, "step_s": 0.0, "micro_batch_s": 0.0, "token_s": 1.0}
        seen = with_file(seen, name, gpu_file(name, ranks=[slow]))
    found = changed(seen, "+RTX3090")[1].ranks[3].speed
    assert guess and found and found.token_s > 100 * guess.token_s


def test_without_a_node() -> None:
    before, after = changed(all_measured(healthy.cpu(healthy.recipe())), "-oldtower", device="cpu")
    assert [rank.node for rank in after.ranks] == ["tower", "laptop"] and after.left_out == ()
    assert before.time and after.time
    gain = next(gain.gain for gain in before.time.gains if gain.node == "oldtower")
    assert before.time.tokens_per_s / after.time.tokens_per_s - 1 == pytest.approx(gain, abs=0.01), "what the plan said it adds"


def test_a_table_of_shares_gives_way_to_speeds() -> None:
    table = healthy.recipe(parallel={"shares": {"tower": 6, "laptop": 4, "oldtower": 2}})
    _, after = changed(GPUS, "+RTX3090", recipe=table)
    assert sum(rank.share for rank in after.ranks) == 12 and len(after.ranks) == 4 and after.balance == "measured"
    _, after = changed(GPUS, "-laptop", recipe=table)
    assert [rank.share for rank in after.ranks] == [9, 3] and after.balance == "fixed"


@pytest.mark.parametrize(
    ("text", "device", "words"),
    [
        ("+RTX3091", "cuda", 'Did you mean "RTX 3090"?'),
        ("+RTX 5070Ti Labtop", "cuda", 'Did you mean "RTX 5070 Ti Laptop"?'),
        ("+", "cuda", "neither a machine to add nor a node to remove"),
        ("-", "cuda", "neither a machine to add nor a node to remove"),
        ("RTX3090", "cuda", "--what-if +RTX3090"),
        ("laptop", "cuda", "--what-if -laptop"),
        ("-labtop", "cuda", 'Did you mean "laptop"?'),
        ("+0xRTX3090", "cuda", "0 cards in one machine"),
        ("+99xRTX3090", "cuda", "99 cards in one machine"),
        ("+RTX3090", "cpu", "this cluster trains on CPUs"),
        ("+$(touch pwned)", "cuda", "no data sheet of a card named"),
        ("wire=fast", "cuda", "is no wire"),
        ("wire=0gbit", "cuda", "is no wire"),
        ("wire=2.5", "cuda", "wire=2.5gbit"),
    ],
)
def test_what_cannot_be(text: str, device: str, words: str) -> None:
    with pytest.raises(InputError) as caught:
        what_if.parse([text], healthy.gpu().cluster, device=device)
    assert words in f"{caught.value.message} {caught.value.hint}" and "--what-if" in caught.value.where and caught.value.hint


@pytest.mark.parametrize(("text", "times"), [("wire=2.5gbit", 2.5), ("wire=100mbit", 0.1), ("WIRE=10 Gbit/s", 10.0), ("wire=1gbit", 1.0)])
def test_another_wire(text: str, times: float) -> None:
    before, after = changed(GPUS, text)
    assert (
        before.time
        and after.time
        and (before.time.wire_s + before.time.wire_hidden_s) == pytest.approx(times * (after.time.wire_s + after.time.wire_hidden_s))
    )
    assert (after.time.tokens_per_s > before.time.tokens_per_s) == (times > 1) or times == 1


def test_seconds_on_the_wire_that_were_measured_go_with_it() -> None:
    before, after = changed(all_measured(GPUS), "wire=2gbit")
    assert before.time and after.time and before.time.wire_s == pytest.approx(2 * after.time.wire_s)


def test_so_do_those_of_each_strategy_and_number_of_ranks() -> None:
    seen = GPUS
    for name in NAMES:
        syncs = [{"strategy": "ddp", "compress": "none", "world_size": 3, "sync_s": 0.4, "wait_s": 0.1}]
        seen = with_file(seen, name, gpu_file(name, world_size=1, sync_s=None, syncs=syncs))
    before, after = changed(seen, "wire=2gbit")
    assert before.time and after.time and (before.time.wire_s, after.time.wire_s) == pytest.approx((0.4, 0.2))
    assert [before.time.wait_s, after.time.wait_s] == pytest.approx([0.1, 0.1]), "ranks wait for each other with any wire"


def test_an_assumed_wire_is_said() -> None:
    cluster = GPUS.cluster
    changes = what_if.parse(["wire=2.5gbit"], cluster, device="cuda")
    assert what_if.assumed(changes, cluster, {}) == [
        "wire=2.5gbit is assumed between all nodes, 294.0 MB/s; the present network was not measured: 1 Gbit/s is assumed"
    ]
    rates = {(source, target): 80e6 for source in NAMES for target in NAMES if source != target}
    assert what_if.assumed(changes, cluster, rates)[0].endswith("measured now: 80.0 MB/s on the slowest pair")
    assert what_if.assumed(what_if.parse(["-laptop"], cluster, device="cuda"), cluster, {}) == []


def test_somebody_has_to_stay() -> None:
    cluster = healthy.gpu().cluster
    gone = [f"-{name}" for name in NAMES]
    with pytest.raises(InputError, match="no node is left"):
        what_if.parse(gone, cluster, device="cuda")
    assert len(what_if.parse([*gone, "+RTX3090"], cluster, device="cuda")) == 4
