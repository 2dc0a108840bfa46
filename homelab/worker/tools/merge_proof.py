"""Whether a merged model computes what was trained: its logits for a few tokens against those of the adapter on the same base, and those of the
files that were written against those of the weights in memory. The tokens are one row's; memory beside the model is that of their logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from homelab.worker.errors import WorkerError

if TYPE_CHECKING:
    from homelab.worker.data.rows import EncodedData, Row

MOST_ROWS = 64
MOST_ROW_TOKENS = 32_768
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
            f"{what} is not the trained model: its logits are {worst:.2g} apart, where {limit:.2g} is rounding (the largest is {largest:.3g}); nothing was kept",
            where=where, hint="serve the adapter without a merge: homelab fetch, then vllm serve BASE --enable-lora",
        )  # fmt: skip


def refuse_other_loss(loss: float, adapter: float, *, where: str) -> None:
    """Raises WorkerError where the loss of the merged model moved by more than rounding."""
    if not abs(loss - adapter) <= _LOSS + _LOSS_PART * abs(adapter):
        raise WorkerError(
            f"the merged model is not the trained one: its loss is {loss:.4f}, that of the adapter {adapter:.4f}; nothing was kept",
            where=where, hint="serve the adapter without a merge: homelab fetch, then vllm serve BASE --enable-lora",
        )  # fmt: skip


def choose_rows(data: EncodedData) -> tuple[list[Row], str]:
    """At most 64 rows and 32,768 tokens, spread evenly, and what they are: always the same of one run."""
    rows, name = (data.held_out, "held-out rows") if data.held_out else (data.train, "training rows (this run holds none out)")
    rows = [row for row in rows if row.loss_tokens]
    count = min(MOST_ROWS, len(rows))
    chosen: list[Row] = []
    tokens = 0
    for number in range(count):
        row = rows[number * len(rows) // count]
        tokens += len(row.tokens)
        if chosen and tokens > MOST_ROW_TOKENS:
            break
        chosen.append(row)
    return chosen, f"{len(chosen)} {name}"


@torch.no_grad()
def rows_loss(model: Any, rows: Sequence[Row], pad: int, done: Callable[[int], None]) -> float:
    """Mean cross entropy per token (nats), row by row. `done` gets the number of rows so far."""
    from homelab.worker.data.batches import Form, loss_tokens

    model.eval()
    form, summed, counted = Form(pad), 0.0, 0
    for number, row in enumerate(rows, 1):
        batch = form.batch([row], packed=len(row.starts) > 1)
        # num_items_in_batch = 1 makes the model's loss a sum.
        summed += float(model(**batch, num_items_in_batch=torch.tensor(1)).loss)
        counted += loss_tokens(batch)
        done(number)
    return summed / counted
