"""The memory of a card that a plan may count on: the driver's part, MIG's, what was measured beside torch, Turing's attention, WSL2."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.recipe import Recipe
from homelab.controller.planning.memory import dry_run, rank_memory, recipe_edits, scenario
from homelab.controller.planning.memory.rank_memory import RankSetup
from homelab.controller.planning.model.families import from_config
from homelab.controller.planning.types import Plan, RankPlan
from homelab.node.probes import nvidia
from homelab.shared.protocol import memory_items
from homelab.shared.protocol.memory_items import BASE_WEIGHTS, WORKING_SET
from tests import builders
from tests.controller.checks import healthy
from tests.controller.checks.fake_gpu import reply
from tests.controller.planning.speed.test_speeds import gpu_file, with_file

MIB = healthy.MIB


def gpu(*names: str) -> Evidence:
    return healthy.gpu(healthy.recipe(), names or healthy.NAMES)


def planned(seen: Evidence, recipe: Recipe | None = None) -> Plan:
    return builders.make_plan(seen.cluster, recipe or healthy.recipe(), seen.facts)


def rank_of(made: Plan, node: str) -> RankPlan:
    return next(rank for rank in made.ranks if rank.node == node)


def item(rank: RankPlan, name: str) -> int:
    assert rank.memory
    return sum(entry.size_bytes for entry in rank.memory.items if entry.name == name)


def recorded(seen: Evidence, node: str, name: str) -> Evidence:
    return healthy.with_facts(seen, node, gpu={"cards": nvidia.parse(reply(name))["cards"]})


@pytest.mark.parametrize(
    ("name", "held_mib", "total_mib"),
    [
        ("nvidia-smi-570-rtx4070-laptop.xml", 8188 - 7780, 8188),  # 18 MiB used, 390 reserved
        ("nvidia-smi-470-rtx3070ti.xml", 12, 8192),  # a driver that counts its own part as used
        ("nvidia-smi-535-a100-mig.xml", 20096 - 20059, 20096),  # one instance of two
    ],
)
def test_what_the_driver_keeps_is_not_free(name: str, held_mib: int, total_mib: int) -> None:
    rank = rank_of(planned(recorded(gpu(), "laptop", name)), "laptop")
    assert rank.memory and rank.memory.available_bytes == total_mib * MIB
    assert item(rank, memory_items.HELD) == held_mib * MIB


def test_without_the_word_free_the_reserve_is_taken_off() -> None:
    card = {"memory_total_bytes": 8188 * MIB, "memory_used_bytes": 18 * MIB, "memory_reserved_bytes": 390 * MIB}
    rank = rank_of(planned(healthy.card(gpu(), "laptop", **card)), "laptop")
    assert item(rank, memory_items.HELD) == 408 * MIB


def ranks(beside: int | None) -> list[dict[str, Any]]:
    return [
        {
            "local_rank": 0, "device_name": healthy.CARDS["tower"][0], "step_s": 0.01, "micro_batch_s": 0.02, "token_s": 1e-3,
            "beside_torch_bytes": beside,
        }
    ]  # fmt: skip


def test_what_a_run_has_measured_beside_torch_replaces_both_guesses() -> None:
    guessed = rank_of(planned(gpu()), "tower")
    assert (item(guessed, rank_memory.CONTEXT), item(guessed, rank_memory.COMMUNICATOR)) == (
        rank_memory.CONTEXT_BYTES,
        rank_memory.COMMUNICATOR_BYTES,
    )
    seen = with_file(gpu(), "tower", gpu_file("tower", ranks=ranks(612 * MIB)))
    made = planned(seen)
    rank = rank_of(made, "tower")
    assert (item(rank, rank_memory.CONTEXT), item(rank, rank_memory.COMMUNICATOR)) == (612 * MIB, 0), "NCCL's part is in it"
    assert item(rank_of(made, "laptop"), rank_memory.CONTEXT) == rank_memory.CONTEXT_BYTES, "of another node nothing is known"
    alone = planned(with_file(gpu(), "tower", gpu_file("tower", ranks=ranks(612 * MIB), world_size=1)))
    assert item(rank_of(alone, "tower"), rank_memory.COMMUNICATOR) == rank_memory.COMMUNICATOR_BYTES
    older = planned(with_file(gpu(), "tower", gpu_file("tower", ranks=ranks(None))))
    assert item(rank_of(older, "tower"), rank_memory.CONTEXT) == rank_memory.CONTEXT_BYTES

    shape, recipe = from_config(healthy.LLAMA), healthy.recipe()
    assert shape
    situation = scenario.of_plan(made, shape, seen.facts)
    assert situation and situation.ranks[0].measured == {rank_memory.CONTEXT: 612 * MIB, rank_memory.COMMUNICATOR: 0}
    wanted = dry_run.wanted_of(made, recipe, rank)
    result = {"peak_bytes": 1, "at": "x", "items": {BASE_WEIGHTS: 10**9}, "seconds": 1.0}
    after = rank_of(dry_run.applied(made, recipe, shape, "tower", [wanted], [result]), "tower")
    assert (item(after, rank_memory.CONTEXT), item(after, rank_memory.COMMUNICATOR)) == (612 * MIB, 0)


def test_measured_memory_decides_the_micro_batch() -> None:
    card = {"memory_total_bytes": 3 * healthy.GIB, "memory_used_bytes": 0}
    guessed = healthy.card(gpu("tower"), "tower", **card)
    measured = with_file(guessed, "tower", gpu_file("tower", ranks=ranks(1800 * MIB), world_size=1))
    assert rank_of(planned(measured), "tower").micro_batch < rank_of(planned(guessed), "tower").micro_batch


def test_on_turing_keys_are_repeated_and_counted() -> None:
    recipe = healthy.recipe(parallel={"strategy": "ddp"})  # which keeps an old card that makes it slower
    shape = from_config(healthy.LLAMA)
    assert shape
    about: dict[str, Any] = {"precision": "fp16", "device": "cuda", "micro_batch": 1, "world_size": 1}
    plain, repeated = (
        {
            entry.name: entry.size_bytes
            for entry in rank_memory.estimate(shape, recipe.method, recipe.train, RankSetup(**about, repeats_keys=repeats))
        }
        for repeats in (False, True)
    )
    more = 2 * 2 * (576 - 192) * recipe.train.seq_len  # k and v of one layer, as wide as q
    assert repeated[WORKING_SET] - plain[WORKING_SET] == more
    made = planned(healthy.card(gpu(), "oldtower", name="NVIDIA GeForce RTX 2060 Super"), recipe)
    assert made.precision == "fp16"
    wanted = {rank.node: dry_run.wanted_of(made, recipe, rank).repeats_keys for rank in made.ranks}
    assert wanted == {"tower": False, "laptop": False, "oldtower": True}
    situation = scenario.of_plan(made, shape, {})
    assert situation and [rank.repeats_keys for rank in situation.ranks] == [False, False, True]


def paged(**train: Any) -> Recipe:
    return healthy.recipe(train={**healthy.SECTIONS["train"], "optimizer": "paged_adamw_8bit", **train})


def test_paged_state_is_refused_inside_of_wsl() -> None:
    seen = healthy.with_facts(gpu(), "laptop", network={"wsl": "mirrored"})
    with pytest.raises(InputError, match="paged_adamw_8bit cannot page on laptop") as refused:
        planned(seen, paged())
    assert "adamw_8bit" in refused.value.hint and "optimizer" in refused.value.where
    assert planned(gpu(), paged()).ranks
    assert planned(healthy.with_facts(healthy.cpu(healthy.recipe()), "laptop", network={"wsl": "mirrored"}), paged()).ranks, (
        "a CPU pages nothing"
    )
    shape = from_config(healthy.LLAMA)
    assert shape
    for facts, offered in ((gpu().facts, True), (seen.facts, False)):
        situation = scenario.of_plan(planned(gpu()), shape, facts)
        assert (
            situation and any(edit.value == "paged_adamw_8bit" for edit in recipe_edits._candidates(healthy.recipe(), situation)) is offered
        )


def test_inside_of_wsl_a_full_card_spills_without_a_word() -> None:
    tight = healthy.recipe(parallel={"micro_batch": 1})
    need = rank_of(planned(gpu(), tight), "laptop").memory
    assert need
    seen = healthy.card(gpu(), "laptop", memory_total_bytes=round(need.total_bytes / 0.9), memory_used_bytes=300 * MIB)
    assert not [text for text in planned(seen, tight).warnings if "Sysmem" in text]
    seen = healthy.with_facts(seen, "laptop", network={"wsl": "mirrored"})
    (text,) = [text for text in planned(seen, tight).warnings if "Sysmem" in text]
    assert "rank 1 on laptop fills 90% of its card" in text and "Prefer No Sysmem Fallback" in text
    roomy = healthy.with_facts(gpu(), "laptop", network={"wsl": "mirrored"})
    assert not [text for text in planned(roomy, tight).warnings if "Sysmem" in text]
