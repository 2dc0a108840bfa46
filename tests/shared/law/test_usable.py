"""The table of what can be trained: whole, without contradictions, and each refusal names an edit after which it is no refusal."""

from __future__ import annotations

import re
from typing import Any

import pytest

from homelab.shared.law import gguf_classes, usable
from homelab.shared.protocol.quantisation import stored_of

QUANTISED = {
    usable.PLAIN: {},
    usable.BNB_4BIT: {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}},
    usable.BNB_8BIT: {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}},
    usable.WIDENED: {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    usable.FOREIGN: {"quantization_config": {"quant_method": "gptq", "bits": 4}},
}
FOREIGN = (
    "gptq",
    "awq",
    "hqq",
    "compressed-tensors",
    "torchao",
    "bitnet",
    "eetq",
    "quanto",
    "fbgemm_fp8",
    "aqlm",
    "x" * 10_000,
    None,
    7,
    ["fp8"],
)
METHODS = {
    usable.FULL: ("full", "auto"),
    usable.LORA: ("lora", "auto"),
    usable.LORA_8BIT: ("lora", "8bit"),
    usable.QLORA: ("qlora", "auto"),
}
CELLS = [(form, method) for form in QUANTISED for method in METHODS]


def edited(edit: str, kind: str, base: str) -> tuple[str, str]:
    """The method after the first edit that is offered."""
    first = edit.partition("; or")[0]
    named = re.search(r'kind = "(\w+)"', first)
    return (named[1] if named else kind), (
        "auto" if "without base" in first or (named and named[1] != "lora") else "8bit" if 'base = "8bit"' in first else "auto"
    )


def test_the_table_has_every_cell_and_no_contradiction() -> None:
    assert set(usable.CHECKPOINTS) == set(CELLS)
    for (_, method), base in usable.CHECKPOINTS.items():
        assert not (base.merge and base.refusal) and not (base.merge and method == usable.FULL)
        assert base.merge or base.refusal or method == usable.FULL
    for part in usable.PARTS.values():
        assert (part.merge is None) == bool(part.why_not)


@pytest.mark.parametrize(("form", "method"), CELLS)
def test_the_edit_of_each_refusal_is_tried(form: str, method: str) -> None:
    kind, base = METHODS[method]
    config: Any = QUANTISED[form]
    refusal = usable.checkpoint_refusal(stored_of(config), kind, base)
    assert (refusal is None) == (usable.CHECKPOINTS[form, method].refusal is None)
    if refusal is None:
        assert bool(usable.CHECKPOINTS[usable.checkpoint_of(config)[0], usable.method_of(kind, base)].merge) == (kind != "full")
        return
    assert "quantised already" in refusal.reason
    is_other_model = refusal.edit.startswith("[model]")
    assert usable.checkpoint_refusal(None if is_other_model else stored_of(config), *edited(refusal.edit, kind, base)) is None


@pytest.mark.parametrize(
    ("config", "form"),
    [
        ({}, usable.PLAIN), ({"quantization_config": None}, usable.PLAIN), ({"quantization_config": "gptq"}, usable.PLAIN),
        ({"quantization_config": {"load_in_4bit": True}}, usable.BNB_4BIT), ({"quantization_config": {"_load_in_8bit": True, "quant_method": "bitsandbytes"}}, usable.BNB_8BIT),
        *(({"quantization_config": {"quant_method": name}}, usable.WIDENED) for name in ("fp8", "mxfp4")),
        *(({"quantization_config": {"quant_method": name}}, usable.FOREIGN) for name in FOREIGN),
    ],
)  # fmt: skip
def test_what_a_config_says_of_its_weights(config: dict[str, Any], form: str) -> None:
    found, name = usable.checkpoint_of(config)
    assert found == form and 0 < len(name) < 60


def test_a_part_that_is_refused_says_why_and_what_to_name_instead() -> None:
    refusal = usable.part_refusal(usable.CONVOLUTION, "layers.0.conv1d", "Conv1d", ["q_proj", "v_proj"])
    assert refusal is not None and "layers.0.conv1d" in refusal.reason and refusal.edit == '[method] targets = ["q_proj", "v_proj"]'
    alone = usable.part_refusal(usable.SHARED, "x", "Linear", [])
    assert alone is not None and 'kind = "full"' in alone.edit
    assert usable.part_refusal(usable.EXPERTS, "x", "MixtralExperts", []) is None


def test_what_becomes_a_gguf_file() -> None:
    assert usable.gguf_refusal("LlamaForCausalLM") is None and usable.gguf_refusal("LlamaForCausalLM", is_untied=True) is None
    assert usable.gguf_refusal("Gemma2ForCausalLM") is None
    untied, unknown = usable.gguf_refusal("Gemma2ForCausalLM", is_untied=True), usable.gguf_refusal("OPTForCausalLM")
    assert (
        untied is not None
        and "no separate head" in untied.reason
        and unknown is not None
        and "does not know OPTForCausalLM" in unknown.reason
    )
    assert gguf_classes.WITHOUT_A_HEAD < gguf_classes.KNOWN
