"""Optimisations that make a step cheaper and change nothing in the training. All are on; a benchmark turns them off to measure their gain."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Switches:
    """The plan's "switches", which only benchmarks write. All ranks read the same file.

    `joined_rows`       the rows of a pass stand one after the other in one row without padding (`packed_attention.py`)
    `labelled_only`     a fused loss computes only the logits of tokens that carry loss
    `gradient_at_once`  a fused loss with a frozen head makes its gradient in the forward pass: two products with the head, not three
    `copy_ahead`        CUDA: all passes of a step are copied to the card at its begin, from pinned memory
    `fused_adamw`       CUDA: AdamW in one kernel per group of tensors
    """

    joined_rows: bool = True
    labelled_only: bool = True
    gradient_at_once: bool = True
    copy_ahead: bool = True
    fused_adamw: bool = True
