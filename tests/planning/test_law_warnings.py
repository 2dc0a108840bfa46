"""The plan's `law:` lines: what of a recipe cannot be exact is said, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.checks.evidence import Evidence
from homelab.errors import InputError
from tests.checks import healthy
from tests.planning.test_plan import make, why


def law(seen: Evidence, **sections: Any) -> list[str]:
    return [line for line in make(seen, healthy.recipe(**sections)).warnings if line.startswith("law:")]


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


def test_powersgd_on_adapters_that_are_narrow_already() -> None:
    recipe = healthy.recipe(parallel={"compress": "powersgd"}, method={"kind": "lora", "rank": 8})
    (line,) = (line for line in make(with_config(), recipe).warnings if "powersgd" in line)
    assert not line.startswith("law:") and 'compress = "bf16"' in line
    assert "9.77 MB" in why(make(with_config(), recipe), "strategy")[1], "nothing is saved"


def test_powersgd_and_fp16_do_not_go_together() -> None:
    recipe = healthy.recipe(
        parallel={"compress": "powersgd"},
        train={"global_batch": 12, "steps": 10, "learning_rate": 1e-3, "precision": "fp16"},
    )
    with pytest.raises(InputError, match="does not go with fp16") as caught:
        make(healthy.gpu(), recipe)
    assert "compress" in caught.value.where and "bf16" in caught.value.hint


def test_unsloth_is_not_proven_on_cards() -> None:
    method = {"kind": "lora", "backend": "unsloth"}
    (line,) = law(healthy.gpu(), method=method)
    assert "unsloth" in line and "CUDA kernels" in line
    assert law(healthy.cpu(), method=method) == [], "on CPUs it is"
    assert law(healthy.gpu(names=healthy.NAMES[:1]), method=method) == [], "one card shares nothing"


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
