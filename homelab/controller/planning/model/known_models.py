"""The models that are planned for by their name alone, before any machine has them: their config.json, as far as memory and time depend on it.

The sizes are those of each model's own config.json; the tests compare the parameters that they make with the published ones. A copy under another name (of
Unsloth, of NousResearch, or quantised: -bnb-4bit, -GPTQ-Int4, -FP8) is known by the name of what it was made from.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Any

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size")
# model_type, the sizes in the order of _SIZES, whether head and embeddings are one, and the positions of the models (names with choices, as in a shell).
_Dense = tuple[str, tuple[int, ...], bool, dict[int, tuple[str, ...]]]
_QWEN_DISTILLED = "deepseek-ai/DeepSeek-R1-Distill-Qwen-"
_DENSE: tuple[_Dense, ...] = (
    ("qwen2", (896, 24, 14, 2, 64, 4864, 151_936), True, {32_768: ("Qwen/Qwen2.5-{,Coder-}0.5B{,-Instruct}", "Qwen/Qwen2-0.5B-Instruct"), 131_072: ("Qwen/Qwen2-0.5B",)}),
    ("qwen2", (1536, 28, 12, 2, 128, 8960, 151_936), True, {
        32_768: ("Qwen/Qwen2{,.5}-1.5B-Instruct", "Qwen/Qwen2.5-Coder-1.5B{,-Instruct}"), 131_072: ("Qwen/Qwen2{,.5}-1.5B",), 4096: ("Qwen/Qwen2.5-Math-1.5B{,-Instruct}",),
    }),
    ("qwen2", (1536, 28, 12, 2, 128, 8960, 151_936), False, {131_072: (f"{_QWEN_DISTILLED}1.5B",)}),
    ("qwen2", (2048, 36, 16, 2, 128, 11008, 151_936), True, {32_768: ("Qwen/Qwen2.5-{,Coder-}3B{,-Instruct}",)}),
    ("qwen2", (3584, 28, 28, 4, 128, 18944, 152_064), False, {
        32_768: ("Qwen/Qwen2{,.5}-7B-Instruct", "Qwen/Qwen2.5-Coder-7B{,-Instruct}"), 131_072: ("Qwen/Qwen2{,.5}-7B", f"{_QWEN_DISTILLED}7B"),
        4096: ("Qwen/Qwen2.5-Math-7B{,-Instruct}",),
    }),
    ("qwen2", (5120, 48, 40, 8, 128, 13824, 152_064), False, {
        32_768: ("Qwen/Qwen2.5-14B-Instruct", "Qwen/Qwen2.5-Coder-14B{,-Instruct}"), 131_072: ("Qwen/Qwen2.5-14B", f"{_QWEN_DISTILLED}14B"),
    }),
    ("qwen2", (5120, 64, 40, 8, 128, 27648, 152_064), False, {
        32_768: ("Qwen/Qwen2.5-32B-Instruct", "Qwen/Qwen2.5-Coder-32B{,-Instruct}"), 131_072: ("Qwen/Qwen2.5-32B", f"{_QWEN_DISTILLED}32B"), 40_960: ("Qwen/QwQ-32B",),
    }),
    ("qwen2", (8192, 80, 64, 8, 128, 29568, 152_064), False, {32_768: ("Qwen/Qwen2.5-72B-Instruct",), 131_072: ("Qwen/Qwen2.5-72B",)}),
    ("qwen3", (1024, 28, 16, 8, 128, 3072, 151_936), True, {40_960: ("Qwen/Qwen3-0.6B",), 32_768: ("Qwen/Qwen3-0.6B-Base",)}),
    ("qwen3", (2048, 28, 16, 8, 128, 6144, 151_936), True, {40_960: ("Qwen/Qwen3-1.7B",), 32_768: ("Qwen/Qwen3-1.7B-Base",)}),
    ("qwen3", (2560, 36, 32, 8, 128, 9728, 151_936), True, {
        40_960: ("Qwen/Qwen3-4B",), 32_768: ("Qwen/Qwen3-4B-Base",), 262_144: ("Qwen/Qwen3-4B-{Instruct,Thinking}-2507",),
    }),
    ("qwen3", (4096, 36, 32, 8, 128, 12288, 151_936), False, {
        40_960: ("Qwen/Qwen3-8B",), 32_768: ("Qwen/Qwen3-8B-Base",), 131_072: ("deepseek-ai/DeepSeek-R1-0528-Qwen3-8B",),
    }),
    ("qwen3", (5120, 40, 40, 8, 128, 17408, 151_936), False, {40_960: ("Qwen/Qwen3-14B",), 32_768: ("Qwen/Qwen3-14B-Base",)}),
    ("qwen3", (5120, 64, 64, 8, 128, 25600, 151_936), False, {40_960: ("Qwen/Qwen3-32B",)}),
    ("llama", (4096, 32, 32, 32, 128, 11008, 32_000), False, {4096: ("meta-llama/Llama-2-7b-{,chat-}hf",)}),
    ("llama", (5120, 40, 40, 40, 128, 13824, 32_000), False, {4096: ("meta-llama/Llama-2-13b-{,chat-}hf",)}),
    ("llama", (4096, 32, 32, 8, 128, 14336, 128_256), False, {
        8192: ("meta-llama/Meta-Llama-3-8B{,-Instruct}", "unsloth/llama-3-8b{,-Instruct}"),
        131_072: ("meta-llama/{,Meta-}Llama-3.1-8B{,-Instruct}", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"),
    }),
    ("llama", (8192, 80, 64, 8, 128, 28672, 128_256), False, {
        8192: ("meta-llama/Meta-Llama-3-70B{,-Instruct}",),
        131_072: ("meta-llama/{,Meta-}Llama-3.1-70B{,-Instruct}", "meta-llama/Llama-3.3-70B-Instruct", "deepseek-ai/DeepSeek-R1-Distill-Llama-70B"),
    }),
    ("llama", (2048, 16, 32, 8, 64, 8192, 128_256), True, {131_072: ("meta-llama/Llama-3.2-1B{,-Instruct}",)}),
    ("llama", (3072, 28, 24, 8, 128, 8192, 128_256), True, {131_072: ("meta-llama/Llama-3.2-3B{,-Instruct}",)}),
    ("llama", (2048, 22, 32, 4, 64, 5632, 32_000), False, {2048: ("TinyLlama/TinyLlama-1.1B-{Chat-v1.0,intermediate-step-1431k-3T}", "unsloth/tinyllama{,-chat}")}),
    ("llama", (576, 30, 9, 3, 64, 1536, 49_152), True, {8192: ("HuggingFaceTB/SmolLM2-135M{,-Instruct}",)}),
    ("llama", (960, 32, 15, 5, 64, 2560, 49_152), True, {8192: ("HuggingFaceTB/SmolLM2-360M{,-Instruct}",)}),
    ("llama", (2048, 24, 32, 32, 64, 8192, 49_152), True, {8192: ("HuggingFaceTB/SmolLM2-1.7B{,-Instruct}",)}),
    ("smollm3", (2048, 36, 16, 4, 128, 11008, 128_256), True, {65_536: ("HuggingFaceTB/SmolLM3-3B{,-Base}",)}),
    ("llama", (4096, 32, 32, 4, 128, 11008, 64_000), False, {4096: ("01-ai/Yi{,-1.5}-6B{,-Chat}",)}),
    ("llama", (4096, 48, 32, 4, 128, 11008, 64_000), False, {4096: ("01-ai/Yi-1.5-9B{,-Chat}",)}),
    ("llama", (7168, 60, 56, 8, 128, 20480, 64_000), False, {4096: ("01-ai/Yi{,-1.5}-34B{,-Chat}",)}),
    ("mistral", (4096, 32, 32, 8, 128, 14336, 32_000), False, {32_768: ("mistralai/Mistral-7B-{,Instruct-}v0.1", "mistralai/Mistral-7B-Instruct-v0.2", "unsloth/mistral-7b-v0.2")}),
    ("mistral", (4096, 32, 32, 8, 128, 14336, 32_768), False, {32_768: ("mistralai/Mistral-7B-{,Instruct-}v0.3",)}),
    ("mistral", (4096, 36, 32, 8, 128, 12288, 131_072), False, {32_768: ("mistralai/Ministral-8B-Instruct-2410",)}),
    ("mistral", (5120, 40, 32, 8, 128, 14336, 131_072), False, {131_072: ("mistralai/Mistral-Nemo-{Base,Instruct}-2407",)}),
    ("mistral", (6144, 56, 48, 8, 128, 16384, 32_768), False, {32_768: ("mistralai/Mistral-Small-Instruct-2409",)}),
    ("mistral", (5120, 40, 32, 8, 128, 32768, 131_072), False, {32_768: ("mistralai/Mistral-Small-24B-{Base,Instruct}-2501",), 131_072: ("mistralai/Devstral-Small-2505",)}),
    ("gemma", (2048, 18, 8, 1, 256, 16384, 256_000), True, {8192: ("google/gemma-2b{,-it}", "google/gemma-1.1-2b-it")}),
    ("gemma", (3072, 28, 16, 16, 256, 24576, 256_000), True, {8192: ("google/gemma-7b{,-it}", "google/gemma-1.1-7b-it")}),
    ("gemma2", (2304, 26, 8, 4, 256, 9216, 256_000), True, {8192: ("google/gemma-2-2b{,-it}",)}),
    ("gemma2", (3584, 42, 16, 8, 256, 14336, 256_000), True, {8192: ("google/gemma-2-9b{,-it}",)}),
    ("gemma2", (4608, 46, 32, 16, 128, 36864, 256_000), True, {8192: ("google/gemma-2-27b{,-it}",)}),
    ("gemma3_text", (640, 18, 4, 1, 256, 2048, 262_144), True, {32_768: ("google/gemma-3-270m{,-it}",)}),
    ("gemma3_text", (1152, 26, 4, 1, 256, 6912, 262_144), True, {32_768: ("google/gemma-3-1b-{it,pt}",)}),
    ("phi3", (3072, 32, 32, 32, 96, 8192, 32_064), False, {
        4096: ("microsoft/Phi-3-mini-4k-instruct",), 131_072: ("microsoft/Phi-3-mini-128k-instruct", "microsoft/Phi-3.5-mini-instruct"),
    }),
    ("phi3", (5120, 40, 40, 10, 128, 17920, 32_064), False, {4096: ("microsoft/Phi-3-medium-4k-instruct",), 131_072: ("microsoft/Phi-3-medium-128k-instruct",)}),
    ("phi3", (5120, 40, 40, 10, 128, 17920, 100_352), False, {16_384: ("microsoft/phi-4",), 32_768: ("microsoft/Phi-4-reasoning{,-plus}",)}),
    ("phi3", (3072, 32, 24, 8, 128, 8192, 200_064), True, {131_072: ("microsoft/Phi-4-mini-{instruct,reasoning}",)}),
    # Unsloth has written these anew as Llama, whose layers have other names.
    ("llama", (3072, 32, 32, 32, 96, 8192, 32_064), False, {4096: ("unsloth/Phi-3-mini-4k-instruct",), 131_072: ("unsloth/Phi-3.5-mini-instruct",)}),
    ("llama", (5120, 40, 40, 10, 128, 17920, 100_352), False, {16_384: ("unsloth/phi-4",)}),
    ("olmo2", (2048, 16, 16, 16, 128, 8192, 100_352), False, {4096: ("allenai/OLMo-2-0425-1B{,-SFT,-DPO,-Instruct}",)}),
    ("olmo2", (4096, 32, 32, 32, 128, 11008, 100_352), False, {4096: ("allenai/OLMo-2-1124-7B{,-SFT,-DPO,-Instruct}",)}),
    ("olmo2", (5120, 40, 40, 40, 128, 13824, 100_352), False, {4096: ("allenai/OLMo-2-1124-13B{,-SFT,-DPO,-Instruct}",)}),
    ("olmo2", (5120, 64, 40, 8, 128, 27648, 100_352), False, {4096: ("allenai/OLMo-2-0325-32B{,-SFT,-DPO,-Instruct}",)}),
    ("granite", (2048, 40, 32, 8, 64, 8192, 49_155), True, {131_072: ("ibm-granite/granite-3.{1,2}-2b-{base,instruct}",)}),
    ("granite", (4096, 40, 32, 8, 128, 12800, 49_155), True, {131_072: ("ibm-granite/granite-3.{1,2}-8b-{base,instruct}",)}),
    ("granite", (2048, 40, 32, 8, 64, 8192, 49_159), True, {131_072: ("ibm-granite/granite-3.3-2b-{base,instruct}",)}),
    ("granite", (4096, 40, 32, 8, 128, 12800, 49_159), True, {131_072: ("ibm-granite/granite-3.3-8b-{base,instruct}",)}),
)  # fmt: skip

# Their language part alone, which is what is trained.
_HYBRID: tuple[tuple[_Dense, int], ...] = (  # and their heads of values in the gated delta rule
    (("qwen3_5_text", (1024, 24, 8, 2, 256, 3584, 248_320), True, {262_144: ("Qwen/Qwen3.5-0.8B{,-Base}",)}), 16),
    (("qwen3_5_text", (2048, 24, 8, 2, 256, 6144, 248_320), True, {262_144: ("Qwen/Qwen3.5-2B{,-Base}",)}), 16),
    (("qwen3_5_text", (2560, 32, 16, 4, 256, 9216, 248_320), True, {262_144: ("Qwen/Qwen3.5-4B{,-Base}",)}), 32),
    (("qwen3_5_text", (4096, 32, 16, 4, 256, 12288, 248_320), False, {262_144: ("Qwen/Qwen3.5-9B{,-Base}",)}), 32),
    (("qwen3_5_text", (5120, 64, 24, 4, 256, 17408, 248_320), False, {262_144: ("Qwen/Qwen3.{5,8}-27B",)}), 48),
)  # fmt: skip
_OF_QWEN: dict[str, Any] = {"num_experts": 128, "num_experts_per_tok": 8}
_OF_GEMMA4: dict[str, Any] = {
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}  # its part for images is not counted
_OF_HYBRID: dict[str, Any] = {"num_experts": 256, "num_experts_per_tok": 8}
_MXFP4: dict[str, Any] = {"num_experts_per_tok": 4, "quantization_config": {"quant_method": "mxfp4"}}
_LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# The same of mixtures of experts, and what config.json says of these.
_MIXTURES: tuple[tuple[_Dense, dict[str, Any]], ...] = (
    (("qwen3_moe", (2048, 48, 32, 4, 128, 6144, 151_936), False, {
        40_960: ("Qwen/Qwen3-30B-A3B",), 32_768: ("Qwen/Qwen3-30B-A3B-Base",),
        262_144: ("Qwen/Qwen3-30B-A3B-{Instruct,Thinking}-2507", "Qwen/Qwen3-Coder-30B-A3B-Instruct"),
    }), _OF_QWEN | {"moe_intermediate_size": 768}),
    (("qwen3_moe", (4096, 94, 64, 4, 128, 12288, 151_936), False, {
        40_960: ("Qwen/Qwen3-235B-A22B",), 262_144: ("Qwen/Qwen3-235B-A22B-{Instruct,Thinking}-2507",),
    }), _OF_QWEN | {"moe_intermediate_size": 1536}),
    (("qwen3_5_moe_text", (2048, 40, 16, 2, 256, 0, 248_320), False, {262_144: ("Qwen/Qwen3.{5,6}-35B-A3B",)}), _OF_HYBRID | {
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "linear_num_value_heads": 32,
    }),
    (("qwen3_5_moe_text", (3072, 48, 32, 2, 256, 0, 248_320), False, {262_144: ("Qwen/Qwen3.5-122B-A10B",)}), _OF_HYBRID | {
        "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 1024, "linear_num_value_heads": 64,
    }),
    (("gemma4_text", (2816, 30, 16, 8, 256, 2112, 262_144), True, {262_144: ("google/gemma-4-26B-A4B{,-it}",)}), _OF_GEMMA4 | {
        "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704,
    }),
    (("gemma4_text", (5376, 60, 32, 16, 256, 21504, 262_144), True, {262_144: ("google/gemma-4-31B{,-it}",)}), _OF_GEMMA4 | {"num_global_key_value_heads": 4}),
    (("qwen3_next", (2048, 48, 16, 2, 256, 5120, 151_936), False, {262_144: ("Qwen/Qwen3-Next-80B-A3B-{Instruct,Thinking}", "Qwen/Qwen3-Coder-Next")}), {
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "linear_num_value_heads": 32,
    }),
    (("mixtral", (4096, 32, 32, 8, 128, 14336, 32_000), False, {32_768: ("mistralai/Mixtral-8x7B-{,Instruct-}v0.1",)}), {"num_local_experts": 8, "num_experts_per_tok": 2}),
    (("mixtral", (6144, 56, 48, 8, 128, 16384, 32_000), False, {65_536: ("mistralai/Mixtral-8x22B-v0.1",)}), {"num_local_experts": 8, "num_experts_per_tok": 2}),
    (("mixtral", (6144, 56, 48, 8, 128, 16384, 32_768), False, {65_536: ("mistralai/Mixtral-8x22B-Instruct-v0.1",)}), {"num_local_experts": 8, "num_experts_per_tok": 2}),
    (("olmoe", (2048, 16, 16, 16, 128, 1024, 50_304), False, {4096: ("allenai/OLMoE-1B-7B-0924{,-SFT,-Instruct}",)}), {"num_experts": 64, "num_experts_per_tok": 8}),
    (("gpt_oss", (2880, 24, 64, 8, 64, 2880, 201_088), False, {131_072: ("openai/gpt-oss-20b",)}), _MXFP4 | {"num_local_experts": 32}),
    (("gpt_oss", (2880, 36, 64, 8, 64, 2880, 201_088), False, {131_072: ("openai/gpt-oss-120b",)}), _MXFP4 | {"num_local_experts": 128}),
    (("deepseek_v2", (2048, 27, 16, 16, 64, 10944, 102_400), False, {163_840: ("deepseek-ai/DeepSeek-V2-Lite{,-Chat}",)}), _LATENT | {
        "n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2, "first_k_dense_replace": 1, "q_lora_rank": None,
    }),
    (("deepseek_v3", (7168, 61, 128, 128, 64, 18432, 129_280), False, {163_840: ("deepseek-ai/DeepSeek-{V3,V3-0324,V3.1,R1,R1-0528}",)}), _LATENT | {
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1, "first_k_dense_replace": 3, "q_lora_rank": 1536,
        "quantization_config": {"quant_method": "fp8"},
    }),
)  # fmt: skip

# Models that see, and are trained with that part beside them: the sizes of their text.
_SIGHT: dict[str, Any] = {
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}
_SEEING: tuple[_Dense, ...] = (
    ("gemma3", (2560, 34, 8, 4, 256, 10240, 262_208), True, {131_072: ("google/gemma-3-4b-{it,pt}",)}),
    ("gemma3", (3840, 48, 16, 8, 256, 15360, 262_208), True, {131_072: ("google/gemma-3-12b-{it,pt}",)}),
    ("gemma3", (5376, 62, 32, 16, 128, 21504, 262_208), True, {131_072: ("google/gemma-3-27b-{it,pt}",)}),
)  # fmt: skip

# What config.json says beyond that of the kind.
_MORE = {"granite": {"logits_scaling": 8.0}}
# Models that no formula of the planner counts: what their config.json says of their kind.
_OTHER: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"model_type": "mllama"}, ("meta-llama/Llama-3.2-{11B,90B}-Vision{,-Instruct}",)),
    ({"model_type": "qwen2_vl"}, ("Qwen/Qwen2-VL-{2B,7B,72B}-Instruct",)),
    ({"model_type": "qwen2_5_vl"}, ("Qwen/Qwen2.5-VL-{3B,7B,32B,72B}-Instruct",)),
    ({"model_type": "qwen3_vl"}, ("Qwen/Qwen3-VL-{2B,4B,8B,32B}-{Instruct,Thinking}",)),
    ({"model_type": "mistral3"}, ("mistralai/Mistral-Small-3.1-24B-{Base,Instruct}-2503", "mistralai/Mistral-Small-3.2-24B-Instruct-2506")),
    ({"model_type": "llava"}, ("llava-hf/llava-1.5-{7b,13b}-hf",)),
    ({"model_type": "bert"}, ("{,google-bert/}bert-{base,large}-{cased,uncased}",)),
    ({"model_type": "roberta"}, ("{,FacebookAI/}roberta-{base,large}",)),
    ({"model_type": "xlm-roberta"}, ("{,FacebookAI/}xlm-roberta-{base,large}",)),
    ({"model_type": "distilbert"}, ("{,distilbert/}distilbert-base-{cased,uncased}",)),
    ({"model_type": "modernbert"}, ("answerdotai/ModernBERT-{base,large}",)),
    ({"model_type": "deberta-v2"}, ("microsoft/deberta-v3-{xsmall,small,base,large}",)),
    ({"model_type": "t5", "is_encoder_decoder": True}, ("{,google-t5/}t5-{small,base,large}", "google/flan-t5-{small,base,large,xl,xxl}")),
    ({"model_type": "bart", "is_encoder_decoder": True}, ("facebook/bart-{base,large,large-cnn}",)),
    ({"model_type": "whisper", "is_encoder_decoder": True}, ("openai/whisper-{tiny,base,small,medium,large-v3,large-v3-turbo}",)),
    ({"model_type": "gpt2"}, ("{,openai-community/}gpt2{,-medium,-large,-xl}",)),
    ({"model_type": "gpt_neox"}, ("EleutherAI/pythia-{70m,160m,410m,1b,1.4b,2.8b,6.9b,12b}{,-deduped}",)),
    ({"model_type": "mamba"}, ("state-spaces/mamba-{130m,370m,790m,1.4b,2.8b}-hf",)),
)  # fmt: skip
# Who publishes models of others once more, as they are.
_MIRRORS = ("unsloth", "nousresearch")
# How a quantised copy is called, and what its config.json says then.
_COPIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"[-_](unsloth[-_])?bnb[-_]4bit", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    (r"[-_](unsloth[-_])?bnb[-_]8bit", {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    (r"[-_]gptq([-_]int4)?", {"quant_method": "gptq", "bits": 4}),
    (r"[-_]gptq[-_]int8", {"quant_method": "gptq", "bits": 8}),
    (r"[-_]awq([-_]int4)?", {"quant_method": "awq", "bits": 4}),
    (r"[-_]fp8", {"quant_method": "fp8"}),
)


def config_of(name: str) -> dict[str, Any] | None:
    """What config.json of this model says, by its hub id (in any case); None for a name that is not known. A quantised copy of a model that is not
    known has no more than its quantization_config.

    `max_position_embeddings` is that of the model with this name, though others have the same sizes.
    """
    lower = name.lower()
    if (found := _found(lower)) is not None:
        return found
    for pattern, quantised in _COPIES:
        if match := re.fullmatch(rf"(.+?){pattern}", lower):
            return {**(_found(match[1]) or {}), "quantization_config": quantised}
    return None


def _found(lower: str) -> dict[str, Any] | None:
    owner, _, last = lower.rpartition("/")
    return _table().get(lower) or (_by_last().get(last) if owner in _MIRRORS else None)


def names() -> list[str]:
    """The hub ids of the models that formulas count."""
    return [name for (*_, positions), _ in _counted() for written in positions.values() for each in written for name in _spelt(each)]


def near(name: str, others: Iterable[str] = ()) -> str:
    """The known name, or that of `others`, that was probably meant by this one; "" where none is like it. The owner may have been left out."""
    choices = {(known if "/" in name else known.rpartition("/")[2]).lower(): known for known in (*others, *names())}
    found = difflib.get_close_matches(name.lower(), choices, n=1, cutoff=0.75)
    return choices[found[0]] if found else ""


def _counted() -> Iterator[tuple[_Dense, dict[str, Any]]]:
    """Every shape that formulas count, with what its config.json says beyond the sizes."""
    yield from ((shape, _MORE.get(shape[0], {})) for shape in _DENSE)
    yield from ((shape, {"linear_num_value_heads": heads}) for shape, heads in _HYBRID)
    yield from ((shape, {}) for shape in _SEEING)
    yield from _MIXTURES


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    """Every known name, in small letters, with its config.json."""
    table: dict[str, dict[str, Any]] = {}
    for (kind, sizes, is_tied, positions), more in _counted():
        for most, written in positions.items():
            config = {
                "model_type": kind,
                **{key: size for key, size in zip(_SIZES, sizes, strict=True) if size},  # 0: the model has no layer without experts
                "tie_word_embeddings": is_tied,
                "max_position_embeddings": most,
            }
            if kind == "gemma3":
                config = {"model_type": kind, "text_config": config | {"model_type": "gemma3_text"}, "vision_config": _SIGHT}
            table |= {name.lower(): config | more for each in written for name in _spelt(each)}
    return table | {name.lower(): config for config, written in _OTHER for each in written for name in _spelt(each)}


@functools.cache
def _by_last() -> dict[str, dict[str, Any]]:
    """The same by the part behind the owner."""
    return {name.rpartition("/")[2]: config for name, config in _table().items()}


def _spelt(written: str) -> Iterator[str]:
    """Every name of one that is written with choices: a{b,c} is ab and ac."""
    parts = [part.split(",") for part in re.split(r"[{}]", written)]
    yield from ("".join(chosen) for chosen in itertools.product(*parts))
