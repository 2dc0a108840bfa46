"""What an adapter adds to each weight of its base, and the weights of a quantised base as they are dequantised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from homelab.worker.errors import WorkerError

_NAME = "default"


@dataclass(frozen=True)
class Layer:
    """A linear layer of the base as the adapter was trained on it. `a` [r, in], `b` [out, r], both fp32; None where no adapter is.

    `held`: its quantised weight with its scales; None where it is not quantised.
    """

    a: torch.Tensor | None
    b: torch.Tensor | None
    scale: float
    is_transposed: bool
    held: Any

    def merged(self, weight: torch.Tensor, *, dequantised: bool) -> torch.Tensor:
        """`weight` [out, in] (or what the quantised one stands for) plus what the adapter adds, in fp32."""
        base = self._dequantised() if dequantised and self.held is not None else weight.float()
        if self.a is None or self.b is None:
            return base
        delta = (self.b @ self.a) * self.scale
        return base + (delta.T if self.is_transposed else delta)

    def _dequantised(self) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        if getattr(self.held, "SCB", None) is not None:
            from homelab.worker.model import int8_linear

            return int8_linear.dequantised(self.held.data, self.held.SCB, torch.float32)
        return dequantize_4bit(self.held.data, self.held.quant_state).float()


def layers(model: Any) -> dict[str, Layer]:
    """Name of a layer in the base -> what was trained on it, of a PEFT model with one LoRA adapter. Raises WorkerError for another adapter."""
    from peft.tuners.lora import LoraLayer

    if any(getattr(model.peft_config[_NAME], key, False) for key in ("use_dora", "modules_to_save")):
        raise WorkerError("this adapter is more than LoRA (DoRA or whole modules)", where="adapter_config.json", hint="merge it with the program that made it")
    found = {}
    for name, part in model.base_model.model.named_modules():
        if isinstance(part, LoraLayer):
            found[name] = Layer(
                part.lora_A[_NAME].weight.detach().float().clone(), part.lora_B[_NAME].weight.detach().float().clone(), float(part.scaling[_NAME]),
                bool(getattr(part, "fan_in_fan_out", False)), _held(part.get_base_layer()),
            )  # fmt: skip
        elif _held(part) is not None and not name.endswith(".base_layer"):
            found[name] = Layer(None, None, 0.0, False, _held(part))
    return found


@torch.no_grad()
def put_into(model: Any, adapted: Mapping[str, Layer], *, dequantised: bool, stored: torch.dtype) -> Iterator[int]:
    """Put the merged weights into the plain base, rounded once to `stored`; yields how many layers are done. Weights keep the dtype they have."""
    parts = dict(model.named_modules())
    for count, (name, layer) in enumerate(adapted.items(), 1):
        if name not in parts:
            raise WorkerError(f"the adapter does not fit this base: it has no {name}", where="[model] name", hint="copy the model folder to this node again")
        weight = parts[name].weight
        weight.copy_(layer.merged(weight, dequantised=dequantised).to(stored))
        yield count


def _held(part: Any) -> Any:
    weight = getattr(part, "weight", None)
    return weight if any(getattr(weight, name, None) is not None for name in ("quant_state", "SCB")) else None
