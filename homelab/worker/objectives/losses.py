"""The losses of a pair, as TRL 1.16 has them: functions of the better and the other answer, [pairs] -> [pairs]; and of an answer that is judged alone. Pure.

dpo    Rafailov et al. 2023, equation 7 (trl/trainer/dpo_trainer.py, loss_type "sigmoid")
ipo    Azar et al. 2023, equation 17, with log-ratios of one token, as its authors and TRL agreed (the same file, loss_type "ipo")
simpo  Meng et al. 2024, equation 6 (trl/experimental/cpo/cpo_trainer.py, loss_type "simpo" with cpo_alpha = 0)
orpo   Hong et al. 2024, equations 6 and 7 (trl/experimental/orpo/orpo_trainer.py); to it comes the cross entropy of the better answers and their prompts
kto    Ethayarajh et al. 2024, equation 7 (trl/trainer/kto_trainer.py, loss_type "kto")

Another one is a function here, and its line in `_LOSSES`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from homelab.shared.recipe import Objective
from homelab.worker.objectives.pair_answers import Answers

_LOG_HALF = -0.6931472


def of_pairs(better: Answers, other: Answers, objective: Objective) -> torch.Tensor:
    """The loss of each pair, [pairs]."""
    return _LOSSES[objective.kind](better, other, objective)


def lead(better: Answers, other: Answers, objective: Objective) -> torch.Tensor:
    """How much more the objective rewards the better answer than the other one, [pairs]: TRL's rewards/margins."""
    if objective.compares_with_base:
        return objective.beta * (better.moved - other.moved)
    return objective.beta * (better.mean - other.mean)


def of_judged(answers: Answers, good: torch.Tensor, baseline: torch.Tensor, objective: Objective) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss, lead), [answers] both, of answers that are `good` (1) or bad (0): Kahneman-Tversky optimisation.

    The lead says how far an answer is on its right side of `baseline`: a good one has become more probable than the baseline, a bad one less.
    """
    lead = objective.beta * (answers.moved - baseline) * (2 * good - 1)
    weight = torch.where(good.bool(), objective.desirable_weight, objective.undesirable_weight)
    return weight * (1 - torch.sigmoid(lead)), lead


def of_scores(better: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The loss of each pair whose answers have these scores, [pairs]: a reward model's (Stiennon et al. 2020, section 3.4)."""
    return -functional.logsigmoid(better - other)


def dpo(better: Answers, other: Answers, objective: Objective) -> torch.Tensor:
    """Direct preference optimisation."""
    return -functional.logsigmoid(objective.beta * (better.moved - other.moved))


def ipo(better: Answers, other: Answers, objective: Objective) -> torch.Tensor:
    """Identity preference optimisation."""
    return (better.moved / better.tokens - other.moved / other.tokens - 1 / (2 * objective.beta)) ** 2


def simpo(better: Answers, other: Answers, objective: Objective) -> torch.Tensor:
    """Simple preference optimisation."""
    return -functional.logsigmoid(objective.beta * (better.mean - other.mean) - objective.lead)


def orpo(better: Answers, other: Answers, objective: Objective) -> torch.Tensor:
    """Odds ratio preference optimisation: the pair's part."""
    odds = (better.mean - other.mean) - (_log_rest(better.mean) - _log_rest(other.mean))
    return -objective.beta * functional.logsigmoid(odds)


def _log_rest(log_probability: torch.Tensor) -> torch.Tensor:
    """log(1 - p) of log p, exact at both ends (Maechler 2012, as TRL's log1mexp). A p of 1 counts as the next smaller number."""
    x = log_probability.clamp(max=-torch.finfo(log_probability.dtype).eps)
    is_near_one = x > _LOG_HALF
    near_one = torch.log(-torch.expm1(torch.where(is_near_one, x, -1.0)))
    return torch.where(is_near_one, near_one, torch.log1p(-torch.exp(torch.where(is_near_one, -1.0, x))))


_LOSSES: dict[str, Callable[[Answers, Answers, Objective], torch.Tensor]] = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "orpo": orpo}
