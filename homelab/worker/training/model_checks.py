"""Two small tests of the loaded model, for properties that the law needs and that a model may lack without an error."""

from __future__ import annotations

import math
from typing import Any

import torch

from homelab.worker.errors import WorkerError


def check_loss_is_a_sum(model: Any, device: torch.device) -> None:
    """Two tiny forward passes: a loss over twice the items must be half. A model can take `num_items_in_batch` and ignore it."""
    tokens = torch.arange(1, 9, device=device).unsqueeze(0)
    model.eval()
    with torch.no_grad():
        one, two = (
            float(model(input_ids=tokens, labels=tokens, num_items_in_batch=torch.tensor(count, device=device)).loss)
            for count in (1, 2)
        )
    if math.isfinite(one) and abs(one - 2 * two) > 1e-3 * abs(one):
        raise WorkerError(
            f"{type(model).__name__} ignores num_items_in_batch: its loss would be averaged per rank, not per token",
            where="[model] name in the recipe",
            hint="train it on one node, or use a model class of transformers that divides its loss by num_items_in_batch",
        )


def check_samples_stay_apart(model: Any, device: torch.device) -> None:
    """Change a token of the first of two packed samples: the second must not notice, to the last bit."""
    tokens = torch.arange(1, 9, device=device).unsqueeze(0)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]], device=device)
    other = tokens.clone()
    other[0, 1] += 5
    model.eval()
    with torch.no_grad():
        before, after = (model(input_ids=ids, position_ids=positions).logits[0, 4:] for ids in (tokens, other))
    if not torch.equal(before, after):
        raise WorkerError(
            f"{type(model).__name__} lets packed samples see each other",
            where="[data] packing in the recipe",
            hint="set packing = false: this model does not read sample ends from position ids",
            needs_launch=True,
        )
