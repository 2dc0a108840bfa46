"""Writing a whole model: what transformers would refuse to write after the night is put right before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")


def save_whole(model: Any, folder: Path, **options: Any) -> None:
    """`save_pretrained`, with settings for generation that transformers accepts."""
    mend_generation(model)
    _forget_dequantising(model)
    model.save_pretrained(folder, **options)


def _forget_dequantising(model: Any) -> None:
    """Let weights have their own names. transformers writes by undoing how it read, and a dequantisation is not undone: plain experts of gpt-oss would get
    the names of MXFP4's blocks and scales (core_model_loading.py, revert_weight_conversion)."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions:
        model._weight_conversions = [
            entry
            for entry in conversions
            if not (steps := getattr(entry, "operations", ())) or any("integrations" not in type(step).__module__ for step in steps)
        ]


def forget_quantisation(model: Any) -> None:
    """Let a model with plain weights not say in its config.json that they are quantised."""
    for config in {id(each): each for each in (model.config, model.config.get_text_config())}.values():
        if hasattr(config, "quantization_config"):
            del config.quantization_config


def mend_generation(model: Any) -> None:
    """Published models set a temperature without sampling; transformers refuses to write that once any other setting was changed
    (generation/configuration_utils.py, save_pretrained). The numbers were meant for sampling, so it is switched on; else the defaults are written.
    """
    settings = getattr(model, "generation_config", None)
    if settings is None or _is_valid(settings):
        return
    if any(getattr(settings, name, None) is not None for name in _SAMPLING):
        settings.do_sample = True
    if not _is_valid(settings):
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_model_config(model.config)


def _is_valid(settings: Any) -> bool:
    try:
        settings.validate(strict=True)
    except ValueError:
        return False
    return True
