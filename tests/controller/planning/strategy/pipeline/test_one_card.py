"""What a pipeline is compared with: the best card alone, with what has no room in the host's memory."""

from __future__ import annotations

import dataclasses

import pytest

from homelab.controller.planning.memory_estimate import StreamingPlan
from homelab.controller.planning.pcie_link import PcieLink
from homelab.controller.planning.plan import make
from homelab.controller.planning.strategy.pipeline import one_card
from homelab.controller.planning.types import Plan
from homelab.controller.planning.work.job import TrainingJob
from tests import builders
from tests.builders import NAMES
from tests.controller.planning.strategy.test_pipeline import LLAMA_2_13B, job_of

MBIT = 1e6 / 8


def plan_of(cards_gb: list[float], *, wire: float = 1000 * MBIT) -> Plan:
    names = NAMES[: len(cards_gb)]
    nodes = {name: {"gpus": [{"model": "RTX 4090", "vram_gb": size}]} for name, size in zip(names, cards_gb, strict=True)}
    recipe = builders.recipe(
        model={"name": LLAMA_2_13B}, method={"kind": "qlora"}, train={"global_batch": 32, "learning_rate": 1e-4, "steps": 10, "seq_len": 1024},
        parallel={"strategy": "pipeline"},
    )  # fmt: skip
    throughputs = {(one, other): wire for one in names for other in names if one != other}
    return make(dataclasses.replace(builders.plan_inputs(builders.cluster(names, nodes=nodes), recipe, {}), throughputs=throughputs))


def alone(cards_gb: list[float]) -> one_card.OneCard | None:
    job = job_of([[size] for size in cards_gb])
    assert isinstance(job, TrainingJob)
    return one_card.fastest(job)


def test_a_card_with_room_sends_nothing() -> None:
    card = alone([24, 8, 8])
    assert card is not None and (card.node, card.streamed_bytes) == ("tower", 0)
    assert "which has room for the whole model" in card.against(1e9)


def test_what_has_no_room_is_sent_and_costs_time() -> None:
    roomy, tight = alone([24, 8, 8]), alone([7, 6, 6])
    assert roomy is not None and tight is not None
    assert tight.node == "tower" and 0 < tight.streamed_bytes < tight.layers_bytes and tight.tokens_per_s < roomy.tokens_per_s
    assert "of its layers in its host's memory, at 12 GB/s (assumed): " in tight.against(500)


def test_the_rate_of_a_known_link_is_said_beside_the_pipeline() -> None:
    link = PcieLink(generation=4, lanes=8)
    streaming = StreamingPlan(layers=4, group=2, host="memory", places=2, layer_bytes=10**9, bytes_per_s=link.bytes_per_s, link=link)
    card = one_card.OneCard("tower", streaming, 10**10, 500.0)
    assert (
        "with 4 of 10 GB of its layers in its host's memory, at 12.6 GB/s (by its link: PCIe 4.0, 8 lanes): 500 tokens/s"
        in card.against(400)
    )
    instead = card.instead_of(400)
    assert instead is not None
    assert instead.because.startswith(
        "alone with 4 GB of layers from its host's memory at 12.6 GB/s (by its link: PCIe 4.0, 8 lanes) it does"
    )


def test_a_card_that_cannot_hold_what_must_be_there() -> None:
    assert alone([1, 1, 1]) is None


def test_the_plan_says_it_beside_the_pipeline() -> None:
    plan = plan_of([7, 6, 6])
    assert plan.strategy == "pipeline" and plan.time is not None
    assert any(
        text.startswith("tower alone, with ") and text.endswith(f"as a pipeline {plan.time.tokens_per_s:.0f}") for text in plan.time.verdict
    )
    assert not any("stay on" in text for text in plan.time.verdict)


@pytest.mark.parametrize("cards_gb", [[24.0, 8.0, 8.0], [7.0, 6.0, 6.0]])
def test_a_wire_of_1_mbit_is_priced_and_not_refused(cards_gb: list[float]) -> None:
    plan = plan_of(cards_gb, wire=MBIT)
    assert plan.strategy == "pipeline" and plan.time is not None
    # 32 rows of 1024 tokens of 5120 values of 2 bytes: 336 MB each way at 125 kB/s
    assert plan.time.step_s > 336e6 / MBIT and plan.time.wire_s > 0.9 * plan.time.step_s
    text = "\n".join(plan.time.verdict)
    assert "the network takes more than 10% of a step" in text
    assert "stay on tower" in text and "--nodes tower" in text
    assert ("of layers from its host's memory" in text) is (cards_gb[0] == 7.0)
