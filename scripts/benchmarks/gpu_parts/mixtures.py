"""Routed experts in 4 bits on a card: codes and products beside a CPU's and transformers' own, the seconds of an expert, a training divided in two.

The shape of a layer is that of Qwen3-30B-A3B.
"""

from __future__ import annotations

import copy
from typing import Any

from benchmarks.gpu_parts import divided, material, timing
from benchmarks.gpu_parts.divided import Division
from benchmarks.gpu_parts.place import Place

_QWEN3_30B = {
    "hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 1, "intermediate_size": 64,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 300,
}  # fmt: skip
_TINY = {**_QWEN3_30B, "hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "num_attention_heads": 4}
_TOKENS = (256, 2048)
_BITS_APART, _APART, _ENDS_S = 1e-3, 2e-2, 60.0
_RECIPES: dict[str, dict[str, Any]] = {
    "qlora": {"method__kind": "qlora", "train__gradient_checkpointing": True},
    "adapters on experts": {"method__kind": "qlora", "method__targets": "all-linear+experts"},
}


def measure(place: Place) -> None:
    """One layer in this process, then whole trainings."""
    with place.attempt("a layer"):
        _layer(place)
    model = material.model(place.folder / "model", "experts" if place.is_card else "tiny experts", "float32", place.device)
    data = material.rows(place.folder / "rows.jsonl", material.lengths(60, 200))
    for name, recipe in _RECIPES.items() if place.is_card else [("qlora", _RECIPES["qlora"])]:
        with place.attempt(name):
            _training(place, name, recipe, model, data)


def _layer(place: Place) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from homelab.worker.model import fused_experts
    from homelab.worker.model.quantised_experts import QuantisedExperts

    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **(_QWEN3_30B if place.is_card else _TINY))
    dtype = torch.bfloat16 if place.is_card else torch.float32
    with torch.device(place.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    (plain,) = [part for part in model.modules() if fused_experts.fits(part)]
    sixteen = {name: getattr(plain, name).detach() for name in fused_experts.MATRICES}
    held = QuantisedExperts(copy.deepcopy(plain))
    for name, matrices in sixteen.items():
        held.hold(name, matrices)
    place.figure("expert_layer_bytes", sum(buffer.nbytes for buffer in held.buffers()))
    _codes(place, held, plain, sixteen)
    with torch.no_grad():
        for name in fused_experts.MATRICES:
            getattr(plain, name).copy_(held.matrices(name, range(held.num_experts)))
    some = range(8)
    place.figure("dequantise_s_of_8", timing.seconds(lambda: held.matrices("gate_up_proj", some), place.device))
    for tokens in _TOKENS:
        inputs = torch.randn(tokens, config.hidden_size, device=place.device, dtype=dtype)
        weights, chosen = torch.randn(tokens, held.num_experts, device=place.device).softmax(-1).topk(config.num_experts_per_tok)
        given = (chosen, weights.to(dtype))
        for name, implementation in (("grouped", "grouped_mm"), ("eager", "eager")):
            model.set_experts_implementation(implementation)
            with place.attempt(f"{name}, {tokens} tokens"):  # a torch without grouped products
                place.figure(f"{name}_16_bit_{tokens}_tokens_s", _round_s(place, plain, inputs, given))
        place.figure(f"layer_{tokens}_tokens_s", spent := _round_s(place, held, inputs, given))
        place.figure(f"expert_{tokens}_tokens_s", spent / held.num_experts)
        expected, found = (_answer(experts, inputs, given) for experts in (plain, held))
        away = [float((one - other).abs().max() / one.abs().max()) for one, other in zip(expected, found, strict=True)]
        place.run(f"layer, {tokens} tokens", output_apart=away[0], gradient_apart=away[1])
        place.gate(f"layer_{tokens}_tokens_is_that_of_transformers", max(away) <= _APART)


def _codes(place: Place, held: Any, plain: Any, sixteen: dict[str, Any]) -> None:
    """A node without a card makes the same codes of the same weights. Four experts: a CPU takes its time."""
    import torch

    from homelab.worker.model.quantised_experts import QuantisedExperts

    few = copy.copy(plain)
    few._parameters = {name: torch.nn.Parameter(matrices[:4].cpu()) for name, matrices in sixteen.items()}
    few.num_experts = 4
    other = QuantisedExperts(few)
    for name in sixteen:
        other.hold(name, sixteen[name][:4].cpu())
        differ = (getattr(other, f"codes_{name}") != getattr(held, f"codes_{name}")[:4].cpu()).float().mean()
        values = [side.matrices(name, [3]).float().cpu() for side in (held, other)]
        place.figure(f"{name}_codes_that_differ", float(differ))
        place.figure(f"{name}_values_apart", float((values[0] - values[1]).abs().max() / values[1].abs().max()))
        place.gate(f"{name}_codes_are_a_cpus", float(differ) <= _BITS_APART)


def _round_s(place: Place, experts: Any, inputs: Any, given: tuple[Any, Any]) -> float:
    """Seconds of the three rounds of a pass with checkpointing: forward, forward again, backward."""
    import torch

    def rounds() -> None:
        with torch.no_grad():
            experts(inputs, *given)
        _answer(experts, inputs, given)

    return timing.seconds(rounds, place.device, 8)


def _answer(experts: Any, inputs: Any, given: tuple[Any, Any]) -> tuple[Any, Any]:
    """The layer's output, and the gradient of its input."""
    read = inputs.detach().requires_grad_()
    output = experts(read, *given)
    output.float().square().sum().backward()
    return output.detach().float(), read.grad.float()


def _training(place: Place, name: str, recipe: dict[str, Any], model: Any, data: Any) -> None:
    """One process, two ranks with 8 and 4 of 12 rows, two stages: the same losses. In bf16 their sums are rounded in another order."""
    precision = "bf16" if place.is_card else "fp32"
    one = divided.losses(divided.train(place, Division(f"{name} on one", recipe=recipe), model, data, precision, limit_s=_ENDS_S))
    for other, division in (
        ("two", Division(f"{name} on two", shares=(8, 4), recipe=recipe)),
        ("stages", Division(f"{name} in stages", stages=(1, 1), recipe=recipe)),
    ):
        with place.attempt(f"{name}, {other}"):
            found = divided.losses(divided.train(place, division, model, data, precision, limit_s=_ENDS_S))
            key = f"{name.replace(' ', '_')}_{other}"
            place.run(f"{name}, {other}", losses=found, losses_of_one=one)
            place.figure(f"{key}_loss_apart", divided.apart(found, one))
            place.gate(f"{key}_agrees", divided.apart(found, one) <= _APART)
