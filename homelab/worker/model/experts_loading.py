"""Loading a base in NF4 with its routed experts: layer by layer, so that the 16-bit experts of a model never lie in memory together.

transformers reads what a tensor of the model is made of just before it is quantised (core_model_loading.py), and asks its quantiser which tensors
these are. Its own one for bitsandbytes knows linear layers alone; here it learns the experts.
"""

from __future__ import annotations

import contextlib
from typing import Any

from transformers.core_model_loading import WeightConverter
from transformers.integrations.bitsandbytes import Bnb4bitQuantize
from transformers.quantizers.quantizer_bnb_4bit import Bnb4BitHfQuantizer
from transformers.quantizers.quantizers_utils import get_module_from_name, should_convert_module

from homelab.shared.protocol.quantisation import INT8
from homelab.worker.errors import size_words
from homelab.worker.model import adapter_targets, stored_experts
from homelab.worker.model.fused_experts import MATRICES, fits, is_fused
from homelab.worker.model.quantised_experts import QuantisedExperts

_NAME = "bitsandbytes_4bit"  # in transformers' table of quantisers


def quantising() -> contextlib.AbstractContextManager[None]:
    """While this lasts, transformers holds routed experts in 4 bits where it quantises to 4 bits, and reads a base that was saved so."""
    return stored_experts.read_by(_NAME, _Quantiser)


def install(model: Any, skipped: list[str] | None = None, *, awaits: bool = False) -> None:
    """Put `QuantisedExperts` in the place of all modules where they fit; `awaits` as there. `skipped`: transformers' names of modules that stay as they are."""
    for name, part in list(model.named_modules()):
        if fits(part) and should_convert_module(name, skipped):
            model.set_submodule(name, QuantisedExperts(part, awaits=awaits))


def unquantised(model: Any) -> tuple[str, int, int]:
    """(their classes, in how many places, bytes) of routed experts that a loaded model has in 16 or 32 bits."""
    classes, count, size = set(), 0, 0
    for name, part in model.named_modules():
        weights = [weight for weight in part.parameters(recurse=False) if weight.is_floating_point() and weight.dim() > 1]
        if weights and (is_fused(part) or adapter_targets.is_of_routed_expert(name)):
            classes.add(type(part).__name__)
            count, size = count + 1, size + sum(weight.nbytes for weight in weights)
    return ", ".join(sorted(classes)), count, size


def words_of_unquantised(model: Any, how: str, precision: str, *, is_stored: bool) -> str | None:
    """What a person should know of routed experts that stay wide on a base in `how`; None where there are none. `is_stored`: its files are quantised."""
    classes, count, size_bytes = unquantised(model)
    if not count:
        return None
    why = "8 bits are for linear layers alone" if how == INT8 else "homelab does not quantise this form"
    return (
        f"base: the routed experts of {count} layers stay in {precision}, {size_words(size_bytes)} ({classes}): "
        f"{'as the files have them' if is_stored else why}"
    )


class _Quantiser(Bnb4BitHfQuantizer):
    def _process_model_before_weight_loading(self, model: Any, device_map: Any, **kwargs: Any) -> None:
        super()._process_model_before_weight_loading(model, device_map, **kwargs)
        install(model, self.modules_to_not_convert, awaits=not self.pre_quantized)
        places = set((device_map or {}).values())
        self.device: Any = places.pop() if len(places) == 1 else None

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any) -> list[Any]:
        """The experts of a layer take 1.6 GB for Qwen3-30B-A3B while they are put together. They do so in the host's memory, as a card that the base
        just fits on has no room for that."""
        updated: list[Any] = super().update_weight_conversions(weight_conversions, model)
        for entry in updated:
            if (
                not self.pre_quantized
                and isinstance(entry, WeightConverter)
                and any(name.endswith(MATRICES) for name in entry.target_patterns)
            ):
                entry.force_cpu = True
        return updated

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        module, name = get_module_from_name(model, param_name)
        return (isinstance(module, QuantisedExperts) and name in MATRICES) or super().param_needs_quantization(model, param_name, **kwargs)

    def get_quantize_ops(self) -> Any:
        return _Quantise(self)


class _Quantise(Bnb4bitQuantize):
    """Of what was read just now: matrices of experts go into their module, all others are left to transformers."""

    def convert(self, input_dict: dict[str, Any], model: Any = None, missing_keys: set[str] | None = None, **kwargs: Any) -> dict[str, Any]:
        others = {}
        for full_name, value in input_dict.items():
            module, name = get_module_from_name(model, full_name)
            if isinstance(module, QuantisedExperts):
                module.hold(name, value[0] if isinstance(value, list) else value, self.hf_quantizer.device)
                if missing_keys is not None:
                    missing_keys.discard(full_name)
            else:
                others[full_name] = value
        return super().convert(others, model=model, missing_keys=missing_keys, **kwargs) if others else {}
