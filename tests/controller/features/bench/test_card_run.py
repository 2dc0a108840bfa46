"""`homelab bench card`: which card is measured with what, what its row says, and what a node that errs, lies or falls silent leads to."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.attempt import card_table
from homelab.controller.base.errors import HomelabError, InputError, UnreachableError
from homelab.controller.checks.evidence import Evidence
from homelab.controller.features.bench import card_recipe, card_run
from homelab.controller.features.bench.card_run import MeasuredCardSpeed
from homelab.controller.planning import plan as planning
from homelab.controller.planning.speed.measured_cards import MeasuredCard
from homelab.shared.protocol.collective_stages import DONE, TRAINING
from homelab.shared.protocol.message import as_json
from tests import builders
from tests.controller.checks import healthy
from tests.fakes import FakeFleet

GIB = 2**30
ENDED = {"returncode": 0, "left": [], "log": [], "errors": []}
GOOD = {"tokens_per_s": 3500.04, "peak_bytes": 6 * GIB, "steps": 20, "torch": "2.13.0+cu130"}
NODE = "tower"  # an RTX 5070 Ti


def line(stage: str = DONE, *, ended: Any = None, **state: Any) -> dict[str, Any]:
    return {"phase": "waiting for the other nodes", "ranks": {"0": {"pid": 7, "stage": stage, **state}}, "ended": ended}


def done(**changes: Any) -> dict[str, Any]:
    return line(results=[{**GOOD, **changes}], ended=ENDED)


def fleet_of(tmp_path: Path, *lines: Any, seen: Evidence | None = None) -> FakeFleet:
    """A fleet of the one node, that answers with these facts and says these lines while it measures."""
    fleet = FakeFleet(tmp_path, (NODE,))
    facts = healthy.changed((seen or healthy.gpu(names=(NODE,))).facts[NODE], runs={"alive": []})
    fleet.answer("facts", facts.model_dump(mode="json")).answer("free-port", {"port": 29777}).answer(
        "collective-end", {"asked": [], "killed": [], "left": []}
    )
    fleet.nodes[NODE].streams["collective"] = list(lines)
    return fleet


def measured(
    fleet: FakeFleet, kind: card_recipe.Kind = "lora", index: int | None = None, said: list[str] | None = None
) -> MeasuredCardSpeed:
    return card_run.measure(fleet, kind, index, (said if said is not None else []).append)


def asked(fleet: FakeFleet) -> dict[str, Any]:
    (request,) = [one for one in fleet.nodes[NODE].requests if one["verb"] == "collective"]
    return request


def test_the_row_of_a_card_and_what_the_node_was_told(tmp_path: Path) -> None:
    said: list[str] = []
    fleet = fleet_of(tmp_path, line(TRAINING, results=[{"step": 4, "tokens_per_s": 3400.4}]), done())
    found = measured(fleet, said=said)
    assert found.row.tokens_per_s == 3500.0 and found.row.peak_bytes == 6 * GIB and found.of_guess is not None and 0.4 < found.of_guess < 2
    assert (found.row.card, found.row.precision, found.row.driver) == (
        "NVIDIA GeForce RTX 5070 Ti",
        "bf16",
        "580.95.05",
    ) and found.row.homelab
    assert card_table.parse(card_table.written(found.row)) == found.row, "the table takes it as it is"
    assert "training, step 4, 3400 tokens/s" in said
    request = asked(fleet)
    assert request["command"][-2:] == list(card_run.PROGRAM) and request["ranks"] == 1 and "HOMELAB_RUN_DIR" not in request["environment"]
    assert request["input"]["shape"] == card_recipe.WIDE.shape.model_dump(exclude_none=True) and request["input"]["device"] == "cuda"
    assert fleet.nodes[NODE].opened[-1].is_closed and not fleet.verbs("collective-end"), "the node said itself that nothing is left"


def test_a_row_names_no_machine_and_no_person(tmp_path: Path) -> None:
    seen = healthy.gpu(names=(NODE,))
    text = card_table.written(measured(fleet_of(tmp_path, done())).row)
    facts, (node,) = seen.facts[NODE], seen.cluster.nodes
    card = facts.gpu.cards[0]
    secret = [NODE, node.host, facts.system.hostname, facts.system.user, facts.system.home, str(tmp_path), card.uuid, card.bus_id]
    assert not [word for word in secret if word and re.search(rf"\b{re.escape(word)}\b", text)]


def test_of_several_cards_one_is_measured_and_the_others_are_hidden(tmp_path: Path) -> None:
    seen = healthy.gpu(names=(NODE,))
    first = as_json(seen.facts[NODE].gpu.cards[0])
    second = {
        **first,
        "index": 1,
        "uuid": "GPU-2",
        "bus_id": "00000000:02:00.0",
        "name": "NVIDIA GeForce RTX 3090",
        "memory_total_bytes": 24 * GIB,
        "memory_free_bytes": 23 * GIB,
    }
    both = healthy.with_facts(seen, NODE, gpu={"cards": [first, second]})
    fleet = fleet_of(tmp_path, done(), seen=both)
    assert measured(fleet, index=1).row.card == "NVIDIA GeForce RTX 3090" and asked(fleet)["environment"]["CUDA_VISIBLE_DEVICES"] == "GPU-2"
    with pytest.raises(InputError, match=r"no card 7; it has 0 \(RTX 5070 Ti\), 1 \(RTX 3090\)"):
        measured(fleet_of(tmp_path, done(), seen=both), index=7)


def test_a_power_limit_and_a_memory_that_nobody_tells_are_left_out(tmp_path: Path) -> None:
    silent = healthy.card(
        healthy.gpu(names=(NODE,)), NODE, power_limit_w=None, power_limit_default_w=None, memory_total_bytes=None, memory_free_bytes=None
    )
    row = measured(fleet_of(tmp_path, done(), seen=silent)).row
    assert row.power_limit_w is None and row.memory_bytes is None and "null" not in card_table.written(row)


def test_an_old_card_trains_in_fp16_and_a_small_one_a_smaller_model(tmp_path: Path) -> None:
    small = {"memory_total_bytes": 4 * GIB, "memory_free_bytes": int(3.8 * GIB), "memory_used_bytes": 0}
    old = healthy.card(healthy.gpu(names=(NODE,)), NODE, name="NVIDIA GeForce GTX 1650", **small)
    fleet = fleet_of(tmp_path, done(tokens_per_s=300.0, peak_bytes=3 * GIB), seen=old)
    assert measured(fleet).row.precision == "fp16" and asked(fleet)["input"]["shape"]["hidden_size"] == card_recipe.NARROW.shape.hidden_size


def test_a_cpu_is_measured_too_and_a_card_without_a_data_sheet(tmp_path: Path) -> None:
    fleet = fleet_of(tmp_path, done(), seen=healthy.cpu(names=(NODE,)))
    found = measured(fleet)
    assert found.row.card == "CPU, 8 cores" and found.of_guess is None and asked(fleet)["input"]["precision"] == "fp32"
    unknown = healthy.card(healthy.gpu(names=(NODE,)), NODE, name="NVIDIA GeForce RTX 6090", compute_capability="13.0")
    assert measured(fleet_of(tmp_path, done(), seen=unknown)).of_guess is None


BUSY = {"holders": [{"pid": 12, "program": "python3", "type": "C"}]}


@pytest.mark.parametrize(
    ("facts", "card", "words", "hint"),
    [
        ({"runs": {"alive": ["2026-01-01-0000-run"]}}, {}, "a run is working", "homelab stop 2026-01-01-0000-run"),
        ({"python": {"packages": {}}}, {}, "has no torch", "homelab setup tower"),
        ({}, BUSY, "python3 (pid 12)", "homelab bench card tower"), ({}, {"memory_free_bytes": GIB}, "1.0 GiB of its memory is free", "--method qlora"),
        ({"system": {"memory_available_bytes": GIB}}, {}, "of the machine 1.0 GiB", "homelab bench card tower"),
    ],
)  # fmt: skip
def test_what_is_not_ready_is_refused_before_anything_starts(
    tmp_path: Path, facts: dict[str, Any], card: dict[str, Any], words: str, hint: str
) -> None:
    seen = healthy.with_facts(healthy.card(healthy.gpu(names=(NODE,)), NODE, **card), NODE, **facts)
    fleet = fleet_of(tmp_path, done())
    fleet.answer("facts", seen.facts[NODE].model_dump(mode="json"))
    with pytest.raises(HomelabError) as refused:
        measured(fleet)
    assert words in refused.value.message and hint in str(refused.value.hint) and not fleet.nodes[NODE].opened


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"tokens_per_s": 1e6}, "at most"), ({"tokens_per_s": "much"}, "not a measurement"), ({"tokens_per_s": float("nan")}, "not a measurement"),
        ({"tokens_per_s": None}, "not a measurement"),
        ({"tokens_per_s": -3.0}, "not a measurement"), ({"peak_bytes": 64 * GIB}, "more than the card's memory"), ({"peak_bytes": 10**30}, "not a measurement"),
        ({"torch": "\x1b[31m; rm -rf ~"}, "not a measurement"), ({"torch": "2" * 5000}, "not a measurement"),
    ],
)  # fmt: skip
def test_what_no_card_can_have_done_is_refused(tmp_path: Path, result: dict[str, Any], words: str) -> None:
    with pytest.raises(HomelabError, match=words) as refused:
        measured(fleet_of(tmp_path, done(**result)))
    assert "homelab doctor tower" in str(refused.value.hint) and "\x1b" not in str(refused.value)


def test_a_card_that_lies_of_its_memory_gives_no_row(tmp_path: Path) -> None:
    lying = healthy.card(healthy.gpu(names=(NODE,)), NODE, memory_total_bytes=128 * GIB, memory_free_bytes=120 * GIB)
    with pytest.raises(HomelabError, match=r"128.0 GiB, but a RTX 5070 Ti has 16.0 GiB"):
        measured(fleet_of(tmp_path, done(), seen=lying))


PARTS = "error: the card has no room for the test model: CUDA out of memory\nwhere: node tower\nfix: end what else uses the card"


@pytest.mark.parametrize(
    ("lines", "words", "kind"),
    [
        ([line(TRAINING, error=PARTS)], "no room for the test model", HomelabError), ([line(TRAINING, error="RuntimeError: no kernel image")], "no kernel image", HomelabError),
        ([{"phase": "starting torchrun", "ranks": {}, "ended": {**ENDED, "returncode": 1, "log": ["No module named torch.distributed"]}}], "No module named", HomelabError),
        ([{"phase": "starting torchrun", "ranks": {}, "ended": ENDED}], "printed nothing", HomelabError), ([b"not json\n"], "never sends", HomelabError),
        ([{"error": {"message": "no room on the disk"}}], "no room on the disk", HomelabError), ([b""], "connection to this node broke", UnreachableError),
    ],
)  # fmt: skip
def test_a_measurement_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, lines: list[Any], words: str, kind: type[HomelabError]
) -> None:
    fleet = fleet_of(tmp_path, *lines)
    with pytest.raises(HomelabError) as failed:
        measured(fleet)
    assert type(failed.value) is kind and words in failed.value.message and "tower" in failed.value.where and failed.value.hint
    assert fleet.verbs("collective-end") == [NODE] and fleet.nodes[NODE].opened[-1].is_closed


def test_a_node_that_falls_silent_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_run, "SILENT_S", 0.3)
    with pytest.raises(UnreachableError, match="did not answer"):
        measured(fleet_of(tmp_path, line(TRAINING)))


@pytest.mark.parametrize("kind", ["lora", "qlora"])
@pytest.mark.parametrize("recipe", [card_recipe.WIDE, card_recipe.NARROW], ids=["wide", "narrow"])
def test_each_shape_has_room_where_it_is_chosen_and_keeps_any_card_busy(recipe: card_recipe.CardRecipe, kind: card_recipe.Kind) -> None:
    """By the plan's own counting: below what is asked for, and no pass of the fastest card that gets it waits for the host."""
    row = MeasuredCard.model_validate(recipe.row(kind=kind, precision="bf16", card="RTX 3060 12GB", source="x", tokens_per_s=1.0))
    of_row = row.recipe()
    trained = of_row.model_copy(update={"train": replace(of_row.train, fused_loss=True)})
    cluster = builders.cluster(["n"], nodes={"n": {"gpus": [{"model": "RTX 3060 12GB", "vram_gb": 12}]}})
    inputs = builders.plan_inputs(cluster, trained, {}, config=json.loads(row.shape.model_dump_json(exclude_none=True)))
    memory = planning.make(inputs).ranks[0].memory
    assert memory is not None and 0.5 * recipe.needs_gib[kind] * GIB < memory.total_bytes < 0.92 * recipe.needs_gib[kind] * GIB
    fastest = "B200" if recipe is card_recipe.WIDE else "RTX 5060"
    quick = row.model_copy(update={"card": fastest}).guess()
    assert quick.pass_s(row.tokens) > 1.2 * quick.floor_s
    assert card_recipe.choose("cuda", kind, None, None) is card_recipe.WIDE and card_recipe.choose("cuda", kind, GIB, None) is None
