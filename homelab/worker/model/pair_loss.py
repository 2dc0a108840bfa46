"""A causal LM that answers a pass of pairs, or of judged answers, with the loss of an objective, whatever its own loss is.

The keyword arguments of such a pass are those of `homelab.worker.data.pair_batches`. A pass without them is answered as before, so all else that asks the
model (checks, chats) works. The rows' losses are summed and divided by their number in the global batch: any row may be in any pass of any rank.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from homelab.shared.protocol.memory_items import CHUNK_LOGITS
from homelab.shared.recipe import Objective
from homelab.worker.model import fused_loss, inspection
from homelab.worker.objectives import losses
from homelab.worker.objectives.pair_answers import Answers

_NEVER = -1.0  # log-probability of an answer that does not count: finite for every objective


class PairFigures:
    """What the passes have shown since `take`, summed over pairs or judged answers: their leads, how many are above 0 (the model finds the better answer better),
    and how far judged ones have moved."""

    def __init__(self) -> None:
        self._sums: torch.Tensor | None = None
        self.summed_answers: torch.Tensor | None = None  # of the last pass, [2 x pairs] or [answers]: a reference is made of them

    def add(self, lead: torch.Tensor, counts: torch.Tensor, moved: torch.Tensor) -> None:
        """Of one pass, [rows] all. Nothing is waited for."""
        sums = torch.stack([(lead * counts).sum(), ((lead > 0) * counts).sum(), (moved * counts).sum()]).detach().double()
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self) -> tuple[float, float, float]:
        """(summed lead, better answers found, summed distance moved in nats)."""
        sums, self._sums = self._sums, None
        return (0.0, 0.0, 0.0) if sums is None else (float(sums[0]), float(sums[1]), float(sums[2]))


def figures_of(model: Any) -> PairFigures:
    """Those of a model with `install`, adapted or not."""
    figures: PairFigures = inspection.base_of(model).pair_figures
    return figures


def install(model: Any, objective: Objective) -> None:
    """Teach the model; before adapters are added, and after `fused_loss`, whose choice decides whether all logits may exist at once."""
    if objective.scores:
        _install_scores(model)
        return
    original: Callable[..., Any] = model.forward
    in_chunks = fused_loss.takes_labelled(model)
    tokens = max(1, CHUNK_LOGITS // model.config.get_text_config().vocab_size)
    figures = model.pair_figures = PairFigures()

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, sides: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if sides is None:
            return original(*args, **kwargs)
        from transformers.modeling_outputs import CausalLMOutputWithPast

        kind = _OfJudged if objective.learns_labels else _OfPairs
        asked = kind(*(kwargs.pop(name) for name in kind._fields))
        labels, labelled, rows = kwargs.pop("labels"), kwargs.pop("labelled"), kwargs.pop("num_items_in_batch")
        targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1).index_select(0, labelled)
        if in_chunks:
            kwargs.pop("return_dict", None)
            hidden = self.base_model(**kwargs).last_hidden_state
            log_probabilities = _of_hidden(self, hidden.reshape(-1, hidden.shape[-1]).index_select(0, labelled), targets, tokens)
        else:
            logits = original(*args, **kwargs).logits
            log_probabilities = _chosen(logits.reshape(-1, logits.shape[-1]).index_select(0, labelled), targets)
        count = asked.answer_tokens.numel()
        # One more sum for the prompts of better answers.
        of_side = sides == torch.arange(count + 1, device=sides.device).unsqueeze(
            1
        )  # an index_add on a card sums in another order each time
        sums = torch.where(of_side, log_probabilities, 0.0).sum(1, dtype=torch.float64)  # a small difference of large sums is learned
        figures.summed_answers = sums[:count].detach()
        loss = asked.loss(sums, objective, figures) / rows
        if isinstance(asked, _OfPairs) and objective.learns_answers:
            loss = loss - ((sums[:count:2] * asked.counting).sum() + sums[count]) / asked.learned_tokens
        return CausalLMOutputWithPast(loss=loss.float())

    forward.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]
    del forward.__wrapped__
    model.forward = types.MethodType(forward, model)
    model.takes_labelled = True


def _install_scores(model: Any) -> None:
    """Answer passes of pairs whose answers are scored by the head of `score_head`."""
    original: Callable[..., Any] = model.forward
    figures = model.pair_figures = PairFigures()

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, ends: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if ends is None:
            return original(*args, **kwargs)
        from transformers.modeling_outputs import CausalLMOutputWithPast

        counting, pairs = kwargs.pop("counting"), kwargs.pop("num_items_in_batch")
        for name in ("labels", "labelled", "return_dict"):
            kwargs.pop(name, None)
        hidden = self.base_model(*args, **kwargs).last_hidden_state
        scores = self.get_output_embeddings()(hidden.reshape(-1, hidden.shape[-1]).index_select(0, ends)).squeeze(-1).double()
        better, other = scores[::2], scores[1::2]
        figures.add(better - other, counting, torch.zeros_like(better))
        return CausalLMOutputWithPast(loss=((losses.of_scores(better, other) * counting).sum() / pairs).float())

    forward.__signature__ = inspect.signature(type(model).forward)  # type: ignore[attr-defined]
    del forward.__wrapped__
    model.forward = types.MethodType(forward, model)
    model.takes_labelled = False


class _OfPairs(NamedTuple):
    """What a pass of pairs has beside its tokens, as `homelab.worker.data.pair_batches` says."""

    answer_tokens: torch.Tensor
    reference: torch.Tensor
    counting: torch.Tensor
    learned_tokens: torch.Tensor

    def loss(self, sums: torch.Tensor, objective: Objective, figures: PairFigures) -> torch.Tensor:
        """The summed loss of the pairs that count."""
        of_answers = torch.where(self.counting.bool().repeat_interleave(2), sums[:-1], _NEVER)
        better, other = (Answers(of_answers[place::2], self.answer_tokens[place::2], self.reference[place::2]) for place in (0, 1))
        figures.add(losses.lead(better, other, objective), self.counting, better.moved)
        return (losses.of_pairs(better, other, objective) * self.counting).sum()


class _OfJudged(NamedTuple):
    """What a pass of judged answers has beside its tokens, as `homelab.worker.data.pair_batches` says."""

    answer_tokens: torch.Tensor
    reference: torch.Tensor
    counting: torch.Tensor
    good: torch.Tensor
    baseline: torch.Tensor

    def loss(self, sums: torch.Tensor, objective: Objective, figures: PairFigures) -> torch.Tensor:
        """The summed loss of the answers that count."""
        answers = Answers(sums[:-1], self.answer_tokens, self.reference)
        of_each, lead = losses.of_judged(answers, self.good, self.baseline, objective)
        figures.add(lead, self.counting, answers.moved)
        return (of_each * self.counting).sum()


def _of_hidden(model: Any, hidden: torch.Tensor, targets: torch.Tensor, chunk: int) -> torch.Tensor:
    """[tokens]: a chunk's logits are made again in the backward pass, because its gradient depends on all of the pair."""
    head, cap = model.get_output_embeddings(), getattr(model.config.get_text_config(), "final_logit_softcapping", None)

    def of_chunk(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = head(part)
        return _chosen(logits if cap is None else torch.tanh(logits / cap) * cap, wanted)

    again = functools.partial(checkpoint, of_chunk, use_reentrant=False) if torch.is_grad_enabled() else of_chunk
    return torch.cat([again(part, wanted) for part, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True)])


def _chosen(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The log-probability (fp32, nats) of each target."""
    return -torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
