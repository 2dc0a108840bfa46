"""What is believed of the ranks' speeds, and from where: measured, scaled, the owner's word, a data sheet, equal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from homelab.controller.base.hardware import lookup
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.planning.machines.machines import Machines
from homelab.controller.planning.model.adapters import WITH_EXPERTS
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.model.families import from_config, known
from homelab.controller.planning.speed import roofline, speed_profiles
from homelab.controller.planning.speed.measured_cards import MeasuredCard
from homelab.controller.planning.types import Plan
from homelab.controller.planning.work.speed_estimate import Guessing, SpeedEstimate, estimate_speeds
from homelab.shared.law.speed import Speed
from homelab.shared.protocol.message import as_json
from homelab.shared.recipe import Method, Train
from tests import builders
from tests.controller.checks import healthy

NAMES = healthy.NAMES
DAY_S = 86_400.0
SHAPE = from_config(healthy.LLAMA)
TOKENS = 100.0


def file(name: str = "tower", *, device_name: str = "CPU, 8 cores", token_s: float = 1e-3, **changes: Any) -> dict[str, Any]:
    """A node's file of measured speeds as the worker writes it, for the healthy recipe."""
    written = {
        "schema": 1, "model": "~/models/smol", "method": {"kind": "lora", "rank": 16, "targets": "all-linear"}, "precision": "fp32",
        "device": "cpu", "gradient_checkpointing": True, "fused_loss": True, "torch": "2.13.0+cpu", "measured_at": 1e9 - DAY_S,
        "run": "2026-01-01-0000-smol", "world_size": 3, "sync_s": 0.05, "save_s": 0.4, "evaluate_s": None, "rows": 500,
        "row_tokens_mean": 61.2, "data_sha256": "ab" * 32, "seq_len": 1024,
        "ranks": [{"local_rank": 0, "device_name": device_name, "step_s": 0.01, "micro_batch_s": 0.02, "token_s": token_s, "steps": 40}],
        **changes,
    }  # fmt: skip
    if isinstance(written["world_size"], int) and written["world_size"] > 1 and written["sync_s"] is not None:
        wire = {"strategy": "ddp", "compress": "none", "world_size": written["world_size"], "sync_s": written["sync_s"]}
        written.setdefault("syncs", [wire])
    return written


def gpu_file(name: str, **changes: Any) -> dict[str, Any]:
    """The same of a node with a card."""
    changes = {"device": "cuda", "precision": "bf16", "torch": "2.13.0+cu130", **changes}
    return file(name, device_name=healthy.CARDS[name][0], **changes)


def with_file(seen: Evidence, name: str, content: dict[str, Any] | None, problem: str | None = None) -> Evidence:
    return healthy.with_facts(
        seen, name, speed_profiles={"path": "/home/me/homelab/speeds/smol-lora.json", "found": True, "problem": problem, "content": content}
    )


def belief(
    seen: Evidence,
    recipe: TrainRecipe | None = None,
    *,
    device: str = "cpu",
    precision: str = "fp32",
    shape: Architecture | None = SHAPE,
    by_others: tuple[MeasuredCard, ...] = (),
) -> tuple[SpeedEstimate, tuple[str, ...]]:
    wanted = recipe or healthy.recipe()
    files, warnings = speed_profiles.usable(wanted, seen.cluster.nodes, seen.facts, device, precision)
    machines = Machines(device, seen.cluster.nodes, seen.facts)
    return estimate_speeds(wanted, machines, Guessing(precision, shape, by_others), TOKENS, files), warnings


def all_measured(seen: Evidence, costs: tuple[float, ...] = (1e-3, 2e-3, 4e-3)) -> Evidence:
    for name, token_s in zip(seen.facts, costs, strict=True):
        seen = with_file(seen, name, file(name, token_s=token_s))
    return seen


def test_measured_on_all() -> None:
    found, warnings = belief(all_measured(healthy.cpu()))
    assert found.speeds == {name: (Speed(0.01, 0.02, cost),) for name, cost in zip(NAMES, (1e-3, 2e-3, 4e-3), strict=True)}
    assert set(found.sources.values()) == {"measured"} and not warnings
    assert "2026-01-01-0000-smol" in found.choice.because and found.choice.value == "tower 55%, laptop 30%, oldtower 16%"
    assert found.weights["tower"][0] == pytest.approx(1 / 0.12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"measured_at": 1e9 - 31 * DAY_S}, "31 days old"),
        ({"torch": "2.12.0+cpu"}, "torch 2.12.0+cpu, and the node has 2.13.0+cpu now"),
        ({"torch": "2.13.0+cu130"}, "torch 2.13.0+cu130"),
        ({"model": "~/models/other"}, "another model"),
        ({"method": {"kind": "qlora", "rank": 16, "targets": "all-linear"}}, "another method (qlora, here lora)"),
        ({"method": {"kind": "lora", "base": "8bit", "rank": 16, "targets": "all-linear"}}, "another base (8bit, here auto)"),
        ({"method": {"kind": "lora", "rank": 8, "targets": "all-linear"}}, "another LoRA rank (8, here 16)"),
        ({"method": {"kind": "lora", "rank": 16, "targets": ["q_proj"]}}, "another LoRA targets (q_proj, here all-linear)"),
        ({"precision": "bf16"}, "another precision"),
        ({"device": "cuda"}, "another device"),
        ({"gradient_checkpointing": False}, "another gradient_checkpointing (false, here true)"),
        ({"fused_loss": False}, "another fused_loss"),
        ({"ranks": []}, "damaged: ranks"),
        ({"ranks": [{"local_rank": 0, "step_s": 0.1, "micro_batch_s": 0.1, "token_s": float("nan")}]}, "damaged: ranks.0.token_s"),
        ({"ranks": [{"local_rank": 0, "step_s": -1.0, "micro_batch_s": 0.1, "token_s": 0.1}]}, "damaged: ranks.0.step_s"),
        (
            {"ranks": [{"local_rank": n, "step_s": 0, "micro_batch_s": 0, "token_s": 1} for n in (0, 1)]},
            "2 processes, and the node has 1 now",
        ),
        (
            {"ranks": [{"local_rank": 0, "device_name": "CPU, 4 cores", "step_s": 0, "micro_batch_s": 0, "token_s": 1}]},
            "CPU, 4 cores, now CPU, 8 cores",
        ),
        ({"schema": 2}, "another version of homelab"),
        ({"world_size": "many"}, "damaged: world_size"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_that_says_nothing_here_is_left_with_its_reason(changes: dict[str, Any], words: str) -> None:
    seen = with_file(all_measured(healthy.cpu()), "laptop", file("laptop", **changes))
    found, warnings = belief(seen)
    assert len(warnings) == 1 and warnings[0].startswith("laptop: ") and words in warnings[0] and "measured again" in warnings[0]
    assert "laptop" not in found.files and found.speeds is None, "CPUs of which nothing is known are not mixed with measured ones"
    assert "laptop has none" in found.choice.because and "measured on tower, oldtower" in found.choice.because


def test_damaged_on_the_node_is_a_warning() -> None:
    seen = with_file(healthy.cpu(), "laptop", None, problem="it is damaged: not JSON")
    assert ["not JSON" in warning for warning in belief(seen)[1]] == [True]
    assert belief(healthy.with_facts(healthy.cpu(), "laptop", speed_profiles={"path": "x", "found": False}))[1] == (), "no file is no news"


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [("2.13.0+cpu", "2.13.0", True), ("2.13.0", "2.13.0+cpu", True), ("2.13.0+cpu", "2.13.0+cu130", False), ("2.13.0", "2.13.1", False)],
)
def test_versions_of_torch(then: str, now: str, same: bool) -> None:
    seen = healthy.packages(with_file(healthy.cpu(), "tower", file(torch=then)), "tower", torch=now)
    assert (not belief(seen)[1]) is same


def test_full_training_has_no_adapters_to_differ() -> None:
    full = healthy.recipe(method={"kind": "full"})
    seen = with_file(healthy.cpu(), "tower", file(method={"kind": "full", "rank": 4, "targets": ["x"]}))
    assert belief(seen, full)[1] == ()


def test_the_rest_is_guessed_in_the_measured_ratio() -> None:
    """The tower takes twice as long as its data sheet's guess: so will the others."""
    seen = healthy.gpu()
    guess = belief(seen, device="cuda", precision="bf16")[0]
    assert guess.speeds and set(guess.sources.values()) == {"data sheet"} and "a guess" in guess.choice.because
    tower = guess.speeds["tower"][0].slower(2)
    pass_s = tower.pass_s(TOKENS)
    ranks = [{"local_rank": 0, "step_s": tower.step_s, "micro_batch_s": 0.1 * pass_s, "token_s": 0.9 * pass_s / TOKENS}]
    found, warnings = belief(with_file(seen, "tower", gpu_file("tower", ranks=ranks)), device="cuda", precision="bf16")
    assert not warnings and found.sources == {"tower": "measured", "laptop": "scaled", "oldtower": "scaled"}
    assert found.speeds
    for name in NAMES:
        assert found.speeds[name][0].pass_s(TOKENS) == pytest.approx(2 * guess.speeds[name][0].pass_s(TOKENS))
    assert "laptop, oldtower: not measured" in found.choice.because


def test_cpus_are_scaled_by_what_the_owner_says() -> None:
    seen = with_file(healthy.cpu(), "tower", file())
    for name, own in zip(NAMES, (2.0, 1.0, 0.5), strict=True):
        seen = healthy.with_node(seen, name, speed=own)
    found, _ = belief(seen)
    assert found.speeds and found.sources == {"tower": "measured", "laptop": "scaled", "oldtower": "scaled"}
    assert found.speeds["oldtower"][0].pass_s(TOKENS) == pytest.approx(4 * 0.12)


def test_the_owners_word_goes_before_data_sheets() -> None:
    seen = healthy.gpu()
    guess = belief(seen, device="cuda", precision="bf16")[0]
    for name in NAMES:
        seen = healthy.with_node(seen, name, speed=3.0 if name == "laptop" else 1.0)
    found, _ = belief(seen, device="cuda", precision="bf16")
    assert set(found.sources.values()) == {"owner"} and "cluster.toml" in found.choice.because
    rates = {name: sum(rates) for name, rates in found.weights.items()}
    assert rates["laptop"] == pytest.approx(3 * rates["tower"]) == pytest.approx(3 * rates["oldtower"])
    assert sum(rates.values()) == pytest.approx(sum(sum(rate) for rate in guess.weights.values())), (
        "together as fast as the data sheets say"
    )
    one = healthy.with_node(healthy.gpu(), "tower", speed=3.0)
    found, _ = belief(one, device="cuda", precision="bf16")
    assert set(found.sources.values()) == {"data sheet"} and "ignored because laptop, oldtower has none" in found.choice.because


def test_a_nodes_cards_share_its_owners_speed() -> None:
    seen = healthy.gpu(names=("tower",))
    card = as_json(seen.facts["tower"].gpu.cards[0])
    seen = healthy.with_facts(seen, "tower", gpu={"cards": [card, {**card, "index": 1, "name": "NVIDIA GeForce RTX 3060"}]})
    found, _ = belief(healthy.with_node(seen, "tower", speed=3.0), device="cuda", precision="bf16", shape=None)
    assert found.speeds is None and sum(found.weights["tower"]) == pytest.approx(3.0)
    assert found.weights["tower"][0] / found.weights["tower"][1] == pytest.approx(87.9 / 25.5)


def test_nothing_known_is_equal() -> None:
    found, _ = belief(healthy.cpu())
    assert found.speeds is None and set(found.weights.values()) == {(1.0,)} and found.choice.value == "equal"
    found, _ = belief(healthy.gpu(), device="cuda", precision="bf16", shape=None)
    assert found.speeds is None and found.weights["laptop"] == (40.1e12,), "an unknown model still has cards of unlike speed"


def test_the_roofline_of_a_7b_on_a_3090() -> None:
    shape, card = known("meta-llama/Llama-2-7b-hf"), lookup("RTX 3090")
    assert shape and card
    recipe = healthy.recipe(method={"kind": "qlora", "targets": ["q_proj", "v_proj"]})
    assert recipe.method and recipe.train
    flops = roofline.flops_per_token(shape, recipe.method, recipe.train)
    products = 6_476_005_376 + 32000 * 4096  # linears of the blocks, head
    assert flops == 4 * products + 2 * 8_388_608 + 2 * 6_476_005_376
    found = roofline.roofline(card, shape, recipe.method, recipe.train, "bf16")
    attention = 2 * recipe.train.seq_len * 4096 * 32  # of queries and keys, and of weights and values, half of them behind the mask
    assert 1 / found.token_s == pytest.approx(71e12 * 0.62 * 0.9 / (flops + 4.5 * attention / 1.5))
    # Three rounds over the weights: packed, unpacked, read again; 29 GB each at 936 GB/s.
    assert found.micro_batch_s == pytest.approx(3 * (6_476_005_376 * (0.516 + 4)) / 936e9, rel=1e-3)
    assert found.floor_s == pytest.approx(32 * 6.5e-3), "one row of a few tokens lasts as long as its kernels take to start"
    assert found.step_s < 1e-3
    without = replace(recipe.train, gradient_checkpointing=False)
    fewer = roofline.roofline(card, shape, recipe.method, without, "bf16")
    assert fewer.token_s == pytest.approx(found.token_s * 2 / 3, rel=0.03) and fewer.floor_s == pytest.approx(found.floor_s * 2 / 3)


def test_a_mixture_computes_with_the_experts_of_a_token_and_reads_all() -> None:
    shape = known("Qwen/Qwen3-30B-A3B")
    card = lookup("RTX 3090")
    assert shape is not None and card is not None and shape.experts is not None
    train = Train(global_batch=8, steps=1, learning_rate=1.0, seq_len=1024)
    targets: Any = WITH_EXPERTS
    in_16_bits, in_4_bits = Method(kind="lora", rank=16), Method(kind="qlora", rank=16)
    flops = roofline.flops_per_token(shape, in_16_bits, train)
    assert flops == pytest.approx(6 * shape.active_parameters + 4 * shape.vocabulary * shape.hidden, rel=0.02), "and the adapters"
    assert flops < 6 * shape.block_parameters / 8
    with_experts = roofline.flops_per_token(shape, Method(kind="lora", rank=16, targets=targets), train)
    assert 1 < with_experts / flops < 1.01, "of the experts' adapters those of its own, too"
    speeds = [roofline.roofline(card, shape, method, train, "bf16") for method in (in_16_bits, in_4_bits)]
    assert speeds[0].floor_s >= 3 * 2 * shape.block_parameters / card.bandwidth_bytes_per_s
    assert speeds[1].floor_s == pytest.approx(48 * (0.0065 + 128 * roofline.LAUNCH_S_PER_EXPERT)), "in 4 bits one after the other"


def test_a_plan_carries_the_speeds() -> None:
    def make(recipe: Recipe) -> Plan:
        seen = all_measured(healthy.cpu(recipe))
        return builders.make_plan(seen.cluster, recipe, seen.facts)

    made = make(healthy.recipe())
    assert [rank.speed.token_s if rank.speed else None for rank in made.ranks] == [1e-3, 2e-3, 4e-3]
    assert made.balance == "measured" and [rank.share for rank in made.ranks] == sorted((rank.share for rank in made.ranks), reverse=True)
    assert make(healthy.recipe(parallel={"shares": "equal"})).balance == "fixed"
    assert make(healthy.recipe(parallel={"shares": {"tower": 6, "laptop": 4, "oldtower": 2}})).balance == "fixed"
    assert make(healthy.recipe()) == made, "the same facts, the same plan"
