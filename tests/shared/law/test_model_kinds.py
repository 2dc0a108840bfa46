"""The lists of what is not trained are those of transformers."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.shared.law import model_kinds


def test_the_lists_are_those_of_the_installed_transformers() -> None:
    auto: Any = pytest.importorskip("transformers.models.auto.modeling_auto")
    causal, masked = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    assert set(masked) >= model_kinds.ENCODERS
    assert {kind for kind in masked if kind not in causal} - model_kinds.ENCODERS <= {
        "esmc", "jina_embeddings_v3", "modernvbert", "neomme", "tapas", "ultrabert", "ultravbert",
    }  # fmt: skip
    assert set(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES) | {"whisper"} >= model_kinds.WITH_ENCODER
    assert not model_kinds.WITH_IMAGES & set(causal)
    assert (
        set(auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES) | set(auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
        >= model_kinds.WITH_IMAGES
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM is an encoder"),
        ({"model_type": "bert", "is_decoder": True}, ""),
        ({"model_type": "modernbert", "architectures": []}, "a model of type modernbert is an encoder"),
        ({"model_type": "t5"}, "reads with an encoder"),
        ({"model_type": "anything", "is_encoder_decoder": True}, "reads with an encoder"),
        ({"model_type": "qwen2_5_vl"}, "not a causal language model that transformers can build (type qwen2_5_vl)"),
        ({"model_type": "gemma3"}, ""),
        ({"model_type": "llama"}, ""),
        ({"model_type": ["bert"]}, ""),
        ({"model_type": "bert", "architectures": [3]}, "a model of type bert is an encoder"),
        ({}, ""),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_kind_is_refused_for(config: dict[str, Any], words: str) -> None:
    refusal = model_kinds.refusal(config)
    assert (refusal is None) == (not words) and (refusal is None or words in refusal.reason)
