"""What of a recipe cannot be exact: where the curve depends, in its last digits or more, on who computes what. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from homelab.config.recipe import Recipe
from homelab.facts import Facts
from homelab.worker.compress import POWERSGD_RANK, POWERSGD_WORTH

_COMPRESSED = {
    "bf16": "rounds each rank's gradient by about 0.3 % of its size: with other ranks or shares the curve is close, not the same",
    "powersgd": (
        f"sends products of rank {POWERSGD_RANK} instead of gradients: the curve depends on the cluster, and on every resume, because what"
        " a rank has left out so far is in no checkpoint"
    ),
}


def warnings_of(recipe: Recipe, facts: Mapping[str, Facts], device: str, ranks: int) -> list[str]:
    """The lines for the plan; none for a recipe whose curve is the same on any cluster, to the last digits of fp32."""
    if recipe.method is None:
        return []
    found = []
    if recipe.method.dropout > 0:
        found.append(
            f"law: dropout {recipe.method.dropout:g} draws differently when rows move to other micro-batches; with dropout 0 the curve is the same to the last digits"
        )
    narrow = recipe.method.kind != "full" and recipe.method.rank <= POWERSGD_RANK * POWERSGD_WORTH
    if recipe.parallel.compress == "powersgd" and narrow:
        found.append(
            f'[parallel] compress = "powersgd" sends adapters of rank {recipe.method.rank} as they are: its products are hardly narrower;'
            ' compress = "bf16" halves them'
        )
    elif recipe.parallel.compress != "none" and ranks > 1:
        found.append(f'law: [parallel] compress = "{recipe.parallel.compress}" {_COMPRESSED[recipe.parallel.compress]}')
    if recipe.train and recipe.train.optimizer != "adamw" and ranks > 1:
        found.append(
            f'law: optimizer = "{recipe.train.optimizer}" rounds its states to 8 bits, which enlarges the last digits: losses agree to about 1e-6,'
            " weights to about 1e-4 between clusters (measured)"
        )
    if recipe.method.backend == "unsloth" and ranks > 1 and device == "cuda":
        found.append(
            'law: backend = "unsloth" trains the same on unequal nodes in fp32 on CPUs (tested, 1e-5); of its CUDA kernels nobody has shown it'
        )
    if any(_has_balancing_loss(known.model.config) for known in facts.values() if known.model and known.model.config):
        found.append(
            "law: the model adds a loss that balances its experts (output_router_logits in its config.json) once per micro-batch, whatever"
            " that holds: its weight depends on who computes what; without it the curve is the same on any cluster"
        )
    return found


def _has_balancing_loss(config: Mapping[str, Any]) -> bool:
    """transformers' mixtures of experts add router_aux_loss_coef x their load-balancing loss, but only with `output_router_logits`."""
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    experts = any(
        config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    )
    return experts and config.get("output_router_logits") is True and config.get("router_aux_loss_coef", 1) != 0
