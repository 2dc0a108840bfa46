"""The LM head and its loss in one, chunk by chunk of tokens: all logits (tokens x vocabulary) never exist at once.

The decoder runs as always. Then, for each chunk of its last hidden states, the head, fp32, the summed cross entropy; nothing of a
chunk is kept, and the backward pass computes its logits again (`torch.utils.checkpoint`). The sum is divided as in transformers
(loss/loss_utils.py: by num_items_in_batch, else by the tokens with loss), so loss and gradients are the same.

Liger and TRL (trainer/utils.py, add_fused_lm_head) have such a loss too. They multiply with `lm_head.weight` directly, which passes by
an adapter on the head; here the head is called as a module, on any device, and may be adapted, quantised or tied.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from homelab.worker.errors import WorkerError

# Logits of one chunk. Its cross entropy holds 12 bytes for each (log-probabilities and two gradients in fp32): 0.2 GB.
CHUNK_LOGITS = 2**24
_WHERE = "[train] fused_loss in the recipe"


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose logits are there at once."""
    return max(1, CHUNK_LOGITS // vocabulary)


def install(model: Any, chunk: int | None = None) -> Callable[..., Any]:
    """Teach a causal LM of transformers to compute its loss in chunks of `chunk` tokens; `logits` of such an output are None.

    Without `labels` the model answers as before. To be called before adapters are added. Returns the forward that was there.
    Raises WorkerError for a model whose decoder and head are not where transformers says they are.
    """
    if model.get_output_embeddings() is None or model.base_model is model:
        raise WorkerError(
            f"{type(model).__name__} has no decoder and head of its own, which a fused loss needs",
            where=_WHERE,
            hint="set [train] fused_loss = false",
        )
    tokens = chunk or chunk_tokens(model.config.get_text_config().vocab_size)
    original = model.forward

    # A method of the model like any other: accelerate takes methods apart and binds them again (extract_model_from_parallel).
    @functools.wraps(type(model).forward)
    def forward(
        self: Any, *args: Any, labels: torch.Tensor | None = None, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Any:
        if labels is None or args or kwargs.get("shift_labels") is not None:
            named = {"labels": labels, "num_items_in_batch": num_items_in_batch}
            return original(*args, **{name: value for name, value in named.items() if value is not None}, **kwargs)
        from transformers.modeling_outputs import CausalLMOutputWithPast

        kwargs.pop("logits_to_keep", None)
        kwargs.pop("return_dict", None)
        decoded = self.base_model(**kwargs)
        loss = summed_loss(self, decoded.last_hidden_state, labels, tokens)
        counted = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        if torch.is_tensor(counted):
            counted = counted.to(loss.device)
        return CausalLMOutputWithPast(
            loss=loss / counted, hidden_states=decoded.hidden_states, attentions=decoded.attentions
        )

    # The signature says that the model takes num_items_in_batch; `__wrapped__` would be taken for one of accelerate's own wrappers.
    forward.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]
    del forward.__wrapped__  # type: ignore[attr-defined]
    model.forward = types.MethodType(forward, model)
    return original


def summed_loss(model: Any, hidden: torch.Tensor, labels: torch.Tensor, chunk: int) -> torch.Tensor:
    """Cross entropy (nats, fp32, a scalar) summed over all tokens. `hidden` is [rows, tokens, hidden], `labels` [rows, tokens],
    not shifted; -100 carries no loss."""
    targets = functional.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1).to(hidden.device)
    flat = hidden.reshape(-1, hidden.shape[-1])
    head, cap = model.get_output_embeddings(), _softcap(model)
    total = torch.zeros((), dtype=torch.float32, device=flat.device)
    again = functools.partial(checkpoint, _chunk_loss, use_reentrant=False) if torch.is_grad_enabled() else _chunk_loss
    for part, wanted in zip(flat.split(chunk), targets.split(chunk), strict=True):
        total = total + again(head, cap, part, wanted)
    return total


def _chunk_loss(
    head: Callable[[torch.Tensor], torch.Tensor], cap: float | None, part: torch.Tensor, wanted: torch.Tensor
) -> torch.Tensor:
    logits = head(part)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return functional.cross_entropy(logits.float(), wanted, ignore_index=-100, reduction="sum")


def _softcap(model: Any) -> float | None:
    """Gemma's models squeeze their logits (models/gemma2/modeling_gemma2.py)."""
    return getattr(model.config.get_text_config(), "final_logit_softcapping", None)


@torch.no_grad()
def check(model: Any, original: Callable[..., Any]) -> None:
    """Compare the loss of a few tokens with that of the forward that `install` has replaced.

    A model may do more between its head and its loss than is known here (scale its logits, add another loss). Raises WorkerError.
    """
    was_training = model.training
    model.eval()
    tokens = torch.arange(1, 9, device=next(model.parameters()).device).unsqueeze(0)
    fused, plain = (float(forward(input_ids=tokens, labels=tokens).loss) for forward in (model.forward, original))
    model.train(was_training)
    if abs(fused - plain) > 1e-3 * abs(plain):
        raise WorkerError(
            f"{type(model).__name__} has a loss of its own kind: {plain:.5g} for a few tokens, where the fused loss is {fused:.5g}",
            where=_WHERE,
            hint="set [train] fused_loss = false",
        )
