"""What of a recipe cannot be exact: where the curve depends, in its last digits or more, on who computes what. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from homelab.controller.base.models import Value
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.planning.model.model_config import own_dtype
from homelab.controller.planning.strategy.base import Strategy
from homelab.controller.planning.work.job import Job, TrainingJob
from homelab.shared.law import model_chance
from homelab.shared.law.wire_bytes import POWERSGD_RANK, POWERSGD_WORTH

_COMPRESSED = {
    "bf16": "rounds each rank's gradient by about 0.3 % of its size: with other ranks or shares the curve is close, but not the same",
    "powersgd": (
        f"sends products of rank {POWERSGD_RANK} instead of gradients: the curve depends on the cluster, and on every resume, because no checkpoint"
        " holds what a rank has not sent yet"
    ),
}


def warnings_of(job: Job) -> list[str]:
    """The lines for the plan; none for a recipe whose curve is the same on any cluster, to the last digits of fp32."""
    if not isinstance(job, TrainingJob):
        return []
    recipe, device, ranks = job.recipe, job.machines.device, job.machines.world_size
    warnings = []
    if recipe.method.dropout > 0:
        on_cards = " and on other cards" if device == "cuda" else ""
        warnings.append(
            f"law: dropout {recipe.method.dropout:g} draws differently when rows move to other micro-batches{on_cards}; with dropout 0 the curve is"
            " the same to the last digits"
        )
    warnings += _model_chance(job)
    if recipe.parallel.compress == "powersgd" and _is_narrow(recipe):
        warnings.append(
            f'[parallel] compress = "powersgd" does not compress adapters of rank {recipe.method.rank}: its products are hardly smaller;'
            ' compress = "bf16" halves them'
        )
    elif recipe.parallel.compress != "none" and ranks > 1:
        warnings.append(f'law: [parallel] compress = "{recipe.parallel.compress}" {_COMPRESSED[recipe.parallel.compress]}')
    if recipe.train.optimizer != "adamw" and ranks > 1:
        warnings.append(
            f'law: optimizer = "{recipe.train.optimizer}" rounds its states to 8 bits, which changes the last digits: losses agree to about 1e-6,'
            " weights to about 1e-4 between clusters (measured)"
        )
    if recipe.method.backend == "unsloth" and device == "cuda":  # one card alone, too: on two it may be another curve
        warnings.append(
            'law: backend = "unsloth" trains the same on unequal nodes in fp32 on CPUs (tested, 1e-5); its CUDA kernels were not tested for that'
        )
    if any(
        _has_balancing_loss(node_facts.model.config)
        for node_facts in job.machines.facts.values()
        if node_facts.model and node_facts.model.config
    ):
        warnings.append(
            "law: the model adds a loss that balances its experts (output_router_logits in its config.json) once per micro-batch, whatever its size:"
            " its weight depends on who computes what; without it the curve is the same on any cluster"
        )
    return warnings


def _model_chance(job: TrainingJob) -> list[str]:
    """What the model's own config.json has of dropout and noise, off or kept."""
    # The rates of dropout and noise in the model's config.json, as far as a node has it.
    configs = [facts.model.config for facts in job.machines.facts.values() if facts.model and facts.model.config]
    rates = model_chance.rates(configs[0]) if configs else {}
    listed = ", ".join(f"{name} = {rate:g}" for name, rate in sorted(rates.items()))
    if job.recipe.method.model_dropout:
        return [
            f"law: [method] model_dropout = true keeps what the model's config.json has of dropout and noise ({listed or 'what its class takes by itself'}):"
            " it draws differently when rows move to other micro-batches"
        ]
    if not rates:
        return []
    return [
        f"law: {listed} of the model's config.json {'is' if len(rates) == 1 else 'are'} off, so that the curve is the same on any cluster;"
        " [method] model_dropout = true keeps them"
    ]


class LawLimit(Value):
    """Why honest steps that are computed once more may come out otherwise. `is_repeatable`: the passes of the record on its processors bring them out again."""

    text: str
    is_repeatable: bool


def limit_of(recipe: TrainRecipe, config: Mapping[str, Any]) -> LawLimit | None:
    """The first of the plan's `law:` lines that decides whether a step comes out again; None for a recipe that has none. `config`: the model's config.json."""
    compress = recipe.parallel.compress
    if compress == "bf16" or (compress == "powersgd" and not _is_narrow(recipe)):  # no record says which rank has computed which pass
        return LawLimit(text=f'[parallel] compress = "{compress}" may do so with other ranks or shares', is_repeatable=False)
    words = {
        "dropout draws other numbers": recipe.method.draws,
        f'optimizer = "{recipe.train.optimizer}" rounds its states to 8 bits, and may do so': recipe.train.optimizer != "adamw",
        'backend = "unsloth" may do so': recipe.method.backend == "unsloth",
        "the loss that balances the model's experts may do so": _has_balancing_loss(config),
    }
    found = next((text for text, applies in words.items() if applies), None)
    return LawLimit(text=f"{found} in other passes or on other processors than the record's", is_repeatable=True) if found else None


def _is_narrow(recipe: TrainRecipe) -> bool:
    return recipe.method.kind != "full" and recipe.method.rank <= POWERSGD_RANK * POWERSGD_WORTH


def date_warnings(job: Job, moment: datetime | None) -> list[str]:
    """Which date is in the rows, where the model's chat template writes one. `moment`: that of the launch, UTC, where it is known."""
    has_one = any(facts.model.template_writes_date for facts in job.machines.facts.values() if facts.model)
    if not isinstance(job, TrainingJob) or not has_one:
        return []
    date = f" ({moment:%d %b %Y})" if moment else ""
    return [
        f"law: the model's chat template writes the date into the rows: that of the launch by UTC{date}, on every node and after every recovery"
    ]


def precision_warnings(job: Job, without_bf16: Sequence[str], strategy: Strategy) -> list[str]:
    """What a precision that the recipe leaves to the cluster means, and what fp16 means for this model and with this strategy.

    The nodes of `without_bf16` have a card that has none.
    """
    if not isinstance(job, TrainingJob):
        return []
    recipe, precision = job.recipe, job.precision
    warnings = []
    if recipe.train.precision == "auto":
        because = f" because of {', '.join(without_bf16)}" if precision == "fp16" else ""
        warnings.append(
            f'law: precision = "auto" is {precision} on this cluster{because} (fp32 on CPUs, bf16 on cards, fp16 if a card is older than Ampere);'
            " set [train] precision in the recipe so that another cluster trains the same"
        )
    if precision != "fp16":
        return warnings
    dtype = own_dtype(job.machines.facts)
    if dtype == "bfloat16":
        warnings.append(
            "fp16 ends at 65504, and the model was made in bfloat16 (dtype in its config.json), which has a larger range: its values may overflow, and the"
            " loss is then not a number"
        )
    elif dtype is None:
        warnings.append(
            "fp16 ends at 65504: a model that was made in bfloat16 may overflow, and the loss is then not a number (its config.json is not known)"
        )
    if strategy.divides_weights and job.machines.device == "cuda" and job.machines.world_size > 1:
        warnings.append(
            f"fp16 with {strategy.name} trains as one process does on CPUs (tested: the same steps are skipped); it has not run on a card yet"
        )
    return warnings


def _has_balancing_loss(config: Mapping[str, Any]) -> bool:
    """transformers' mixtures of experts add router_aux_loss_coef x their load-balancing loss, but only with `output_router_logits`."""
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    experts = any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"))
    return experts and config.get("output_router_logits") is True and config.get("router_aux_loss_coef", 1) != 0
