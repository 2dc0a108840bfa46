"""The LM head and its loss in one, chunk by chunk of tokens: all logits (tokens x vocabulary) never exist at once.

The decoder runs as always. Then, for each chunk of those last hidden states whose next token carries a loss, the head, fp32, the summed
cross entropy; nothing of a chunk's logits is kept. With a frozen head the gradient of a chunk is made at once, and the backward pass only
scales it: two products with the head. A head that is trained, or has an adapter, computes its logits again in the backward pass
(`torch.utils.checkpoint`). The sum is divided as in transformers (loss/loss_utils.py: by num_items_in_batch, else by the tokens with
loss), so loss and gradients are the same.

Liger and TRL (trainer/utils.py, add_fused_lm_head) have such a loss too. They multiply with `lm_head.weight` directly, which passes by
an adapter on the head; here the head is called as a module, on any device, and may be adapted, quantised or tied.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from homelab.shared.protocol.memory_items import CHUNK_LOGITS
from homelab.worker.errors import WorkerError

_WHERE = "[train] fused_loss in the recipe"
# fp16: what the gradient of a chunk is multiplied by while it is made, or small probabilities would be zeros. The gradients of the
# logits are at most 1, their sums with the head's weights far below 65504 / 1024.
_FP16_SCALE = 1024.0


def install(model: Any, chunk: int | None = None, *, labelled_only: bool = True, gradient_at_once: bool = True) -> Callable[..., Any]:
    """Teach a causal LM of transformers to compute its loss in chunks of `chunk` tokens; `logits` of such an output are None.

    Without `labels` the model answers as before. `labelled`, the positions in [rows x tokens] whose next token carries a loss, may come
    with them (`batches.labelled`); a card is asked for them otherwise. To be called before adapters are added. The other two are
    for benchmarks, which turn them off. Returns the original forward. Raises WorkerError for a model whose decoder and head are
    not where transformers says they are.
    """
    if model.get_output_embeddings() is None or model.base_model is model:
        raise WorkerError(
            f"{type(model).__name__} has no separate decoder and head, which a fused loss needs",
            where=_WHERE,
            hint="set [train] fused_loss = false",
            needs_launch=True,
        )
    # Their logits are in memory at the same time.
    tokens = chunk or max(1, CHUNK_LOGITS // model.config.get_text_config().vocab_size)
    original: Callable[..., Any] = model.forward

    # It must be a method of the model: accelerate unbinds methods and binds them again (extract_model_from_parallel).
    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        labels: torch.Tensor | None = None,
        num_items_in_batch: Any = None,
        labelled: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if labels is None or args or kwargs.get("shift_labels") is not None:
            named = {"labels": labels, "num_items_in_batch": num_items_in_batch}
            return original(*args, **{name: value for name, value in named.items() if value is not None}, **kwargs)
        from transformers.modeling_outputs import CausalLMOutputWithPast

        kwargs.pop("logits_to_keep", None)
        kwargs.pop("return_dict", None)
        decoded = self.base_model(**kwargs)
        hidden, targets = _flat(decoded.last_hidden_state, labels)
        if labelled_only:
            chosen = targets.ne(-100).nonzero().squeeze(1) if labelled is None else labelled.to(hidden.device)
            hidden, targets = hidden.index_select(0, chosen), targets.index_select(0, chosen)
        loss = summed_loss(self, hidden, targets, tokens, at_once=gradient_at_once)
        counted = (labels[:, 1:] != -100).sum() if num_items_in_batch is None else num_items_in_batch
        if torch.is_tensor(counted):
            counted = counted.to(loss.device)
        return CausalLMOutputWithPast(loss=loss / counted, hidden_states=decoded.hidden_states, attentions=decoded.attentions)

    # The signature says that the model takes num_items_in_batch; `__wrapped__` would be taken for one of accelerate's own wrappers.
    forward.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]
    del forward.__wrapped__
    model.forward = types.MethodType(forward, model)
    model.takes_labelled = labelled_only
    return original


def takes_labelled(model: Any) -> bool:
    """Whether the model (with adapters or not) wants `labelled` with its labels."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(base, "takes_labelled", False)


def _flat(hidden: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states [rows x tokens, hidden], and for each the token that it has to predict, -100 for none."""
    targets = functional.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1).to(hidden.device)
    return hidden.reshape(-1, hidden.shape[-1]), targets


def summed_loss(model: Any, hidden: torch.Tensor, targets: torch.Tensor, chunk: int, *, at_once: bool = True) -> torch.Tensor:
    """Cross entropy (nats, fp32, a scalar) summed over all tokens. `hidden` is [tokens, hidden], `targets` [tokens] what each has to
    predict; -100 carries no loss. `at_once`: with a frozen head the gradient is made here."""
    # Gemma's models squeeze their logits (models/gemma2/modeling_gemma2.py).
    head, cap = model.get_output_embeddings(), getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    frozen = not any(parameter.requires_grad for parameter in head.parameters())
    if at_once and frozen and torch.is_grad_enabled() and hidden.requires_grad:
        return _AtOnce.apply(hidden, targets, head, cap, chunk)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    again = functools.partial(checkpoint, _chunk_loss, use_reentrant=False) if torch.is_grad_enabled() else _chunk_loss
    for part, labels in zip(hidden.split(chunk), targets.split(chunk), strict=True):
        total = total + again(head, cap, part, labels)
    return total


class _AtOnce(torch.autograd.Function):
    """The summed loss of a head that gets no gradient itself; that of the hidden states is made with it and kept, in their own bytes."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, targets: torch.Tensor, head: Callable[..., Any], cap: float | None, chunk: int
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        gradient = torch.empty_like(hidden)
        ctx.scale = _FP16_SCALE if torch.float16 in (hidden.dtype, _autocast_dtype(hidden)) else 1.0
        upstream = torch.full((), ctx.scale, device=hidden.device)
        for part, labels, place in zip(hidden.split(chunk), targets.split(chunk), gradient.split(chunk), strict=True):
            part = part.detach().requires_grad_()
            with torch.enable_grad():
                loss = _chunk_loss(head, cap, part, labels)
            place.copy_(torch.autograd.grad(loss, part, upstream)[0])
            total += loss.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient.float() * (upstream / ctx.scale)).to(gradient.dtype), None, None, None, None


def _autocast_dtype(tensor: torch.Tensor) -> torch.dtype | None:
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _chunk_loss(head: Callable[[torch.Tensor], torch.Tensor], cap: float | None, part: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = head(part)
    if cap is not None:
        logits = torch.tanh(logits / cap) * cap
    return functional.cross_entropy(logits.float(), labels, ignore_index=-100, reduction="sum")


# What else models multiply or divide their logits by: Cohere, Granite, Falcon H1, and others after them.
_SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
_SPREAD = 4.0  # standard deviation of the logits in the check: a scale of 1.05 moves the loss by more than its limit


def scale_of(model: Any) -> str | None:
    """The key of the model's configuration by which it scales its logits after the head, with its value; None for a model that does not."""
    for config in (model.config.get_text_config(), model.config):
        for key in _SCALES:
            value = getattr(config, key, None)
            if isinstance(value, int | float) and value != 1:
                return f"{key} = {value:g}"
    return None


@torch.no_grad()
def check(model: Any, original: Callable[..., Any]) -> None:
    """Compare the loss of a few tokens with that of the forward that `install` has replaced, as they are and with the last hidden states enlarged: the
    logits of a random or an untrained model are near zero, where no scale shows.

    A model may do more between its head and its loss than is known here (scale its logits, add another loss). Raises WorkerError.
    """
    if scale := scale_of(model):
        raise _other_kind(model, f"{scale} in its config.json scales the logits")
    was_training = model.training
    model.eval()
    device = next(model.parameters()).device
    tokens = torch.arange(1, 9, device=device).unsqueeze(0)
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    spread = float(model.get_output_embeddings()(hidden).float().std())
    factor = _SPREAD / spread if 0 < spread < _SPREAD else 1.0
    for times in (1.0, factor):
        with _enlarged(model.base_model, times):
            fused, plain = (float(forward(input_ids=tokens, labels=tokens).loss) for forward in (model.forward, original))
        if abs(fused - plain) > 1e-3 * abs(plain):
            model.train(was_training)
            raise _other_kind(model, f"it is {plain:.5g} for a few tokens, but the fused loss is {fused:.5g}")
    model.train(was_training)


@contextlib.contextmanager
def _enlarged(decoder: Any, times: float) -> Iterator[None]:
    """While this lasts, the decoder's last hidden states are so many times as large."""

    def enlarge(_module: Any, _inputs: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * times
        return output

    handle = decoder.register_forward_hook(enlarge)
    try:
        yield
    finally:
        handle.remove()


def _other_kind(model: Any, why: str) -> WorkerError:
    return WorkerError(
        f"{type(model).__name__} has its own kind of loss: {why}", where=_WHERE, hint="set [train] fused_loss = false", needs_launch=True
    )
