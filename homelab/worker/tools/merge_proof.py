"""Whether a merged model computes what was trained: its logits for a few tokens against those of the adapter on the same base, and those of the
files that were written against those of the weights in memory. The tokens are one row's; memory beside the model is that of their logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from homelab.worker.errors import WorkerError

MOST_TOKENS = 48
_FP32_PART = 1e-4  # of the largest logit: sums in another order give some 1e-6 of it
_NARROW_PART = 0.1  # in 16 bits every layer rounds, by 2^-8 of its values
_LOSS, _LOSS_PART = 0.02, 0.02  # what rounding a trained model to 16 bits moved its loss by: below 0.005 nats


@torch.no_grad()
def logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocabulary] in fp32, of at most `MOST_TOKENS`."""
    model.eval()
    given = torch.tensor([list(tokens[:MOST_TOKENS])], device=next(model.parameters()).device)
    answer: torch.Tensor = model(input_ids=given, use_cache=False).logits[0].float()
    return answer.clone()


def refuse_another(seen: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, *, what: str, where: str) -> None:
    """Raises WorkerError where the logits differ by more than computing them in another order does.

    In 16 bits the middle of all tokens counts: a mixture of experts may take another expert for one of them.
    """
    apart = (seen - wanted).abs().amax(dim=1)
    largest = max(1.0, float(wanted.abs().max()))
    limit = (_FP32_PART if dtype == torch.float32 else _NARROW_PART) * largest
    worst = float(apart.max() if dtype == torch.float32 else apart.median())
    if not worst <= limit:  # not a number, too
        raise WorkerError(
            f"{what} is not the model that was trained: its logits are {worst:.2g} apart, where {limit:.2g} is rounding (the largest is {largest:.3g}); nothing was kept",
            where=where, hint="serve the adapter without a merge: homelab fetch, then vllm serve BASE --enable-lora",
        )  # fmt: skip


def refuse_other_loss(loss: float, adapter: float, *, where: str) -> None:
    """Raises WorkerError where the loss of the merged model moved by more than rounding."""
    if not abs(loss - adapter) <= _LOSS + _LOSS_PART * abs(adapter):
        raise WorkerError(
            f"the merged model is not the one that was trained: its loss is {loss:.4f}, that of the adapter {adapter:.4f}; nothing was kept",
            where=where, hint="serve the adapter without a merge: homelab fetch, then vllm serve BASE --enable-lora",
        )  # fmt: skip
