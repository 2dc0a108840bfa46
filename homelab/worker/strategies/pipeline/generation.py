"""A greedy answer of a model in stages: hidden states go from stage to stage, and the last one sends the chosen token back to the first.

The last stage runs transformers' own `generate`, so what ends an answer and what else the model's generation config says is the same as with the
whole model; only the forward pass of the layers is elsewhere. Messages go through host memory (gloo), in the type of the hidden states.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from homelab.shared.law.stage import Stage

_STATE = "linear_attention"  # in `layer_types` of a configuration
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class StageCache(DynamicCache):
    """Keys and values, or states, of a stage's own layers. `length`: the tokens so far, which whoever runs the layers counts: transformers asks layer 0
    for it, which only the first stage has, and a layer with a state knows no length."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        kinds = getattr(config.get_text_config(), "layer_types", None) or ()
        if _STATE in kinds:
            self.layers = [LinearAttentionLayer() if kind == _STATE else DynamicLayer() for kind in kinds]
        self.length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.length + query_length, 0


@dataclass(frozen=True)
class Ring:
    """The way of a token: from the last stage to the first, and as hidden states through all. `ranks`: the rank of each stage."""

    stage: Stage
    ranks: Sequence[int]
    hidden: int

    def send_tokens(self, tokens: torch.Tensor) -> None:
        """Token ids [1, length] from the last stage to the first; an empty tensor ends the answer."""
        dist.send(torch.tensor([tokens.shape[1]]), self.ranks[0])
        if tokens.shape[1]:
            dist.send(tokens.cpu().contiguous(), self.ranks[0])

    def take_tokens(self) -> torch.Tensor | None:
        """What the first stage gets; None at the end of the answer."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, self.ranks[-1])
        if not int(length):
            return None
        tokens = torch.zeros((1, int(length)), dtype=torch.int64)
        dist.recv(tokens, self.ranks[-1])
        return tokens

    def send_hidden(self, states: torch.Tensor | None) -> None:
        """Hidden states [1, length, hidden] to the next stage; None ends the answer."""
        behind = self.ranks[self.stage.number + 1]
        length, kind = (0, 0) if states is None else (states.shape[1], _DTYPES.index(states.dtype))
        dist.send(torch.tensor([length, kind]), behind)
        if states is not None:
            dist.send(states.cpu().contiguous(), behind)

    def take_hidden(self) -> torch.Tensor | None:
        """What comes from the stage before; None at the end of the answer."""
        before = self.ranks[self.stage.number - 1]
        header = torch.zeros(2, dtype=torch.int64)
        dist.recv(header, before)
        length, kind = header.tolist()
        if not length:
            return None
        states = torch.zeros((1, length, self.hidden), dtype=_DTYPES[kind])
        dist.recv(states, before)
        return states


@torch.no_grad()
def serve(model: Any, ring: Ring, device: torch.device) -> None:
    """Compute the own layers of a stage that is not the last, for each token until the answer ends."""
    cache = StageCache(model.config)
    while True:
        entered = ring.take_tokens() if ring.stage.is_first else ring.take_hidden()
        if entered is None:
            break
        begin, end = cache.length, cache.length + entered.shape[1]
        states = model(
            **{"input_ids" if ring.stage.is_first else "inputs_embeds": entered.to(device)}, past_key_values=cache, use_cache=True,
            attention_mask=torch.ones((1, end), dtype=torch.int64, device=device), position_ids=torch.arange(begin, end, device=device).unsqueeze(0),
        ).logits  # fmt: skip
        cache.length = end
        ring.send_hidden(states)
    if ring.stage.number + 2 < ring.stage.count:  # the last one has ended it
        ring.send_hidden(None)


def join(model: Any, ring: Ring, device: torch.device) -> None:
    """Let the forward pass of the last stage begin with the layers of all others."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    own_forward = base.forward

    @functools.wraps(own_forward)
    def forward(input_ids: torch.Tensor, **options: Any) -> Any:
        ring.send_tokens(input_ids)
        states = ring.take_hidden()
        assert states is not None, "only the last stage ends an answer"
        answer = own_forward(**options | {"inputs_embeds": states.to(device)})
        options["past_key_values"].length += input_ids.shape[1]
        return answer

    base.forward = forward


def end(ring: Ring) -> None:
    """Tell the other stages that the answer is complete. By the last one."""
    ring.send_tokens(torch.zeros((1, 0), dtype=torch.int64))
