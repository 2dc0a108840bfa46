"""How large this recipe's training is, as far as anybody knows before it runs: for the checks of disk and memory."""

from __future__ import annotations

from dataclasses import dataclass

from homelab.controller.base.errors import InputError
from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.work.job import shape_of


@dataclass(frozen=True)
class TrainingSize:
    """Bytes. `weights_bytes`: the base model as it is loaded, in its smallest form; `checkpoint_bytes`: one checkpoint."""

    parameters: int
    trainable_parameters: int
    weights_bytes: int

    @property
    def checkpoint_bytes(self) -> int:
        """What is trained, with Adam's two moments."""
        return rank_memory.CHECKPOINT_BYTES * self.trainable_parameters

    @property
    def training_bytes(self) -> int:
        """Weights, trained part, gradients and optimizer, without activations: a lower bound of what a rank holds."""
        # as many bytes as a checkpoint: gradients for weights
        return self.weights_bytes + rank_memory.CHECKPOINT_BYTES * self.trainable_parameters


def of_recipe(recipe: Recipe | None, facts: Facts) -> TrainingSize | None:
    """From the model's config on the node, or the table of known models; None when the shape is not known."""
    if not isinstance(recipe, TrainRecipe):
        return None
    shape = shape_of(recipe.model.name, {"": facts}, method=recipe.method)
    if shape is None:
        return None
    try:
        trainable = rank_memory.trainable_parameters(shape, recipe.method)
    except InputError:
        return None  # the plan names the unknown target
    return TrainingSize(shape.total, trainable, rank_memory.base_weight_bytes(shape, recipe.method, "bf16"))
