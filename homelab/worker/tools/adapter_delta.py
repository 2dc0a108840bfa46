"""What an adapter adds to each weight of its base, and the weights of a quantised base as they are dequantised."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from homelab.shared.law import usable
from homelab.worker.errors import WorkerError
from homelab.worker.model import adapted, weight_digests

_NAME = "default"


@dataclass(frozen=True)
class WeightChange:
    """What was trained of one weight of the base: `parameter` of the layer `module`, of a kind in the table.

    `a` and `b` in fp32, as PEFT has them: [r, in] and [out, r]; of embeddings [r, rows] and [width, r]; of E experts [E r, in] and [out, r E].
    None where nothing was trained. `is_transposed`: the weight is [in, out] (of experts [E, in, out]). `held`: its quantised weight with its
    scales, of experts their module; None where it is not quantised.
    """

    module: str
    parameter: str
    kind: str
    a: torch.Tensor | None
    b: torch.Tensor | None
    scale: float
    is_transposed: bool
    held: Any

    def put_into(self, weight: torch.Tensor, *, dequantised: bool) -> None:
        """Add to `weight` (or to what the quantised one stands for), in fp32, rounded once to its own dtype. Of experts one after the other."""
        if self.kind == usable.EXPERTS:
            self._into_experts(weight, dequantised=dequantised)
            return
        base = self._dequantised() if dequantised and self.held is not None else weight.float()
        if self.a is not None and self.b is not None:
            delta = (self.b @ self.a) * self.scale
            base = base + (delta.T if self.is_transposed else delta)
        weight.copy_(base)

    def _into_experts(self, weight: torch.Tensor, *, dequantised: bool) -> None:
        count = weight.shape[0]
        for number in range(count):
            base = (
                self.held.matrices(self.parameter, [number])[0].float() if dequantised and self.held is not None else weight[number].float()
            )
            if self.a is not None and self.b is not None:
                a, b = self.a.reshape(count, -1, self.a.shape[1]), self.b.reshape(self.b.shape[0], -1, count)
                delta = (b[:, :, number] @ a[number]) * self.scale
                base = base + (delta.T if self.is_transposed else delta)
            weight[number].copy_(base)

    def _dequantised(self) -> torch.Tensor:
        from bitsandbytes.functional import dequantize_4bit

        if getattr(self.held, "SCB", None) is not None:
            from homelab.worker.model import int8_linear

            return int8_linear.dequantised(self.held.data, self.held.SCB, torch.float32)
        return dequantize_4bit(self.held.data, self.held.quant_state).float()


def changes(model: Any) -> tuple[WeightChange, ...]:
    """Of a PEFT model with one LoRA adapter: every weight that was trained, and every quantised one. Raises WorkerError for another adapter."""
    config = model.peft_config[_NAME]
    if (
        any(getattr(config, key, False) for key in ("use_dora", "modules_to_save", "lora_bias"))
        or getattr(config, "bias", "none") != "none"
    ):
        raise WorkerError(
            "this adapter is more than LoRA (DoRA, biases or whole modules)",
            where="adapter_config.json",
            hint="merge it with the program that made it",
        )
    found = []
    for name, part, kind in adapted.parts(model):
        if usable.PARTS[kind].merge is None:
            raise WorkerError(
                f"the adapter is on {name}, {kind}, and is not merged",
                where="adapter_config.json",
                hint="serve it without a merge: vllm serve BASE --enable-lora",
            )
        found.append(_change(name, part, kind))
    trained = {change.module for change in found}
    for name, part in adapted.base_of(model).named_modules():
        plain = name.removesuffix(".base_layer")
        if _held(part) is not None and plain not in trained and not hasattr(part, "get_base_layer"):
            found.append(WeightChange(plain, "weight", usable.LINEAR, None, None, 0.0, False, _held(part)))
    trained_experts = {(change.module, change.parameter) for change in found}
    for name, experts in weight_digests.quantised_experts(adapted.base_of(model)).items():
        plain = re.sub(r"(\.base_layer)+$", "", name)
        found += [
            WeightChange(plain, matrix, usable.EXPERTS, None, None, 0.0, False, experts)
            for matrix in experts.shapes if (plain, matrix) not in trained_experts
        ]  # fmt: skip
    return tuple(found)


def _change(name: str, part: Any, kind: str) -> WeightChange:
    if kind in (usable.EMBEDDING, usable.TIED_EMBEDDING):
        # PEFT looks the rows up in A: [r, rows]; the table is [rows, width].
        return WeightChange(
            name,
            "weight",
            kind,
            _of(part.lora_embedding_A[_NAME]),
            _of(part.lora_embedding_B[_NAME]),
            float(part.scaling[_NAME]),
            True,
            None,
        )
    a, b, scale = _of(part.lora_A[_NAME].weight), _of(part.lora_B[_NAME].weight), float(part.scaling[_NAME])
    if kind == usable.EXPERTS:
        experts = part.get_base_layer()
        held = experts if hasattr(experts, "shape_of") else None
        return WeightChange(name, part.parameter_name, kind, a, b, scale, not part._did_swap_in_out_features, held)
    parameter = part.parameter_name if kind == usable.MATRIX else "weight"
    return WeightChange(name, parameter, kind, a, b, scale, bool(getattr(part, "fan_in_fan_out", False)), _held(part.get_base_layer()))


def _of(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().float().clone()


@torch.no_grad()
def put_into(model: Any, trained: tuple[WeightChange, ...], *, dequantised: bool) -> Iterator[int]:
    """Put what was trained into the plain base, whose weights keep their dtype; yields how many weights are done.

    A head that is also the embeddings becomes a tensor of its own where an adapter was on either. Raises WorkerError for another base.
    """
    modules = dict(model.named_modules())
    if any(usable.PARTS[change.kind].merge == usable.UNTIED for change in trained) and adapted.weight_of(
        model.get_output_embeddings()
    ) is adapted.weight_of(model.get_input_embeddings()):
        adapted.untie(model)
    for count, change in enumerate(trained, 1):
        weight = getattr(modules.get(change.module), change.parameter, None)
        if weight is None:
            raise WorkerError(
                f"the adapter does not fit this base: it has no {change.module}",
                where="[model] name",
                hint="copy the model folder to this node again",
            )
        change.put_into(weight, dequantised=dequantised)
        yield count


@torch.no_grad()
def rounded(model: Any, stored: torch.dtype) -> None:
    """Let every weight have a value that its file will hold; the dtype in memory stays. Weight by weight, so that it takes no second model.

    No adapter changes a buffer, and transformers reads some of them in fp32 whatever the weights have: they stay whole in the files, too.
    """
    for name, tensor in model.named_parameters():
        if tensor.is_floating_point():
            tensor.copy_(tensor.to(_file_dtype(model, name, stored)))


@torch.no_grad()
def narrowed(model: Any, stored: torch.dtype) -> Any:
    """The same model, its weights in the dtype that its files will have."""
    for name, tensor in model.named_parameters():
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(_file_dtype(model, name, stored))
    return model


def _file_dtype(model: Any, name: str, stored: torch.dtype) -> torch.dtype:
    """transformers reads some weights in fp32 whatever the others have: those stay whole in the files, too."""
    wide = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return torch.float32 if any(re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) for part in wide) else stored


def _held(part: Any) -> Any:
    weight = part._parameters.get("weight")
    return weight if any(getattr(weight, name, None) is not None for name in ("quant_state", "SCB")) else None
