"""Which models can be cut: stages of every family that the planner knows give the logits of the whole model, bit by bit; any other is refused with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from homelab.controller.planning.model import families
from homelab.shared.law.stage import Stage
from homelab.worker.errors import WorkerError
from homelab.worker.runtime import process_group
from homelab.worker.strategies.pipeline import stage_model
from homelab.worker.strategies.pipeline.stages import Stages
from tests.worker import harness
from tests.worker.model.tiny_models import SIGHT

pytestmark = pytest.mark.timeout(60)

LAYERS = 4
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_DEEPSEEK: dict[str, Any] = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "full_attention_interval": 2,
}  # fmt: skip
_SHARED: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    **_DELTA,
}
MORE: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 8, "final_logit_softcapping": 3.0},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "qwen3_next": _SHARED,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _SHARED,
    "gemma4_text": {
        "hidden_size_per_layer_input": 0, "global_head_dim": 16, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16,
    },
}  # fmt: skip

Saved = Callable[..., Path]


@pytest.fixture
def saved(tmp_path: Path) -> Saved:
    """Makes the folder of a small random model of this type."""

    def save(kind: str, **config: Any) -> Path:
        torch.manual_seed(1)
        folder = tmp_path / kind
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config)).save_pretrained(folder)
        return folder

    return save


def stage(number: int, count: int, begin: int, end: int, layers: int = LAYERS) -> Stage:
    return Stage(number, count, begin, end, layers)


def loaded(folder: Path, of: Stage) -> Any:
    return stage_model.load(str(folder), stage=of, dtype=torch.float32).eval()


def refused(folder: Path, *, layers: int = LAYERS) -> WorkerError:
    with pytest.raises(WorkerError) as caught:
        loaded(folder, stage(0, 2, 0, 2, layers))
    assert caught.value.message and caught.value.where == "[model] name in the recipe" and caught.value.hint
    return caught.value


@torch.no_grad()
@pytest.mark.parametrize("kind", families._FAMILIES)
def test_stages_of_every_family_that_is_planned_give_the_logits_of_the_whole(kind: str, saved: Saved) -> None:
    folder = saved(kind, **SMALL | MORE.get(kind, {}))
    tokens = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens)
    mask[0, 15:] = 0
    whole = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=tokens, attention_mask=mask).logits
    first, middle, last = (loaded(folder, stage(number, 3, begin, end)) for number, (begin, end) in enumerate([(0, 1), (1, 3), (3, 4)]))
    hidden = first(input_ids=tokens, attention_mask=mask).logits
    hidden = middle(inputs_embeds=hidden, attention_mask=mask).logits
    assert torch.equal(last(inputs_embeds=hidden, attention_mask=mask).logits, whole)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_a_model_that_sees_is_cut_as_its_language_part(kind: str, tmp_path: Path) -> None:
    """As its maker publishes it: with the weights of the part for images, and other names."""
    torch.manual_seed(1)
    sight = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "out_hidden_size": 32,
        "patch_size": 4,
        "num_position_embeddings": 16,
    }
    config = transformers.AutoConfig.for_model(kind, text_config=SMALL | MORE[f"{kind}_text"], vision_config=sight)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    names = set(json.loads((tmp_path / "config.json").read_text())) & {"text_config", "vision_config"}
    assert len(names) == 2 and families.from_config(json.loads((tmp_path / "config.json").read_text())) is not None
    tokens = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(3))
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()(input_ids=tokens).logits
    first, last = (loaded(tmp_path, stage(number, 2, *layers)) for number, layers in enumerate([(0, 3), (3, 4)]))
    assert torch.equal(last(inputs_embeds=first(input_ids=tokens).logits).logits, whole)


@torch.no_grad()
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_model_that_is_built_with_its_part_for_images_is_cut_without_it(is_tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    text = SMALL | MORE["gemma3_text"] | {"tie_word_embeddings": is_tied}
    config = transformers.AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=SIGHT, mm_tokens_per_image=1, tie_word_embeddings=is_tied
    )
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    tokens = torch.randint(3, 64, (2, 20), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens)
    mask[0, 15:] = 0
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()(input_ids=tokens, attention_mask=mask).logits
    first, middle, last = (loaded(tmp_path, stage(number, 3, *layers)) for number, layers in enumerate([(0, 1), (1, 3), (3, 4)]))
    hidden = middle(inputs_embeds=first(input_ids=tokens, attention_mask=mask).logits, attention_mask=mask).logits
    assert torch.equal(last(inputs_embeds=hidden, attention_mask=mask).logits, whole)
    names = [name for model in (first, middle, last) for name, _ in model.named_parameters()]
    assert names and not any("vision" in name or "projector" in name for name in names)


def left_in_16_bits(kind: str) -> tuple[set[str], set[str]]:
    """The matrices of layer 1 that transformers does not quantise: of the whole model, and where the layer is read alone."""
    from transformers.quantizers.base import get_keys_to_not_convert

    found = []
    for is_alone in (False, True):
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **SMALL | MORE.get(kind, {})))
        if is_alone:
            stage_model.cut(model, stage(1, 3, 1, 2), torch.float32)
        matrices = {name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and ".layers.1." in name}
        assert matrices
        found.append(matrices & set(get_keys_to_not_convert(model)))
    return found[0], found[1]


@pytest.mark.parametrize("kind", families._FAMILIES)
def test_a_layer_that_is_read_alone_is_quantised_as_in_the_whole_model(kind: str) -> None:
    """transformers leaves out what a model ends with. A layer alone ends with its last weight, which must be a norm's."""
    whole, alone = left_in_16_bits(kind)
    assert whole == alone == set()


def test_a_layer_whose_last_weight_is_a_matrix_is_seen() -> None:
    """The control: the norms of the first OLMo have no weights. It must not become one of the families that are planned as it is."""
    assert left_in_16_bits("olmo") == (set(), {"model.layers.1.mlp.down_proj"})


def test_a_class_without_the_layers_of_a_llama_is_named(saved: Saved) -> None:
    gpt2 = refused(saved("gpt2", n_layer=LAYERS, n_head=4, n_embd=32, vocab_size=64, n_positions=64))
    assert gpt2.message == "GPT2LMHeadModel cannot be cut into stages: it has no layers, embed_tokens, norm at the place of a Llama model"
    assert 'strategy = "zero3"' in gpt2.hint
    neox = refused(saved("gpt_neox", **SMALL))
    assert neox.message == "GPTNeoXForCausalLM cannot be cut into stages: it has no embed_tokens, norm at the place of a Llama model"


def test_a_decoder_that_does_more_than_its_layers_is_refused(saved: Saved) -> None:
    """Granite multiplies its embeddings outside of the table: every stage would do it again."""
    error = refused(saved("granite", **SMALL, embedding_multiplier=12.0))
    assert error.message == "GraniteForCausalLM cannot be cut into stages: it computes more than its layers in order"


@pytest.mark.parametrize("changes", [{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}, {"num_kv_shared_layers": 2}])
def test_layers_that_need_more_than_what_the_one_before_gives_are_refused(changes: dict[str, Any], saved: Saved) -> None:
    error = refused(saved("gemma4_text", **SMALL | MORE["gemma4_text"] | {"enable_moe_block": False} | changes))
    assert error.message == "Gemma4ForCausalLM cannot be cut into stages: it computes more than its layers in order"


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_experts_whose_router_has_a_loss_are_refused(kind: str, saved: Saved) -> None:
    error = refused(saved(kind, **SMALL | MORE[kind], output_router_logits=True))
    assert error.message == (
        f"a pipeline does not train this mixture of experts ({kind}): its router has its own loss (output_router_logits in config.json), "
        "which is not a sum over tokens"
    )
    assert "set output_router_logits to false" in error.hint


def test_the_folder_of_a_model_may_have_another_path_on_each_node(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """~/models is another folder for each login, and layers that are kept have one of their own."""
    models = [loaded(saved("llama", **SMALL), stage(number, 2, 2 * number, 2 * number + 2)) for number in (0, 1)]
    models[1].config._name_or_path = "/home/another/llama"
    own = Stages.__new__(Stages)
    own._task, own._copies = harness.task_of(Path("/nowhere"), ("one", "two"), method__dropout=0.0), None
    monkeypatch.setattr(Stages, "_check_wire", lambda *_: None)
    first: list[str] = []
    monkeypatch.setattr(process_group, "exchange", lambda _occasion, digest: [*(first or first.append(digest) or first), digest])
    for model in models:
        own.check_start(model, "step 0")
    models[1].config.rms_norm_eps *= 2
    with pytest.raises(WorkerError, match="not of one model"):
        own.check_start(models[1], "step 0")


def test_a_plan_for_another_number_of_layers_is_refused(saved: Saved) -> None:
    error = refused(saved("llama", **SMALL), layers=6)
    assert error.message == "the plan divides 6 layers, but the model has 4" and "copy the same model folder to every node" in error.hint


@pytest.mark.parametrize("scores", [False, True])
def test_every_stage_says_of_its_embeddings_what_the_whole_model_is(scores: bool, saved: Saved) -> None:
    """The result is saved with the configuration of any stage. A model that scores answers gets another head, and then nothing is tied."""
    folder = saved("llama", **SMALL, tie_word_embeddings=True)
    stages = [
        stage_model.load(str(folder), stage=stage(number, 3, begin, end), dtype=torch.float32, scores=scores)
        for number, (begin, end) in enumerate([(0, 1), (1, 3), (3, 4)])
    ]
    assert [stage_model.is_tied(each) for each in stages] == [each.config.tie_word_embeddings for each in stages] == [not scores] * 3
    tables = [[name for name, _ in each.named_parameters() if "embed" in name or "head" in name] for each in stages]
    name = "model.embed_tokens.weight"
    assert tables == [[name], [], [] if scores else [name]]
    if not scores:
        assert stages[2].lm_head.weight is stages[2].model.embed_tokens.weight is stage_model.table_of(stages[2])[1]
        assert stages[2].lm_head.weight.equal(stages[0].model.embed_tokens.weight)


@pytest.mark.parametrize("streamed", [False, True])
def test_files_that_lack_a_weight_are_no_stage_with_random_numbers(streamed: bool, saved: Saved) -> None:
    """transformers would draw it, another one at every start and on every machine."""
    from safetensors.torch import load_file, save_file

    from homelab.worker.model.host_layers import HostLayers
    from homelab.worker.strategies.pipeline import stage_reader

    folder = saved("llama", **SMALL)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    name = "model.layers.2.mlp.up_proj.weight"
    save_file({key: value for key, value in weights.items() if key != name}, file, metadata={"format": "pt"})
    half = Stage(number=1, count=2, begin=2, end=4, layers=LAYERS)
    with pytest.raises(WorkerError, match=f"the files lack {name}"):
        if streamed:
            stage_reader.load(str(folder), stage=half, host=HostLayers(torch.device("cpu")), count=2, dtype=torch.float32)
        else:
            stage_model.load(str(folder), stage=half, dtype=torch.float32)
    first = Stage(number=0, count=2, begin=0, end=2, layers=LAYERS)
    stage_model.load(str(folder), stage=first, dtype=torch.float32)  # what it lacks is elsewhere
