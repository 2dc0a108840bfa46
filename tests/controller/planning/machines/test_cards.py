"""Which cards of a node are ranks, from recorded answers of nvidia-smi: an old one beside the one that trains, and cards that came, went or moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from homelab.controller.base.errors import InputError
from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Evidence, Finding
from homelab.controller.planning.machines import cards
from homelab.controller.planning.render import plan_table
from homelab.node.probes import nvidia
from homelab.shared.protocol.message import as_json
from tests.controller.checks import healthy
from tests.controller.checks.fake_gpu import reply
from tests.controller.planning.test_plan import make, why

FIRST, SECOND = "GPU-aaaaaaaa-aaaa-aaaa-aaaa-aaaaaaaaaaaa", "GPU-bbbbbbbb-bbbb-bbbb-bbbb-bbbbbbbbbbbb"
RTX = {"model": "RTX 4090", "vram_gb": 24}


def two_cards(
    first: str = "NVIDIA GeForce GT 1030", second: str = "NVIDIA GeForce RTX 4090", *, gpus: tuple[dict[str, Any], ...] = (RTX,)
) -> Evidence:
    """Tower has two cards, as a driver said it of two RTX 4090; cluster.toml names `gpus`. Torch has no kernels for a GT 1030."""
    text = reply("nvidia-smi-550-two-rtx4090.xml").replace("NVIDIA GeForce RTX 4090", first, 1)
    position = text.rindex("NVIDIA GeForce RTX 4090")
    text = text[:position] + second + text[position:].removeprefix("NVIDIA GeForce RTX 4090")
    answer = nvidia.parse(text)
    devices = [
        {"name": card["name"], "uuid": card["uuid"], "capability": [6, 1] if "1030" in card["name"] else [8, 9], "bf16": True, "matmul_ok": "1030" not in card["name"],
         "error": None}
        for card in answer["cards"]
    ]  # fmt: skip
    seen = healthy.with_node(healthy.gpu(healthy.recipe()), "tower", gpus=gpus)
    probe = {**(seen.facts["tower"].gpu.torch or {}), "devices": devices}
    return healthy.with_facts(seen, "tower", gpu={**answer, "torch": probe}, xid=[{"code": 79, "bus_id": "0000:01:00"}])


def gathered(seen: Evidence) -> Evidence:
    """As `homelab.controller.features.preflight.gather` hands it on."""
    return replace(seen, facts={node.name: cards.chosen(node, seen.facts[node.name]) for node in seen.cluster.nodes})


def findings(seen: Evidence) -> list[Finding]:
    return [finding for check in registry.subject("gpu").checks for finding in check.judge(seen) if finding.node in ("tower", "")]


def test_an_old_card_for_the_display_is_no_rank_and_no_fault() -> None:
    seen = two_cards()
    raw = {finding.check for finding in findings(seen)}
    assert {"gpu.kernels", "gpu.xid"} <= raw, "as a rank it would fail the node"
    chosen = gathered(seen)
    assert not [finding for finding in findings(chosen) if finding.level == "fail" or "GPU 0" in finding.message]
    facts = chosen.facts["tower"]
    assert [card.uuid for card in facts.gpu.cards] == [SECOND] and [card.uuid for card in facts.gpu.left_out] == [FIRST]
    assert registry.subject("gpu").summary(chosen, chosen.cluster.node("tower"), facts).endswith("GT 1030 is left out")
    for known in (seen, chosen):  # a choice made twice is the same choice
        made = make(known)
        tower = made.node("tower")
        assert tower.rank_count == 1 and made.world_size == 3
        assert made.ranks[0].card == SECOND and "4090" in made.ranks[0].device_name
        assert tower.environment["CUDA_VISIBLE_DEVICES"] == SECOND
        assert [(card.index, card.name) for card in tower.spare_cards] == [(0, "NVIDIA GeForce GT 1030")]
        assert why(made, "GPU 0 of tower")[0] == "left out"
        assert "GPU 0 of tower (GT 1030) is left out" in plan_table.text(made)


def test_all_cards_take_part_where_none_or_all_are_named() -> None:
    for gpus in ((), (RTX, RTX), ({"model": "RTX 5070 Ti", "vram_gb": 16}, RTX)):
        seen = two_cards("NVIDIA GeForce RTX 4090", gpus=gpus)
        made = make(seen)
        assert made.node("tower").environment["CUDA_VISIBLE_DEVICES"] == f"{FIRST},{SECOND}"
        assert [rank.card for rank in made.ranks[:2]] == [FIRST, SECOND] and made.node("tower").spare_cards == ()


@pytest.mark.parametrize(
    ("named", "visible"),
    [
        ({**RTX, "uuid": SECOND}, SECOND), ({**RTX, "uuid": "GPU-AAAA"}, FIRST), ({**RTX, "index": 1}, SECOND), ({**RTX, "index": 0}, FIRST), (RTX, FIRST),
    ],
)  # fmt: skip
def test_one_of_two_twins_is_chosen(named: dict[str, Any], visible: str) -> None:
    seen = two_cards("NVIDIA GeForce RTX 4090", gpus=(named,))
    assert make(seen).node("tower").environment["CUDA_VISIBLE_DEVICES"] == visible
    assert not [finding for finding in findings(gathered(seen)) if finding.check == "gpu.inventory"]


def test_the_order_is_that_of_the_machine_however_they_are_named() -> None:
    seen = two_cards(gpus=({**RTX, "uuid": SECOND}, {"model": "GT 1030", "vram_gb": 24, "uuid": FIRST}))
    assert make(seen).node("tower").environment["CUDA_VISIBLE_DEVICES"] == f"{FIRST},{SECOND}"


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (({**RTX, "uuid": "GPU-cccc"},), "names the card GPU-cccc, but it is not there"),
        (({**RTX, "uuid": SECOND}, {**RTX, "uuid": "GPU-cccc"}), "names the card GPU-cccc, but it is not there"),
        (({**RTX, "index": 2},), "names the card GPU 2, but it is not there"),
        (({**RTX, "index": 0},), 'GPU 0 is a "RTX 4090", but it is a GT 1030'),
        (({**RTX, "uuid": FIRST},), f'{FIRST} is a "RTX 4090", but it is a GT 1030'),
        (({"model": "RTX 3070 Ti", "vram_gb": 8},), 'names the card "RTX 3070 Ti", but it is not there'),
    ],
)
def test_a_card_that_is_gone_or_another_one_is_told_with_node_card_and_edit(gpus: tuple[dict[str, Any], ...], said: str) -> None:
    seen = two_cards(gpus=gpus)
    (finding,) = [finding for finding in findings(gathered(seen)) if finding.check == "gpu.inventory"]
    with pytest.raises(InputError) as caught:
        make(seen)
    assert (finding.level, finding.node) == ("fail", "tower")
    for message, hint in ((finding.message, finding.hint), (caught.value.message, caught.value.hint)):
        assert said in message and f"GPU 1 is a RTX 4090 ({SECOND})" in message
        assert hint.startswith("edit cluster.toml, node tower: gpus = [{ model =")
        assert SECOND in hint or gpus[0]["model"] == "RTX 3070 Ti", "who points at a card gets the others to point at"
    assert "tower" in caught.value.where


def test_the_beginning_of_a_uuid_is_one_card_s() -> None:
    """Of "GPU-aaaaaaaa-..." and another one that begins as it does."""
    twin = FIRST[:-1] + "b"
    before = two_cards("NVIDIA GeForce RTX 4090")
    entries = [as_json(card) for card in before.facts["tower"].gpu.cards]
    both = healthy.with_facts(before, "tower", gpu={"cards": [entries[0], {**entries[1], "uuid": twin}], "torch": None})
    with pytest.raises(InputError, match=r"GPU-aaaa of cluster\.toml is the beginning of several uuids") as caught:
        make(healthy.with_node(both, "tower", gpus=({**RTX, "uuid": "GPU-aaaa"},)))
    assert "(GPU 0, GPU 1)" in caught.value.message and twin in caught.value.hint
    one = healthy.with_node(before, "tower", gpus=({**RTX, "uuid": "GPU-aa"}, {**RTX, "uuid": SECOND}))
    assert make(one).node("tower").rank_count == 2
    whole = healthy.with_node(both, "tower", gpus=({**RTX, "uuid": FIRST},))
    assert make(whole).node("tower").environment["CUDA_VISIBLE_DEVICES"] == FIRST


def test_cards_that_changed_their_places_stay_the_same_ranks() -> None:
    """Between two attempts the cards were put into each other's slots: by uuid nothing changes, by number it is told."""
    before = two_cards(gpus=({**RTX, "uuid": SECOND},))
    entries = [as_json(card) for card in before.facts["tower"].gpu.cards]
    moved = healthy.with_facts(before, "tower", gpu={"cards": [{**entries[1], "index": 0}, {**entries[0], "index": 1}]})
    assert make(before).ranks[0].card == make(moved).ranks[0].card == SECOND
    by_number = healthy.with_node(moved, "tower", gpus=({**RTX, "index": 1},))
    with pytest.raises(InputError, match='GPU 1 is a "RTX 4090", but it is a GT 1030'):
        make(by_number)


def test_cards_without_uuids_go_by_number() -> None:
    """Where nvidia-smi's XML could not be read."""
    seen = two_cards()
    entries = [{**as_json(card), "uuid": None} for card in seen.facts["tower"].gpu.cards]
    probe = dict(seen.facts["tower"].gpu.torch or {})
    bare = healthy.with_facts(
        seen, "tower", gpu={"cards": entries, "torch": {**probe, "devices": [{**device, "uuid": None} for device in probe["devices"]]}}
    )
    assert make(bare).node("tower").environment["CUDA_VISIBLE_DEVICES"] == "1"
    assert not [finding for finding in findings(gathered(bare)) if finding.level == "fail"]
