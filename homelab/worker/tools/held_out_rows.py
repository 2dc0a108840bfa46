"""The rows on which a merged model is compared with its adapter, and its loss over them. One process, no balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from homelab.worker.data.batches import Form, loss_tokens
from homelab.worker.data.encoding import EncodedData, Row

MOST_ROWS = 64
MOST_TOKENS = 32_768


def choose(data: EncodedData) -> tuple[list[Row], str]:
    """At most 64 rows and 32,768 tokens, spread evenly, and what they are: always the same of one run."""
    rows, name = (data.held_out, "held-out rows") if data.held_out else (data.train, "training rows (this run holds none out)")
    rows = [row for row in rows if row.loss_tokens]
    count = min(MOST_ROWS, len(rows))
    chosen: list[Row] = []
    tokens = 0
    for number in range(count):
        row = rows[number * len(rows) // count]
        tokens += len(row.tokens)
        if chosen and tokens > MOST_TOKENS:
            break
        chosen.append(row)
    return chosen, f"{len(chosen)} {name}"


@torch.no_grad()
def loss(model: Any, rows: Sequence[Row], pad: int, done: Callable[[int], None]) -> float:
    """Mean cross entropy per token (nats), row by row. `done` gets the number of rows so far."""
    model.eval()
    form, summed, counted = Form(pad), 0.0, 0
    for number, row in enumerate(rows, 1):
        batch = form.batch([row], packed=len(row.starts) > 1)
        # num_items_in_batch = 1 makes the model's loss a sum.
        summed += float(model(**batch, num_items_in_batch=torch.tensor(1)).loss)
        counted += loss_tokens(batch)
        done(number)
    return summed / counted
