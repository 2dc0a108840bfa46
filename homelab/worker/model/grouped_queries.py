"""Grouped-query attention on cards whose fast kernels do not support it.

Without a mask transformers leaves grouped queries to SDPA (`enable_gqa`; integrations/sdpa_attention.py, use_gqa_in_sdpa), whatever the
card is. Only flash attention takes them: 16 bits, from Ampere (8.0) on. Elsewhere torch falls back to its plain kernel, which builds
the matrix of all scores (sdp_utils.cpp; transformers issue 48633: 1.6 to 1.8 times slower on a T4). With the keys repeated the
memory-efficient kernel takes over, and the numbers are the same.
"""

from __future__ import annotations

from typing import Any


def repeat_keys(precision: str, capability: tuple[int, int]) -> bool:
    """Have keys repeated in this process where the kernels of a card of this compute capability need it; whether they do."""
    if precision != "fp32" and capability >= (8, 0):
        return False
    from transformers.integrations import sdpa_attention

    assert hasattr(sdpa_attention, "use_gqa_in_sdpa"), "this transformers decides elsewhere: the worker needs another version"
    sdpa_attention.use_gqa_in_sdpa = _never
    return True


def _never(*_args: Any, **_kwargs: Any) -> bool:
    return False
