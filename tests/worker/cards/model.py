"""A model whose passes take a time that the test chooses: real modules for torch to divide or to copy, kernels for the time alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from homelab.shared.law.speed import Speed
from tests.worker.cards.card import Card, OnCard

HIDDEN, BLOCKS, TOKENS = 20, 2, 32  # wide enough for PowerSGD to make a matrix smaller
FORWARD, BACKWARD = "forward kernels", "backward kernels"
_FORWARD_PART = 1 / 3  # of a pass


@dataclass
class Output:
    """As transformers' models give it."""

    loss: torch.Tensor | None
    logits: torch.Tensor


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, hidden: torch.Tensor, launch: Callable[[str, float], None], seconds: float) -> torch.Tensor:
        context.launch, context.seconds = launch, seconds
        launch(FORWARD, seconds * _FORWARD_PART)
        return hidden * 1.0

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        context.launch(BACKWARD, context.seconds * (1 - _FORWARD_PART))
        return gradient * 1.0, None, None


class Block(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(HIDDEN, bias=False)
        self.up = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.down = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.number = number

    def forward(self, hidden: torch.Tensor, launch: Callable[[str, float], None], seconds: float) -> torch.Tensor:
        entered = self.up(self.norm(hidden))
        left: torch.Tensor = self.down(_Kernels.apply(entered, launch, seconds))
        return left.float()


class Model(torch.nn.Module):
    """Of `BLOCKS` blocks, which `speed` says the cost of. `is_last`: it computes the loss. In bf16 the sums are those of autocast, as accelerate has it."""

    _no_split_modules = ("Block",)

    def __init__(self, card: Card, speed: Speed, *, is_last: bool = True, is_bf16: bool = False) -> None:
        super().__init__()
        self._card, self._speed, self._is_last, self._is_bf16 = card, speed, is_last, is_bf16
        self.embedding = torch.nn.Embedding(TOKENS, HIDDEN)
        self.layers = torch.nn.ModuleList(Block(number) for number in range(BLOCKS))
        self.head = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.config = SimpleNamespace(
            get_text_config=lambda: SimpleNamespace(hidden_size=HIDDEN), to_dict=lambda: {"tie_word_embeddings": False}, use_cache=False
        )

        for weight in self.parameters():
            torch.nn.init.constant_(weight, 0.5)  # the same on every rank

    def forward(
        self, input_ids: Any = None, inputs_embeds: Any = None, labels: Any = None, num_items_in_batch: Any = 1, **_other: Any
    ) -> Output:
        entered = self.embedding(input_ids.as_subclass(torch.Tensor)) if inputs_embeds is None else inputs_embeds.as_subclass(torch.Tensor)
        seconds = self._speed.pass_s(entered.shape[0] * entered.shape[1]) / BLOCKS
        with torch.autocast("cpu", torch.bfloat16, enabled=self._is_bf16):
            for block in self.layers:
                entered = block(entered, self._card.launch, seconds)
            logits = self.head(entered)
        if not self._is_last or labels is None:
            return Output(None, logits.as_subclass(OnCard))
        counted = int((labels.as_subclass(torch.Tensor)[:, 1:] >= 0).sum())
        loss = (logits.sum() * 0.0 + counted) / torch.as_tensor(num_items_in_batch).as_subclass(torch.Tensor)
        return Output(loss.as_subclass(OnCard), logits)


def on_card(model: torch.nn.Module) -> torch.nn.Module:
    """Its weights say that they lie on a card. Not for a model that torch divides or copies."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(weight.detach().as_subclass(OnCard)))
    return model
