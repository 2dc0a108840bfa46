"""`targets = "all-linear"` is attention, shared experts and dense MLPs in every family: never the head, a routed expert or a router."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from homelab.shared.recipe import Method
from homelab.worker.errors import WorkerError
from homelab.worker.model import adapter_targets, experts_adapter, host_layers, host_store, inspection
from homelab.worker.model.build import add_adapters
from homelab.worker.model.host_layers import HostLayers

_PLAIN: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_QKVO = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
_DENSE = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
_LATENT_QKVO = {"self_attn.q_a_proj", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa", "self_attn.kv_b_proj", "self_attn.o_proj"}


def shared(name: str) -> set[str]:
    return of(f"mlp.{name}")


def of(block: str) -> set[str]:
    return {f"{block}.{part}" for part in ("gate_proj", "up_proj", "down_proj")}


# model_type: (config, the modules of a layer that all-linear stands for)
FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": (_GROUPED, _QKVO | _DENSE),
    "qwen3_moe": ({**_GROUPED, "head_dim": 8, "num_experts": 4, **_FEW}, _QKVO),
    "qwen2_moe": ({**_GROUPED, "num_experts": 4, **_FEW, "shared_expert_intermediate_size": 32}, _QKVO | shared("shared_expert")),
    "mixtral": ({**_GROUPED, "num_local_experts": 4}, _QKVO),
    "olmoe": ({**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}, _QKVO),
    "gpt_oss": ({**_GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}, _QKVO),
    "deepseek_v3": ({**_PLAIN, "num_key_value_heads": 4, **_GROUPS, **_FEW, **_LATENT}, _LATENT_QKVO | _DENSE | shared("shared_experts")),
    "deepseek_v2": ({**_PLAIN, "num_key_value_heads": 4, **_GROUPS, **_FEW, **_LATENT}, _LATENT_QKVO | _DENSE | shared("shared_experts")),
    "glm4_moe": ({**_GROUPED, "head_dim": 8, **_GROUPS, **_FEW}, _QKVO | _DENSE | shared("shared_experts")),
    "ernie4_5_moe": ({**_GROUPED, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}, _QKVO | _DENSE | shared("shared_experts")),
    "hunyuan_v1_moe": ({**_GROUPED, "head_dim": 8, "num_experts": 4, "moe_topk": 2}, _QKVO | shared("shared_mlp")),
    "granitemoe": ({**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, _QKVO),
    "granitemoeshared": ({**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 32},
                         _QKVO | {"shared_mlp.input_linear", "shared_mlp.output_linear"}),
    "phimoe": ({**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}, _QKVO),
    "llama4_text": ({**_GROUPED, "head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2},
                    _QKVO | of("feed_forward") | of("feed_forward.shared_expert")),
    "qwen3_next": ({**_GROUPED, "head_dim": 8, "num_experts": 4, **_FEW, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4,
                    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]},
                   _QKVO | shared("shared_expert") | {"linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj"}),
    "jamba": ({**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4},
              _QKVO | of("feed_forward") | {"mamba.in_proj", "mamba.x_proj", "mamba.out_proj"}),
    "mamba": ({"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, {"mixer.in_proj", "mixer.x_proj"}),
    "mamba2": ({"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1}, {"mixer.in_proj"}),
}  # fmt: skip


def method(targets: Any = "all-linear", dropout: float = 0.0) -> Method:
    return Method(kind="lora", rank=2, alpha=4, dropout=dropout, targets=targets)


def built(kind: str, device: str = "cpu") -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **FAMILIES[kind][0]))


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_all_linear_means_the_same_in_every_family(kind: str, device: str) -> None:
    adapted = add_adapters(built(kind, device), method(), seed=1)

    reached = inspection.adapted(adapted)
    assert {name.partition(".*.")[2] for name in reached} == FAMILIES[kind][1]
    assert inspection.unreached(adapted) in (frozenset(), None), "every adapter is computed"


@pytest.mark.parametrize("targets", ["all-linear", "all-linear+experts"])
@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "llama4_text"])
def test_layers_of_the_host_have_the_adapters_of_resident_ones(kind: str, targets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their parameters are empty while they are not there, and what is put on a weight goes by its shape."""
    monkeypatch.setattr(host_store, "_LEAST_BYTES", 1)  # the matrices of these models are small, and those of a router smaller

    def adapters(streamed: int) -> list[tuple[str, Any, float]] | str:
        model = built(kind)
        layers, host = inspection.layers(model), HostLayers(torch.device("cpu"), places=1)
        assert layers is not None
        for number in range(streamed):
            host.take(number, layers[number])
        setattr(model, host_layers.ATTRIBUTE, host)
        try:
            adapted = add_adapters(model, method(targets), seed=1)
        except WorkerError as error:
            return error.message
        left = [
            name
            for layer in host.layers.values()
            for name in (piece.name for piece in layer.pieces if getattr(piece.holder, piece.name).numel())
        ]
        assert left == [], "afterwards they are empty again"
        return [(name, weight.shape, weight.sum().item()) for name, weight in adapted.named_parameters() if weight.requires_grad]

    assert adapters(2) == adapters(0)


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen2_moe", "qwen3_next", "mixtral"])
def test_what_was_saved_is_loaded_into_the_same_layers(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel

    adapted = add_adapters(built(kind), method(), seed=1)
    with torch.no_grad():
        for number, (_, parameter) in enumerate((name, one) for name, one in adapted.named_parameters() if one.requires_grad):
            parameter.fill_(0.01 * (number % 7 + 1))
    adapted.save_pretrained(tmp_path)

    with adapter_targets.as_written():
        again = PeftModel.from_pretrained(built(kind), str(tmp_path))

    tokens = torch.arange(1, 9).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(adapted.eval()(input_ids=tokens).logits, again.eval()(input_ids=tokens).logits)


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "qwen2_moe", "mixtral", "llama"])
def test_an_adapter_that_peft_alone_reads_otherwise_is_known(kind: str, tmp_path: Path) -> None:
    """The card says so where it is so, and nowhere else: compared with what PEFT computes."""
    from peft import PeftModel

    adapted = add_adapters(built(kind), method(), seed=1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.fill_(0.03)
    adapted.save_pretrained(tmp_path)
    alone = PeftModel.from_pretrained(built(kind), str(tmp_path))
    tokens = torch.arange(1, 9).unsqueeze(0)
    with torch.no_grad():
        is_other = not torch.allclose(adapted.eval()(input_ids=tokens).logits, alone.eval()(input_ids=tokens).logits, atol=1e-6)
    assert adapter_targets.is_moved_by_peft(adapted) == is_other == (kind in ("deepseek_v3", "glm4_moe"))


def test_dropout_on_fused_experts_is_refused_for_what_it_is() -> None:
    with pytest.raises(WorkerError) as refused:
        add_adapters(built("mixtral"), method(("q_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"), dropout=0.1), seed=1)
    assert "dropout = 0" in refused.value.hint and "dropout" in refused.value.where


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "mamba"])
def test_targets_that_match_nothing_name_what_the_model_has(kind: str) -> None:
    with pytest.raises(WorkerError) as refused:
        add_adapters(built(kind), method(("query_key_value",)), seed=1)
    assert "targets" in refused.value.where
    assert "base_layer" not in refused.value.hint and "lora" not in refused.value.hint, "the names are those of the plain model"
    assert all(name in refused.value.hint for name in {part.rsplit(".", 1)[-1] for part in FAMILIES[kind][1]})


def saved_names(model: Any) -> list[str]:
    return [name.replace(".default", "") for name, parameter in model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize("kind", ["llama", "qwen3_next", "deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize("targets", ["all-linear", "all-linear+experts"])
def test_settings_of_one_layer_reach_what_was_saved_of_all(kind: str, targets: str) -> None:
    """As a pipeline left them: with the names of the layers of one stage."""
    if targets != "all-linear" and kind == "llama":
        targets = ["q_proj", "v_proj"]
    adapted = add_adapters(built(kind, "meta"), method(targets), seed=1)
    settings, names = adapted.peft_config["default"], saved_names(adapted)
    before = set(settings.target_modules), list(settings.target_parameters or ())
    adapter_targets.reach(settings, names)
    assert (set(settings.target_modules), list(settings.target_parameters or ())) == before, "they reach everything"

    linear = (name.removesuffix(".lora_A.weight").removeprefix("base_model.model.") for name in names if name.endswith(".lora_A.weight"))
    settings.target_modules = {name for name in linear if ".layers.0." in name and ".experts" not in name}
    settings.target_parameters = [name for name in settings.target_parameters or () if ".layers.1." in name] or None
    adapter_targets.reach(settings, names)
    with adapter_targets.as_written():
        again = experts_adapter.put_on(built(kind, "meta"), settings)
    assert saved_names(again) == names
