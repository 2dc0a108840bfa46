"""The models that are known by name: their parameters are the published ones, and a copy under another name is known by what it was made from."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.planning.advice import excess
from homelab.controller.planning.model import known_models
from homelab.controller.planning.model.families import from_config, known
from tests.controller.checks import healthy
from tests.controller.planning.test_plan import make

# Parameters as the model cards and the heads of the safetensors files give them (tied weights once).
TOTALS = {
    "Qwen/Qwen2.5-0.5B": 494_032_768, "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304, "Qwen/Qwen2.5-3B": 3_085_938_688, "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664, "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352, "Qwen/Qwen2.5-72B": 72_706_203_648, "Qwen/Qwen2.5-Coder-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920, "Qwen/Qwen3-1.7B": 1_720_574_976, "Qwen/Qwen3-4B": 4_022_468_096, "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360, "Qwen/Qwen3-14B": 14_768_307_200, "Qwen/Qwen3-32B": 32_762_123_264,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616, "meta-llama/Llama-2-7b-chat-hf": 6_738_415_616, "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248, "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248, "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400, "meta-llama/Llama-3.2-3B": 3_212_749_824, "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": 1_777_088_000, "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": 7_615_616_512,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": 8_030_261_248, "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": 8_190_735_360,
    "google/gemma-2-2b-it": 2_614_341_888, "google/gemma-2-9b": 9_241_705_984, "google/gemma-2-27b": 27_227_128_320, "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-it": 999_885_952, "google/gemma-2b": 2_506_172_416, "google/gemma-7b": 8_537_680_896,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096, "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552, "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
    "mistralai/Mistral-Small-Instruct-2409": 22_247_282_688, "mistralai/Mistral-Small-24B-Instruct-2501": 23_572_403_200, "mistralai/Ministral-8B-Instruct-2410": 8_019_808_256,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552, "microsoft/Phi-3-medium-4k-instruct": 13_960_238_080, "microsoft/Phi-3.5-mini-instruct": 3_821_079_552,
    "microsoft/phi-4": 14_659_507_200, "microsoft/Phi-4-mini-instruct": 3_836_021_760, "unsloth/phi-4": 14_659_507_200,
    "HuggingFaceTB/SmolLM3-3B": 3_075_098_624, "HuggingFaceTB/SmolLM2-135M": 134_515_008, "HuggingFaceTB/SmolLM2-360M": 361_821_120, "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "allenai/OLMo-2-0425-1B-Instruct": 1_484_916_736, "allenai/OLMo-2-1124-7B": 7_298_617_344, "allenai/OLMo-2-1124-13B": 13_716_198_400, "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "ibm-granite/granite-3.1-2b-instruct": 2_533_531_648, "ibm-granite/granite-3.3-2b-instruct": 2_533_539_840, "ibm-granite/granite-3.3-8b-instruct": 8_170_864_640,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624, "Qwen/Qwen3-235B-A22B-Instruct-2507": 235_093_634_560, "Qwen/Qwen3-Coder-30B-A3B-Instruct": 30_532_122_624,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704, "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112, "mistralai/Mixtral-8x22B-Instruct-v0.1": 140_630_071_296,
    "allenai/OLMoE-1B-7B-0924": 6_919_161_856, "openai/gpt-oss-20b": 20_914_757_184, "openai/gpt-oss-120b": 116_829_156_672,
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224, "deepseek-ai/DeepSeek-V3": 671_026_404_352,  # the latter without its layer that predicts two tokens
    # without the part for images and the layer that predicts two tokens, as llama.cpp counts them
    "Qwen/Qwen3.5-0.8B": 752_393_024, "Qwen/Qwen3.5-2B": 1_881_825_088, "Qwen/Qwen3.5-4B-Base": 4_205_751_296, "Qwen/Qwen3.5-9B": 8_953_803_264,
    "Qwen/Qwen3.5-27B": 26_895_998_464, "Qwen/Qwen3.5-35B-A3B": 34_660_610_688, "Qwen/Qwen3.5-122B-A10B": 122_111_526_912,
    "Qwen/Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "google/gemma-3-4b-it": 4_300_079_472, "google/gemma-3-12b-pt": 12_187_325_040, "google/gemma-3-27b-it": 27_432_406_640,
    "google/gemma-4-31B-it": 30_697_345_280, "google/gemma-4-26B-A4B": 25_233_141_760,  # their text, as llama.cpp counts it
    "01-ai/Yi-1.5-6B-Chat": 6_061_035_520, "01-ai/Yi-1.5-9B": 8_829_407_232, "01-ai/Yi-34B": 34_388_917_248,
}  # fmt: skip


def total(name: str) -> int:
    architecture = known(name)
    assert architecture is not None, name
    return architecture.total


@pytest.mark.parametrize("name", TOTALS)
def test_the_parameters_are_the_published_ones(name: str) -> None:
    assert total(name) == TOTALS[name]


def test_every_size_is_compared_with_a_published_one() -> None:
    # granite-3.1-8b has four rows less than 3.3
    assert {total(name) for name in known_models.names()} == {*TOTALS.values(), 8_170_848_256}


# As the model cards say: 3.3, 22, 13, 1.3, 3.6 + 0.6 (head and embeddings), 2.7, 37, 3 (and 0.5 of embeddings) and 10 billion.
ACTIVE = {
    "Qwen/Qwen3-30B-A3B": 3_353_032_704, "Qwen/Qwen3-235B-A22B": 22_190_763_520, "mistralai/Mixtral-8x7B-v0.1": 12_879_925_248,
    "allenai/OLMoE-1B-7B-0924": 1_282_017_280, "openai/gpt-oss-20b": 4_186_418_496, "deepseek-ai/DeepSeek-V2-Lite": 2_661_150_208,
    "deepseek-ai/DeepSeek-V3": 37_552_282_624, "Qwen/Qwen3.5-35B-A3B": 3_454_988_928, "Qwen/Qwen3.5-122B-A10B": 9_771_288_576,
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_of_a_mixture_computes_with_its_experts_alone(name: str) -> None:
    shape = known(name)
    assert shape is not None
    assert shape.active_parameters + shape.embedding_parameters + shape.head_parameters + shape.norm_parameters == ACTIVE[name]


def test_every_known_model_has_its_positions() -> None:
    assert all(excess.positions(name.lower(), {}) for name in known_models.names())
    assert [excess.positions(f"meta-llama/Meta-Llama-3{version}-8B", {}) for version in ("", ".1")] == [8192, 131_072]
    assert [excess.positions(f"Qwen/Qwen2.5-32B{kind}", {}) for kind in ("", "-Instruct")] == [131_072, 32_768]
    assert excess.positions("org/unknown", {}) is None


COPIES = {
    "TINYLLAMA/tinyllama-1.1b-chat-v1.0": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", None),
    "unsloth/Qwen3-4B": ("Qwen/Qwen3-4B", None),
    "unsloth/Qwen3-4B-Instruct-2507-unsloth-bnb-4bit": ("Qwen/Qwen3-4B-Instruct-2507", "bitsandbytes"),
    "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit": ("meta-llama/Llama-3.1-8B-Instruct", "bitsandbytes"),
    "unsloth/llama-3-8b-bnb-4bit": ("meta-llama/Meta-Llama-3-8B", "bitsandbytes"),
    "unsloth/mistral-7b-v0.3-bnb-4bit": ("mistralai/Mistral-7B-v0.3", "bitsandbytes"),
    "unsloth/gemma-2-9b-it": ("google/gemma-2-9b-it", None),
    "NousResearch/Meta-Llama-3.1-8B": ("meta-llama/Meta-Llama-3.1-8B", None),
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": ("Qwen/Qwen2.5-7B-Instruct", "gptq"),
    "Qwen/Qwen3-8B-AWQ": ("Qwen/Qwen3-8B", "awq"),
    "Qwen/Qwen3-8B-FP8": ("Qwen/Qwen3-8B", "fp8"),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_is_known_by_what_it_was_made_from(name: str) -> None:
    original, method = COPIES[name]
    config = dict(known_models.config_of(name) or {})
    quantised = config.pop("quantization_config", {})
    assert config == known_models.config_of(original) and quantised.get("quant_method") == method


@pytest.mark.parametrize("name", ["someone/else", "someone/Qwen3-4B", "Qwen3-4B", "unsloth/", "/models/qwen3-4b", "", "-bnb-4bit"])
def test_other_names_are_not_guessed(name: str) -> None:
    assert known_models.config_of(name) is None


def planned(name: str, **method: Any) -> Any:
    """The plan of nodes that do not have the model."""
    seen = healthy.gpu()
    for node in healthy.NAMES:
        seen = healthy.with_facts(seen, node, model={"found": False, "config": None, "files": {}, "path": None})
    return make(seen, healthy.recipe(model={"name": name}, method={"kind": "lora", **method}))


def sizes(name: str, **method: Any) -> dict[str, int]:
    return {item.name: item.size_bytes for item in planned(name, **method).ranks[0].memory.items}


def test_a_copy_in_four_bits_is_planned_as_it_is_held() -> None:
    assert sizes("unsloth/Llama-3.2-1B-bnb-4bit") == sizes("meta-llama/Llama-3.2-1B", kind="qlora") != sizes("meta-llama/Llama-3.2-1B")


def test_a_model_that_scales_its_logits_has_them_all_at_once() -> None:
    name = "ibm-granite/granite-3.3-2b-instruct"
    granite = known(name)
    assert granite is not None and not granite.fuses("auto")
    one = from_config({**(known_models.config_of(name) or {}), "logits_scaling": 1})
    assert one is not None and one.fuses("auto") and one.fuses(True) and not one.fuses(False)
