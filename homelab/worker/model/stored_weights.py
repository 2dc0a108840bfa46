"""Base models whose files are quantised already: which homelab trains on, and how transformers is to read them.

bitsandbytes holds them as they are stored. FP8 and MXFP4 become 16-bit weights, on every node: computing in them is another function on each
kind of card. They do while they are read; the experts of gpt-oss do for each pass (`stored_experts`), where they are neither trained nor merged.
GPTQ, AWQ and the others need packages that homelab neither installs nor has tried.
"""

from __future__ import annotations

from typing import Any

import torch

from homelab.shared.law import usable
from homelab.shared.protocol import quantisation
from homelab.shared.protocol.quantisation import Stored
from homelab.shared.recipe import Method
from homelab.worker.errors import WorkerError

# dt_proj: transformers 5, modeling_mamba.py. Jamba and Falcon Mamba leave the product to the layer where the base is quantised.
_BARE_PRODUCTS = ("mamba",)


def of(config: Any) -> Stored | None:
    """How the weights of this configuration (transformers' own) are stored; None where they are not quantised."""
    said = getattr(config, "quantization_config", None)
    if said is None:
        said = getattr(config.get_text_config(), "quantization_config", None)
    if said is None:
        return None
    return quantisation.stored_of({"quantization_config": said if isinstance(said, dict) else said.to_dict()})


def refuse(stored: Stored | None, method: Method, name: str) -> None:
    """Raises WorkerError where the method does not go with how the weights of the model `name` are stored."""
    refusal = usable.checkpoint_refusal(stored, method.kind, method.base, usable.original_of(name))
    if stored is None or refusal is None:
        return
    why = "" if stored.is_known else _cannot_load(stored)
    raise WorkerError(
        f"{refusal.reason}{f'. {why}' if why else ''}", where="[method] in the recipe, and quantization_config in the model's config.json",
        hint=f"edit the recipe: {refusal.edit}", needs_launch=True,
    )  # fmt: skip


def refuse_quantising(model_type: str, how: str | None) -> None:
    """Raises WorkerError where a base of this type is to be quantised (`how`: NF4 or INT8), and its class multiplies by a weight past the layer."""
    if how is not None and model_type in _BARE_PRODUCTS:
        raise WorkerError(
            f"a model of type {model_type} uses its weights outside of their layers, so it cannot be quantised", where="[method] in the recipe",
            hint='edit the recipe: kind = "lora" without base keeps the weights in 16 bits', needs_launch=True,
        )  # fmt: skip


def _cannot_load(stored: Stored) -> str:
    """What transformers says that reading them needs on this node; "" where it needs nothing more, or does not know the method."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING

    if stored.method not in AUTO_QUANTIZER_MAPPING:
        return f'the installed transformers does not know the method "{stored.method}"'
    try:
        settings = AUTO_QUANTIZATION_CONFIG_MAPPING[stored.method]()
        AUTO_QUANTIZER_MAPPING[stored.method](settings, pre_quantized=True).validate_environment(device_map=None)
    except ImportError as error:
        return str(error).splitlines()[0][:200]
    except Exception:  # noqa: BLE001 - settings without a default, or no card: nothing about packages
        return ""
    return ""


def options(stored: Stored | None, config: Any) -> dict[str, Any]:
    """What `from_pretrained` is to be told beside the path: FP8 and MXFP4 are made 16 bits wide."""
    if stored is None or stored.method not in quantisation.WIDENED:
        return {}
    from transformers.quantizers.auto import AutoQuantizationConfig

    said = config.quantization_config
    settings = AutoQuantizationConfig.from_dict(said if isinstance(said, dict) else said.to_dict())
    settings.dequantize = True
    return {"quantization_config": settings}


def widen(model: Any, stored: Stored | None, dtype: Any) -> None:
    """What was read from FP8 or MXFP4 is bf16 whatever was asked for: bring it to `dtype` ("auto": it stays)."""
    if stored is not None and stored.method in quantisation.WIDENED and isinstance(dtype, torch.dtype):
        model.to(dtype)


def wanted(method: Method) -> str | None:
    """How the base shall be held: NF4, INT8, or None for plain weights, which are trained. MXFP4: routed experts stay so where the files have them so."""
    return method.quantisation or (None if method.kind == "full" else quantisation.MXFP4)


def leaves_experts(stored: Stored | None, how: str | None) -> bool:
    """Whether routed experts stay in MXFP4, of what the files are and what is `wanted`."""
    return stored is not None and stored.method == quantisation.MXFP4 == how


def held(stored: Stored | None, how: str | None) -> str | None:
    """NF4, INT8 or None: how the linear layers are held, of what the files are and what is `wanted`."""
    return stored.held if stored is not None else None if how == quantisation.MXFP4 else how
