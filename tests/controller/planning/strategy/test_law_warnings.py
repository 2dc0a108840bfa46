"""The plan's `law:` lines: what of a recipe cannot be exact is said, and nothing else."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from homelab.controller.base import hardware
from homelab.controller.base.errors import InputError
from homelab.controller.checks.evidence import Evidence
from homelab.controller.planning.memory import attention
from tests import builders
from tests.controller.checks import healthy
from tests.controller.planning.test_plan import make, why


def law(seen: Evidence, **sections: Any) -> list[str]:
    """Without that of a precision which the recipe leaves open, as these do."""
    lines = make(seen, healthy.recipe(**sections)).warnings
    return [line for line in lines if line.startswith("law:") and not line.startswith("law: precision")]


def with_config(**keys: Any) -> Evidence:
    seen = healthy.cpu()
    for name in healthy.NAMES:
        seen = healthy.with_facts(seen, name, model={"found": True, "config": {**healthy.LLAMA, **keys}})
    return seen


SENT = {"bf16": "9.77 MB", "powersgd": "4.99 MB"}


def test_an_exact_recipe_has_no_such_line() -> None:
    assert law(healthy.cpu()) == []
    assert law(healthy.cpu(), parallel={"compress": "none"}) == []


@pytest.mark.parametrize(("name", "words"), [("bf16", "rounds"), ("powersgd", "no checkpoint")])
def test_compression_is_said_and_priced(name: str, words: str) -> None:
    seen = with_config()
    (line,) = law(seen, parallel={"compress": name})
    assert f'compress = "{name}"' in line and words in line
    one = make(seen, healthy.recipe(parallel={"compress": name}), cluster=seen.cluster.only((healthy.NAMES[0],)))
    assert not any("compress" in line for line in one.warnings), "one rank sends nothing"
    plain, less = (why(make(seen, healthy.recipe(parallel={"compress": way})), "strategy")[1] for way in ("none", name))
    assert "all-reduce of 19.5 MB of gradient" in plain
    assert f"all-reduce of {SENT[name]} of gradient" in less


def test_dropout_draws_by_the_model_of_the_card() -> None:
    (cpus,), (cards,) = (law(seen, method={"kind": "lora", "dropout": 0.05}) for seen in (healthy.cpu(), healthy.gpu()))
    assert "other micro-batches" in cpus and "cards" not in cpus
    assert "other micro-batches and on other cards" in cards


def test_powersgd_on_adapters_that_are_narrow_already() -> None:
    recipe = healthy.recipe(parallel={"compress": "powersgd"}, method={"kind": "lora", "rank": 8})
    (line,) = (line for line in make(with_config(), recipe).warnings if "powersgd" in line)
    assert not line.startswith("law:") and 'compress = "bf16"' in line
    assert "9.77 MB" in why(make(with_config(), recipe), "strategy")[1], "nothing is saved"


def test_powersgd_and_fp16_do_not_go_together() -> None:
    recipe = healthy.recipe(
        parallel={"compress": "powersgd"}, train={"global_batch": 12, "steps": 10, "learning_rate": 1e-3, "precision": "fp16"}
    )
    with pytest.raises(InputError, match="does not work with fp16") as caught:
        make(healthy.gpu(), recipe)
    assert "compress" in caught.value.where and "bf16" in caught.value.hint


def test_unsloth_is_not_proven_on_cards() -> None:
    method = {"kind": "lora", "backend": "unsloth"}
    (line,) = law(healthy.gpu(), method=method)
    assert "unsloth" in line and "CUDA kernels" in line
    assert law(healthy.cpu(), method=method) == [], "on CPUs it is"
    assert law(healthy.gpu(names=healthy.NAMES[:1]), method=method) == [line], "one card today may be three tomorrow"


EXPERTS = {"model_type": "mixtral", "num_local_experts": 8, "router_aux_loss_coef": 0.001}


def test_a_loss_that_balances_experts_is_said_where_it_is_added() -> None:
    (line,) = law(with_config(**EXPERTS, output_router_logits=True))
    assert "balances its experts" in line and "output_router_logits" in line
    (line,) = law(with_config(model_type="x", text_config={"num_experts": 4, "output_router_logits": True}))
    assert "balances its experts" in line
    assert law(with_config(**EXPERTS)) == [], "transformers adds it on request only"
    assert law(with_config(**{**EXPERTS, "router_aux_loss_coef": 0.0}, output_router_logits=True)) == []
    assert law(with_config(output_router_logits=True)) == [], "no experts"


def test_eight_bit_states_are_said() -> None:
    train = {"global_batch": 12, "steps": 10, "learning_rate": 1e-3, "optimizer": "adamw_8bit"}
    (line,) = law(healthy.cpu(), train=train)
    assert "8 bits" in line and "1e-4" in line


def of_precision(seen: Evidence, **changes: Any) -> list[str]:
    train = {"global_batch": 12, "steps": 10, "learning_rate": 1e-3, **changes}
    recipe = healthy.recipe(train=train, parallel={"strategy": "ddp"})  # which keeps an old card that makes it slower
    return [line for line in make(seen, recipe).warnings if "precision" in line or "fp16" in line or "bf16" in line]


def turing(name: str, **model: Any) -> Evidence:
    """The cluster with cards, where `name` has an older one; the model's config.json says `model`, too."""
    seen = healthy.card(healthy.gpu(), name, name="NVIDIA GeForce RTX 2060", memory_total_bytes=6 * healthy.GIB, compute_capability="7.5")
    for node in healthy.NAMES if model else ():
        seen = healthy.with_facts(seen, node, model={"found": True, "config": {**healthy.LLAMA, **model}})
    return seen


@pytest.mark.parametrize(("seen", "value"), [(healthy.cpu(), "fp32"), (healthy.gpu(), "bf16")])
def test_a_precision_that_the_cluster_chooses_is_said(seen: Evidence, value: str) -> None:
    (line,) = of_precision(seen)
    assert line.startswith(f'law: precision = "auto" is {value} on this cluster (') and "[train] precision" in line
    assert of_precision(seen, precision=value) == []


def test_one_old_card_and_a_model_made_in_bf16() -> None:
    law_line, overflow, leave = of_precision(turing("oldtower", dtype="bfloat16"))
    assert law_line.startswith('law: precision = "auto" is fp16 on this cluster because of oldtower')
    assert "made in bfloat16" in overflow and "not a number" in overflow
    assert leave.startswith("oldtower adds ") and leave.endswith("--what-if=-oldtower compares")


def test_what_the_model_was_made_in_decides_whether_fp16_can_overflow() -> None:
    for config in ({"torch_dtype": "torch.bfloat16"}, {"text_config": {"dtype": "bfloat16"}}):
        assert any("made in bfloat16" in line for line in of_precision(turing("oldtower", **config)))
    assert not any("65504" in line for line in of_precision(turing("oldtower", dtype="float16")))
    assert any("not known" in line for line in of_precision(turing("oldtower")))
    assert any("made in bfloat16" in line for line in of_precision(turing("oldtower", dtype="bfloat16"), precision="fp16"))
    assert not any("--what-if" in line for line in of_precision(turing("oldtower", dtype="bfloat16"), precision="fp16")), (
        "the recipe wants it"
    )


def test_an_old_card_that_adds_much_is_not_talked_out_of() -> None:
    """A large batch, in which its speed counts for more than the wire."""
    seen = healthy.card(turing("laptop", dtype="float16"), "laptop", name="NVIDIA TITAN RTX", memory_total_bytes=24 * healthy.GIB)
    assert any("--what-if=-laptop" in line for line in of_precision(seen, global_batch=24))
    assert not any("--what-if" in line for line in of_precision(seen, global_batch=2000))
    for name in healthy.NAMES:
        seen = healthy.card(seen, name, name="NVIDIA TITAN RTX", memory_total_bytes=24 * healthy.GIB)
    assert not any("--what-if" in line for line in of_precision(seen)), "nobody would be left"


def test_a_date_in_the_rows_is_said() -> None:
    seen = healthy.cpu()
    for name in healthy.NAMES:
        seen = healthy.with_facts(seen, name, model={"found": True, "config": healthy.LLAMA, "template_writes_date": True})

    (line,) = law(seen)
    assert "chat template writes the date" in line and "that of the launch by UTC" in line
    dated = make(seen, healthy.recipe(), moment=datetime(2026, 11, 25, 23, 30)).warnings
    assert any("that of the launch by UTC (25 Nov 2026)" in warning for warning in dated)


def offline(*cards: str, memory_gb: float = 8, **train: Any) -> tuple[str, list[str]]:
    """(precision, what is said of it) of machines that nobody asked, each with a card of this name as its owner writes it."""
    nodes = {f"n{number}": {"gpus": [{"model": name, "vram_gb": memory_gb}]} for number, name in enumerate(cards)}
    train = {"global_batch": 12, "steps": 10, "learning_rate": 1e-3, **train}
    made = builders.make_plan(builders.cluster(nodes, nodes=nodes), healthy.recipe(train=train), {})
    return made.precision, [line for line in made.warnings if "bf16" in line and not line.startswith("law:")]


# A card that no table has, and what its node says of it: (capability of the driver, capability of torch).
@pytest.mark.parametrize(
    ("name", "said", "precision"),
    [
        ("NVIDIA Some Card", ("7.5", []), "fp16"), ("NVIDIA Some Card", (None, [7, 5]), "fp16"), ("NVIDIA Some Card", (None, []), "fp16"),
        ("NVIDIA Some Card", ("8.9", []), "bf16"), ("NVIDIA Some Card", (None, [12, 0]), "bf16"),
        ("NVIDIA GeForce RTX 4090", ("7.5", [7, 5]), "fp16"), ("Tesla T4", ("8.9", [8, 9]), "bf16"),
    ],
)  # fmt: skip
def test_what_a_card_says_of_its_generation_goes_before_its_name(name: str, said: tuple[str | None, list[int]], precision: str) -> None:
    seen = healthy.probe(
        healthy.card(healthy.gpu(), "oldtower", name=name, compute_capability=said[0]), "oldtower", device={"capability": said[1]}
    )
    made = make(seen, healthy.recipe())
    assert made.precision == precision
    is_known = any(said) or hardware.lookup(name) is not None
    unsure = [line for line in made.warnings if "is not known here" in line]
    assert bool(unsure) is not is_known
    assert attention.repeats_keys("cuda", "bf16", made.ranks[2].capability) is (precision == "fp16")


@pytest.mark.parametrize(
    "name", ["Quadro RTX 3000", "GTX 1650 Ti", "TITAN X", "Quadro P6000", "T1000", "GTX 980 Ti", "Tesla M40", "MX450", "Some Card", "RTX"]
)
def test_an_old_or_unknown_card_is_never_bf16_without_a_word(name: str) -> None:
    precision, said = offline("RTX 4090", name)
    assert precision == "fp16"
    assert hardware.generation(name) is not None or (said and f"{name} of n1" in said[0] and "homelab plan RECIPE" in said[0])
    precision, said = offline("RTX 4090", name, precision="bf16")
    assert precision == "bf16" and said and f"{name} of n1" in said[0] and "[train] precision" in said[0]
    assert offline("RTX 4090", name, precision="fp16")[1] == []


@pytest.mark.parametrize("name", ["RTX 6090", "RTX 6070 Laptop", "5090", "RTX 5085 Super"])
def test_a_newer_card_than_the_table_is_known_by_its_series(name: str) -> None:
    assert offline("RTX 4090", name) == ("bf16", [])
