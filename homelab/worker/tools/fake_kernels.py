"""Stand-ins for a dry run: a GPU's attention, quantised matrices, an optimizer. Each allocates the memory that the real one allocates.

They compute nothing. The sources are named at each, and tests/worker/tools/test_dryrun.py compares with the real ones where a CPU has them.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

from homelab.shared.protocol.quantisation import INT8, NF4, NF4_BLOCK, NF4_DOUBLE_BLOCK
from homelab.worker.errors import WorkerError


class FakeStep:
    """Optimizer state and temporaries of a step: torch/optim/adamw.py (one tensor at a time on CPUs; on CUDA fused, which makes nothing;
    see arguments.training_arguments) and bitsandbytes/optim/optimizer.py (state in 8 bits from 4096 elements on; paged state of 100,000 or more
    leaves the card)."""

    def __init__(self, trainable: list[Any], train: dict[str, Any], device: str) -> None:
        import torch

        self.makes_nothing = device == "cuda"
        self.squares = []
        self.state = []
        paged = train["optimizer"] == "paged_adamw_8bit" and device == "cuda"
        for parameter in trainable:
            elements = parameter.numel()
            if train["optimizer"] == "adamw":
                self.squares.append(torch.zeros_like(parameter))
                self.state.append(torch.zeros_like(parameter))
            elif elements < 4096:
                self.state += [torch.zeros_like(parameter), torch.zeros_like(parameter)]
            elif not (paged and elements >= 100_000):
                for _ in range(2):
                    self.state += [torch.empty(elements, dtype=torch.uint8), torch.empty(-(-elements // 256))]

    def step(self) -> None:
        """Allocate what a step allocates."""
        if self.makes_nothing:
            return
        for square in self.squares:
            root = square.sqrt() / 0.5
            del root


def quantise(model: Any, dtype: Any, how: str) -> None:
    """In place of every linear layer but the head one that occupies what a quantised one does, and dequantises its matrix for each product.
    The class is bitsandbytes' own, so that PEFT treats it as such. Of routed experts in 4 bits the real module, without values."""
    import torch

    if importlib.util.find_spec("bitsandbytes") is None:
        hint = "pip install bitsandbytes in the node's environment"
        raise WorkerError("a quantised base needs the package bitsandbytes", where="the node's environment", hint=hint)
    make = _eight_bit if how == INT8 else _four_bit(dtype)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child is not model.get_output_embeddings():
                setattr(parent, name, make(child))
    if how == NF4:
        from homelab.worker.model import experts_loading

        experts_loading.install(model)
    model.is_loaded_in_8bit, model.is_loaded_in_4bit = how == INT8, how == NF4
    model.config._is_quantized = True  # as transformers' load does; Jamba and Falcon Mamba then leave a product to their layer


def _eight_bit(linear: Any) -> Any:
    """The real layer, whose product is made of torch's own operations."""
    import torch

    from homelab.worker.model.int8_linear import Int8Linear

    layer = Int8Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, has_fp16_weights=False)
    layer.bias = linear.bias
    layer.weight = torch.nn.Parameter(torch.empty(linear.weight.shape, dtype=torch.int8), requires_grad=False)
    layer.weight.SCB = torch.empty(linear.out_features)
    return layer


def _four_bit(dtype: Any) -> Callable[[Any], Any]:
    """NF4 with double quantisation, computing in `dtype`."""
    import bitsandbytes
    import torch

    class Quantised(bitsandbytes.nn.Linear4bit):
        """`weight` is the packed half bytes, with the attributes that PEFT and the tracker read."""

        def __init__(self, linear: Any) -> None:
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
            elements = self.in_features * self.out_features
            self.weight = torch.nn.Parameter(torch.empty((-(-elements // 2), 1), dtype=torch.uint8), requires_grad=False)
            self.weight.compress_statistics, self.weight.quant_type = True, "nf4"
            self.weight.quant_state = _Scales(-(-elements // NF4_BLOCK))
            self.compute_dtype = dtype
            self.quant_state = self.weight.quant_state

        def forward(self, inputs: Any) -> Any:
            given = inputs.dtype
            result = _product()(inputs.to(dtype), self.weight.quant_state.absmax, (self.out_features, self.in_features))
            return (result if self.bias is None else result + self.bias).to(given)

    return Quantised


class _Scales:
    """The scales of an NF4 matrix: one byte per block, one fp32 per 256 blocks."""

    def __init__(self, blocks: int, nested: bool = True) -> None:
        import torch

        self.absmax = torch.empty(blocks, dtype=torch.uint8 if nested else torch.float32)
        self.state2 = _Scales(-(-blocks // NF4_DOUBLE_BLOCK), nested=False) if nested else None

    def materialise(self) -> None:
        import torch

        self.absmax = torch.empty(self.absmax.shape, dtype=self.absmax.dtype, device="cpu")
        if self.state2 is not None:
            self.state2.materialise()


def _product() -> Any:
    """bitsandbytes' MatMul4Bit (autograd/_functions.py): nothing of the input is kept, the matrix is made for either direction."""
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, inputs: Any, scales: Any, shape: tuple[int, int]) -> Any:
            ctx.scales, ctx.shape = scales, shape
            return inputs @ dequantised(scales, shape, inputs.dtype).t()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient @ dequantised(ctx.scales, ctx.shape, gradient.dtype), None, None

    return Product.apply


def dequantised(scales: Any, shape: tuple[int, int], dtype: Any) -> Any:
    """The matrix, and beside it for a moment its scales in fp32 (bitsandbytes, functional.py dequantize_4bit)."""
    import torch

    from homelab.shared.protocol.memory_items import DEQUANTISATION
    from homelab.worker.tools.memory_tracker import Tracker

    with Tracker.active.making(DEQUANTISATION) if Tracker.active else contextlib.nullcontext():
        absmax = scales.to(torch.float32)
        matrix = torch.empty(shape, dtype=dtype)
        del absmax
        return matrix


@contextlib.contextmanager
def no_mask() -> Iterator[None]:
    """Rows of one length: transformers looks at the mask's values, finds nothing to hide and leaves it out. Fake ones have no values,
    so that it must be told (masking_utils.py; the place is private, and without it the estimate is only too careful)."""
    from transformers import masking_utils

    original = getattr(masking_utils, "find_packed_sequence_indices", None)
    if original is None:
        yield
        return
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = original


@contextlib.contextmanager
def gpu(*, repeats_keys: bool) -> Iterator[None]:
    """Let a step on CPU tensors allocate what it does on a GPU: attention's kernels, and adapters beside a quantised matrix.

    `scaled_dot_product_attention`: flash without a mask, else memory-efficient, which has no grouped queries (`grouped_queries`, here undone
    in the end) (aten/src/ATen/native/transformers/cuda: sdp_utils.cpp, flash_attn/flash_api.cpp, attention.cu and attention_backward.cu).
    `is_autocast_enabled()` without a device asks for CUDA's: PEFT leaves the input of a 4-bit layer as it is where the answer is yes, and
    else makes a copy of it in fp32, of which autocast makes one more for each adapter (peft/tuners/lora/bnb.py). The values are none.
    """
    import torch
    from torch.nn import functional
    from transformers.integrations import sdpa_attention

    original, chosen, enabled = functional.scaled_dot_product_attention, sdpa_attention.use_gqa_in_sdpa, torch.is_autocast_enabled
    functional.scaled_dot_product_attention = _gpu_attention
    torch.is_autocast_enabled = lambda device_type="cpu": enabled(device_type)
    if repeats_keys:
        sdpa_attention.use_gqa_in_sdpa = lambda *_: False
    try:
        yield
    finally:
        functional.scaled_dot_product_attention, sdpa_attention.use_gqa_in_sdpa = original, chosen
        torch.is_autocast_enabled = enabled


def _gpu_attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *_: Any, **_options: Any) -> Any:
    import torch

    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    bias = None
    if attn_mask is not None:  # every layer makes its own, in the queries' type, its rows padded to 16 elements
        *others, columns = attn_mask.shape
        bias = query.new_empty((*others, _up(columns, 16)))
    return _kernel()(query, key, value, bias)


def _kernel() -> Any:
    import torch

    class Kernel(torch.autograd.Function):
        """[rows, heads, tokens, width]; keeps its inputs, its output (as wide as values) and the log-sum-exp of every query."""

        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any, bias: Any) -> Any:
            rows, heads, tokens, _ = query.shape
            output = query.new_empty((rows, tokens, heads, value.shape[-1])).transpose(1, 2)
            summed = query.new_empty((rows, heads, tokens if bias is None else _up(tokens, 32)), dtype=torch.float32)
            ctx.save_for_backward(query, key, value, bias, output, summed)
            return output

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            query, key, value, _, _, summed = ctx.saved_tensors
            rows, heads, tokens, width = query.shape
            made = [torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), torch.empty_like(summed)]
            if query.dtype != torch.float32:  # dq is summed in fp32
                made.append(summed.new_empty((rows, _up(tokens, 128), heads, _up(width, 32))))
            if key.shape[1] != heads:  # dk and dv are computed for every query head, then added up
                made += [query.new_empty((rows, heads, tokens, one.shape[-1])) for one in (key, value)]
            return made[0], made[1], made[2], None

    return Kernel.apply


def _up(count: int, step: int) -> int:
    return -(-count // step) * step
