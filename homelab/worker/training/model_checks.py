"""Two small tests of the loaded model, for properties that the law needs and that a model may lack without an error."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from homelab.worker.errors import WorkerError
from homelab.worker.model import inspection, packed_attention

_MANY = 10**6


def check_loss_is_a_sum(model: Any, device: torch.device, *, scores: bool = False) -> None:
    """Tiny forward passes: a loss over twice the items must be half, and one over very many next to nothing. A model can take `num_items_in_batch`
    and ignore it, or add a part that is no sum over tokens (of a router). `scores`: the model scores the answers of pairs."""
    tokens = torch.arange(1, 9, device=device).unsqueeze(0)
    inputs = {"input_ids": tokens, "labels": tokens}
    if scores:
        inputs = {"input_ids": tokens.view(2, 4), "ends": torch.tensor([3, 7], device=device), "counting": torch.ones(1, device=device)}
    model.eval()
    with torch.no_grad():
        one, two, none = (float(model(**inputs, num_items_in_batch=torch.tensor(count, device=device)).loss) for count in (1, 2, _MANY))
    name = type(inspection.base_of(model)).__name__
    if math.isfinite(one) and abs(one - 2 * two) > 1e-3 * abs(one):
        raise WorkerError(
            f"{name} ignores num_items_in_batch: its loss would be averaged per pass, not per token of the whole batch", where="[model] name in the recipe",
            hint="edit the recipe: [model] name = a model whose class divides its loss by num_items_in_batch (most of transformers do)", needs_launch=True,
        )  # fmt: skip
    if math.isfinite(none) and abs(none - one / _MANY) > 1e-5 * abs(one):
        raise WorkerError(
            f"the loss of {name} has a part that is not a sum over tokens ({none:.3g} for no token): it would depend on how rows are divided",
            where="config.json of the model", hint="set output_router_logits = false in config.json, on every node: the loss of the router is left out", needs_launch=True,
        )  # fmt: skip


def counts_items(model: Any) -> bool | None:
    """Whether the loss uses `num_items_in_batch`, without computing a number, so also on the meta device; None where the model cannot be computed there."""

    class Watch(TorchFunctionMode):
        used = False

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.used = self.used or any(one is count for one in (*args, *(kwargs or {}).values()))
            return func(*args, **(kwargs or {}))

    device = next(model.parameters()).device
    tokens, count = torch.arange(1, 9, device=device).unsqueeze(0), torch.tensor(3, device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), Watch() as watch:
            model(input_ids=tokens, labels=tokens, num_items_in_batch=count)
    except Exception:  # noqa: BLE001 - the model's own code: it looks at numbers that are not there on the meta device
        return None
    finally:
        model.train(was_training)
    return bool(watch.used)


def check_samples_stay_apart(model: Any, device: torch.device) -> None:
    """Change a token of the first of two packed samples: the second must not notice (`packed_attention.notices`)."""
    tokens = torch.arange(1, 9, device=device).unsqueeze(0)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]], device=device)
    other = tokens.clone()
    other[0, 1] += 5
    model.eval()
    with torch.no_grad():
        before, after = (model(input_ids=ids, position_ids=positions).logits[0] for ids in (tokens, other))
    types = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if packed_attention.notices(model, before, after, 4, max(map(packed_attention.rounding_of, types))):
        raise WorkerError(
            f"{type(inspection.base_of(model)).__name__} mixes packed samples",
            where="[data] packing in the recipe",
            hint="set packing = false: this model does not read sample ends from position ids",
            needs_launch=True,
        )
