"""The kernels of attention, forward and backward: flash, memory-efficient, math (what Turing takes for grouped heads) and varlen.

Heads are those of a 1.1B model (32 query heads, 4 of keys), rows of 64 numbers per head. cuDNN's kernel is left out: home cards do not take it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu_parts import timing
from benchmarks.gpu_parts.place import Place

_HEADS, _KEY_HEADS, _SIZE = 32, 4, 64


def measure(place: Place) -> None:
    """All kernels for all lengths. A kernel that the card or this torch does not have is named and left out."""
    from torch.nn.attention import SDPBackend

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
    for tokens in (512, 1024, 2048, 4096) if place.is_card else (32,):
        for name, backend in backends.items():
            for mask in ("causal", "padded"):
                if name != "flash" or mask == "causal":  # flash takes no mask
                    _tell(
                        place,
                        f"{name}, {mask}",
                        tokens,
                        lambda backend=backend, mask=mask, tokens=tokens: _sdpa(place.device, tokens, backend, mask),
                    )
        _tell(place, "varlen, packed", tokens, lambda tokens=tokens: _varlen(place.device, tokens))


def _tell(place: Place, name: str, tokens: int, make: Callable[[], Callable[[], Any]]) -> None:
    try:
        work = make()
        work()
        spent, held = timing.seconds(work, place.device, 10), timing.peak_bytes(work, place.device)
    except Exception as error:  # another torch may lack a kernel or name it differently; the others must still be measured
        place.run(name, tokens=tokens, problem=repr(error)[:300])
        return
    place.run(name, tokens=tokens, seconds=spent, bytes=held)
    place.figure(f"{name.replace(', ', '_')}_{tokens}_ms", 1000 * spent)


def _inputs(device: str, *shapes: tuple[int, ...]) -> list[Any]:
    import torch

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for shape in shapes]


def _sdpa(device: str, tokens: int, backend: Any, mask: str) -> Callable[[], Any]:
    """Two rows; keys and values repeated for the query heads, as transformers does where the kernel takes no grouped heads."""
    import torch
    from torch.nn.attention import sdpa_kernel

    query, key, value = _inputs(device, (2, _HEADS, tokens, _SIZE), (2, _KEY_HEADS, tokens, _SIZE), (2, _KEY_HEADS, tokens, _SIZE))
    allowed = None
    if mask == "padded":
        allowed = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril().expand(2, 1, tokens, tokens).clone()
        allowed[0, :, :, tokens // 2 :] = False

    def work() -> None:
        repeated = [part.repeat_interleave(_HEADS // _KEY_HEADS, 1) for part in (key, value)]
        with sdpa_kernel(backend):
            out = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=allowed, is_causal=allowed is None)
        out.sum().backward()

    return work


def _varlen(device: str, tokens: int) -> Callable[[], Any]:
    """The tokens of two rows as eight samples in one row, each for itself."""
    import torch
    from torch.nn.attention.varlen import varlen_attn

    if device != "cuda":
        raise NotImplementedError("varlen attention has no kernel for CPUs")
    total, samples = 2 * tokens, 8
    query, key, value = _inputs(device, *(((total, _HEADS, _SIZE),) * 3))
    ends = torch.arange(0, total + 1, total // samples, dtype=torch.int32, device=device)
    named = {"is_causal": True} if "is_causal" in _arguments(varlen_attn) else {"window_size": (-1, 0)}

    def work() -> None:
        varlen_attn(query, key, value, ends, ends, total // samples, total // samples, **named).sum().backward()

    return work


def _arguments(function: Callable[..., Any]) -> set[str]:
    import inspect

    return set(inspect.signature(function).parameters)
