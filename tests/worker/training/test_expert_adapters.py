"""A mixture of experts under the law: its training is that of one process, with adapters on its experts and its base in 4 bits."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness
from tests.worker.training.test_exactness import COMMON, LENGTH, SHORT, assert_every_sample_once_per_epoch, assert_the_same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

MIXTURE = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
IN_4_BITS, IN_16 = {"method__kind": "qlora"}, {"method__kind": "lora"}
ON_EXPERTS = {"method__targets": "all-linear+experts"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qlora on experts, ddp": ({**IN_4_BITS, **ON_EXPERTS}, {"micro_batch": [3, 2, 1]}),
    "qlora, ddp": (IN_4_BITS, {"micro_batch": [3, 2, 1]}),
    "lora on experts, ddp": ({**IN_16, **ON_EXPERTS}, {"micro_batch": [2, 2, 1]}),
    "qlora on experts, zero2": ({**IN_4_BITS, **ON_EXPERTS}, {"micro_batch": [3, 2, 1], "strategy": "zero2"}),
    "qlora on experts, zero3": ({**IN_4_BITS, **ON_EXPERTS}, {"micro_batch": [3, 2, 1], "strategy": "zero3"}),
    "lora on experts, zero3": ({**IN_16, **ON_EXPERTS}, {"micro_batch": [3, 2, 1], "strategy": "zero3"}),
    "qlora on experts, two stages": ({**IN_4_BITS, **ON_EXPERTS}, {"micro_batch": 2, "stages": [1, 1]}),
    "lora on experts, two stages": ({**IN_16, **ON_EXPERTS}, {"micro_batch": 2, "stages": [1, 1]}),
}
QUICK = ("qlora on experts, ddp",)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("mixture") / "tiny"
    torch.manual_seed(3)  # with others, a gradient is as small as Adam's epsilon, and its step is rounding alone
    model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(vocab_size=len(tokenizer), **MIXTURE))
    with torch.no_grad():  # the choices of the routers are not a matter of the last digit
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.mlp.gate.weight, std=0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def with_a_capacity() -> int:
    """The worker's `main`, whose experts take no more than 40 tokens of a pass: what transformers never does, as a row then depends on the others."""
    from homelab.worker.model import fused_experts, quantised_experts
    from homelab.worker.training import train

    own = fused_experts.routed

    def routed(experts: Any, hidden: Any, index: Any, weights: Any, product: Any) -> Any:
        import torch

        place = torch.nn.functional.one_hot(index, experts.num_experts).flatten(0, 1).cumsum(0).view(*index.shape, -1)
        taken = place.gather(-1, index.unsqueeze(-1)).squeeze(-1) <= 40
        return own(experts, hidden, index, weights * taken, product)

    fused_experts.routed = quantised_experts.routed = routed  # type: ignore[attr-defined]
    return train.main()


def test_a_rule_that_looks_at_the_other_rows_is_seen(forks: harness.Forks, tmp_path: Path, mixture: Path, data: Path) -> None:
    recipe = COMMON | LENGTH[SHORT] | IN_4_BITS | {"train__steps": 1}
    gradients = []
    for name, shares, micro_batch in (("one", [12], 5), ("run", [6, 4, 2], [3, 2, 1])):
        run = harness.make_run(tmp_path / name, mixture, data, **recipe)
        forks.train(run, 1, shares, micro_batch=micro_batch, entry="tests.worker.training.test_expert_adapters:with_a_capacity")
        gradients.append(harness.first_gradient(run))
    assert harness.relative_error(*gradients) > 1e-3


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in CASES])
def test_shares_of_3_2_1_are_one_process(name: str, forks: harness.Forks, tmp_path: Path, mixture: Path, data: Path) -> None:
    method, plan = CASES[name]
    recipe = COMMON | LENGTH[SHORT] | method | {"train__gradient_checkpointing": True}
    one = harness.make_run(tmp_path / "one", mixture, data, **recipe)
    said = forks.train(one, 1, [12], micro_batch=5)
    assert "stay in" not in said
    run = harness.make_run(tmp_path / "run", mixture, data, **recipe)
    shares = [12, 0] if "stages" in plan else [6, 4, 2]
    forks.train(run, 1, shares, **plan)
    assert_the_same(run, one, {1: (1, len(shares))}, SHORT)
    assert_every_sample_once_per_epoch(run, len(shares), SHORT)
    names = set(harness.weights(run, SHORT))
    assert any(".experts." in name for name in names) == ("on experts" in name)
    assert harness.adapter_settings(run) == harness.adapter_settings(one)
    for folder in (one, run):
        shutil.rmtree(folder / "checkpoints")


def test_what_was_trained_is_asked_merged_and_fetched(forks: harness.Forks, tmp_path: Path, mixture: Path, data: Path) -> None:
    """A checkpoint's adapter and that of final/ have PEFT's names; the model merged onto the 4 bits answers as the adapter on them."""
    import torch
    from safetensors.torch import load_file

    from homelab.worker.model.build import load_base
    from homelab.worker.tools import chat, merge, model_export, run_model

    recipe = COMMON | LENGTH[SHORT] | IN_4_BITS | ON_EXPERTS | {"train__steps": 2, "train__learning_rate": 0.02}
    run_dir = harness.make_run(tmp_path / "run", mixture, data, **recipe)
    forks.train(run_dir, 1, [12], micro_batch=5)
    run, tokens = run_model.read_run(run_dir), torch.arange(3, 40).view(1, -1)
    with torch.no_grad():
        wanted = chat.load(run, run_dir, str(mixture), run_dir / "final", None).eval()(input_ids=tokens).logits
        made = merge.Merge(run_dir, run_dir / "final", "dequantised").go()
        assert "dequantised" in made["notes"][0]
        whole = load_base(str(run_dir / "merged"), None, None, torch.float32, None, "").eval()(input_ids=tokens).logits
        plain = load_base(str(mixture), None, None, torch.float32, None, "").eval()(input_ids=tokens).logits
    assert float((whole - wanted).abs().max()) <= 2e-3 < float((plain - wanted).abs().max())
    fetched = load_file(run_dir / model_export.export(run_dir, 2) / "adapter_model.safetensors")
    final = load_file(run_dir / "final/adapter_model.safetensors")
    assert set(fetched) == set(final) and all(torch.equal(fetched[name], final[name]) for name in final)
    assert "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight" in final
