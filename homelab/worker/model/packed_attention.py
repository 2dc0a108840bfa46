"""Attention over rows that stand one after the other in one row without padding: each sees itself only.

Registered with transformers (`AttentionInterface`), which then makes no mask at all (masking_utils.py, _preprocess_mask_arguments: a
name that AttentionMaskInterface does not know), so nothing of the size tokens x tokens is built and no pass waits for a test of a mask's
values. Where each row ends comes with the batch (`batches.join`): `segment_lengths` for Python, `segment_ends` for the kernel.

    CUDA, compute capability 8.0 or more, bf16 or fp16    torch.nn.attention.varlen (torch 2.11): one flash kernel for all rows
    everything else                                       torch's scaled_dot_product_attention, row by row
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations import sdpa_attention

from homelab.shared.law import padding
from homelab.shared.law.stage import has_experts

NAME = "homelab_joined_rows"
# Arguments that change the scores and are not supported here (models/gemma2, gpt_oss, t5); the config is checked for a window, too.
_UNKNOWN = ("softcap", "sliding_window", "s_aux", "sinks", "position_bias", "cache")
_FLASH_HEAD_DIM = 256  # aten/native/transformers/cuda/sdp_utils.cpp, check_flash_attention_hardware_support and head_dim checks
_TRIAL = (5, 3)  # tokens of the rows of the test in `use`


def forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    segment_lengths: Sequence[int] | None = None,
    segment_ends: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: query [1, heads, tokens, head_dim], key and value with as many heads or fewer; returns
    [1, tokens, heads, head_dim].

    `segment_lengths` are the tokens of each row, `segment_ends` int32 [rows + 1] on the device of the query, from 0. Without them the
    rows of the batch are whole and equally long, and attention is transformers' own. Raises ValueError for what is not known here.
    """
    unknown = [name for name in _UNKNOWN if kwargs.get(name) is not None]
    if unknown or attention_mask is not None or kwargs.get("is_causal", getattr(module, "is_causal", True)) is False:
        raise ValueError(f"{type(module).__name__} has {', '.join(unknown) or 'a mask of its own'}")
    if segment_lengths is None:
        output: tuple[torch.Tensor, None] = sdpa_attention.sdpa_attention_forward(module, query, key, value, None, **kwargs)
        return output
    dropout, scaling = kwargs.get("dropout", 0.0), kwargs.get("scaling")
    query, key, value = (_cast(tensor) for tensor in (query, key, value))
    if segment_ends is not None and dropout == 0 and is_one_kernel(query, value):
        return _one_kernel(query, key, value, scaling, segment_ends, max(segment_lengths)), None
    if query.is_cuda and key.shape[1] < query.shape[1]:
        # No kernel but flash takes fewer heads; without it all scores would be built (sdp_utils.cpp; torch 2.13).
        key, value = (sdpa_attention.repeat_kv(tensor, query.shape[1] // key.shape[1]) for tensor in (key, value))
    parts = [
        functional.scaled_dot_product_attention(
            *row, dropout_p=dropout, is_causal=True, scale=scaling, enable_gqa=key.shape[1] < query.shape[1]
        ).transpose(1, 2)
        for row in zip(*(tensor.split(list(segment_lengths), dim=2) for tensor in (query, key, value)), strict=True)
    ]
    return (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0].contiguous()), None


def _cast(tensor: torch.Tensor) -> torch.Tensor:
    """What autocast does for torch's own attention: in full training queries and keys come in fp32, values in 16 bit."""
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor


def is_one_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether torch's flash kernel for rows of any length accepts these tensors."""
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] == value.shape[-1] <= _FLASH_HEAD_DIM
        and query.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
        and _kernel() is not None
    )


@functools.cache
def _kernel() -> Callable[..., torch.Tensor] | None:
    """torch's function; None before torch 2.11, whose kernel knows neither a scale nor a window."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"scale", "window_size"} <= inspect.signature(varlen_attn).parameters.keys() else None


@functools.cache
def _takes_fewer_keys(kernel: Callable[..., torch.Tensor]) -> bool:
    """Whether the kernel groups query heads over the key heads itself: from torch 2.12."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def _one_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, ends: torch.Tensor, longest: int
) -> torch.Tensor:
    """All rows at once. The kernel wants [tokens, heads, head_dim]; the window (-1, 0) is how it says causal."""
    kernel = _kernel()
    assert kernel is not None and query.shape[0] == 1
    grouped: dict[str, bool] = {}
    if _takes_fewer_keys(kernel):
        grouped["enable_gqa"] = key.shape[1] < query.shape[1]
    elif key.shape[1] < query.shape[1]:
        key, value = (sdpa_attention.repeat_kv(tensor, query.shape[1] // key.shape[1]) for tensor in (key, value))
    flat = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    result = kernel(*flat, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0), **grouped)
    return result.unsqueeze(0)


AttentionInterface.register(NAME, forward)


def use(model: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Let a causal LM (with adapters or not) compute joined rows. None, or why it cannot: the model is then as it was.

    `dtype` is that of the training, float32 for no autocast. The model has to show it, on two short rows: the same answers as padded,
    and nothing of the first row in the second (`notices`).
    """
    if "unsloth" in sys.modules:
        return "unsloth has its own attention"
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    before = base.config._attn_implementation
    reason = padding.unusual(base.config.get_text_config().to_dict())
    if reason or before != "sdpa":
        return reason or f"its attention is {before}"
    rows = [torch.arange(1, length + 1, device=device) for length in _TRIAL]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            # Logits of the padded rows, [tokens of all rows, vocabulary].
            tokens = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            logits = model(input_ids=tokens, attention_mask=mask).logits
            padded = torch.cat([logits[index, : len(row)] for index, row in enumerate(rows)])
            base.set_attn_implementation(NAME)
            is_replaced = base.config._attn_implementation == NAME
            reason = _difference(model, rows, padded, rounding_of(dtype)) if is_replaced else "its attention cannot be replaced"
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    finally:
        model.train(was_training)
        if reason:
            base.set_attn_implementation(before)
    return reason


def leave(model: Any) -> None:
    """After `use`, as before it: the other ranks pad, and a padded or packed batch without a mask of its own needs the model's."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    base.set_attn_implementation("sdpa")


def notices(model: Any, before: torch.Tensor, after: torch.Tensor, begin: int, rounding: float) -> bool:
    """Whether the tokens from `begin` on notice that a token of the row before them is another one: by the logits [tokens, vocabulary] of all of them.

    To the last bit. Of a mixture of experts to `rounding`, as a part of what the changed row notices: in which order a product of an expert is added
    depends on how many tokens it has.
    """
    moved = (after - before).abs().float()
    least = rounding * float(moved[:begin].max()) if has_experts(model.config.get_text_config().to_dict()) else 0.0
    return not float(moved[begin:].max()) <= least


def rounding_of(dtype: torch.dtype) -> float:
    """How far logits that are computed in this type may be apart where they are the same, as a part of the largest."""
    return 1e-4 if dtype == torch.float32 else 2e-2


def _difference(model: Any, rows: Sequence[torch.Tensor], padded: torch.Tensor, tolerance: float) -> str | None:
    """What is wrong with the logits of joined rows; None where they are right."""
    lengths = [len(row) for row in rows]
    where = {
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0).to(padded.device),
        "segment_lengths": tuple(lengths),
        "segment_ends": torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=padded.device),
    }
    tokens = torch.cat(list(rows)).unsqueeze(0)
    other = tokens.clone()
    other[0, 1] += 5
    joined, changed = (model(input_ids=ids, **where).logits[0] for ids in (tokens, other))
    if notices(model, joined, changed, lengths[0], tolerance):
        return "its rows see each other without padding"
    apart = float((joined - padded).abs().max() / padded.abs().max())
    return None if apart <= tolerance else f"its answers differ by {apart:.1e} without padding"
