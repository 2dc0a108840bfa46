"""How large this recipe's training is, as far as anybody knows before it runs: for the checks of disk and memory."""

from __future__ import annotations

from dataclasses import dataclass

from homelab.config.recipe import Recipe
from homelab.errors import InputError
from homelab.facts import Facts
from homelab.planning import architecture, memory


@dataclass(frozen=True)
class TrainingSize:
    """Bytes. `weights_bytes`: the base model as it is loaded, in its smallest form; `checkpoint_bytes`: one checkpoint."""

    parameters: int
    trainable_parameters: int
    weights_bytes: int

    @property
    def checkpoint_bytes(self) -> int:
        """fp32 weights of what is trained, and Adam's two moments: 12 bytes each."""
        return 12 * self.trainable_parameters

    @property
    def training_bytes(self) -> int:
        """Weights, trained part, gradients and optimizer, without activations: a lower bound of what a rank holds."""
        optimizer_and_gradients = 12 * self.trainable_parameters
        return self.weights_bytes + optimizer_and_gradients


def of_recipe(recipe: Recipe | None, facts: Facts) -> TrainingSize | None:
    """From the model's config on the node, or the table of known models; None when the shape is not known."""
    if recipe is None or recipe.model is None or recipe.method is None:
        return None
    config = facts.model.config if facts.model else None
    shape = (architecture.from_config(config) if config else None) or architecture.known(recipe.model.name)
    if shape is None:
        return None
    try:
        trainable = memory.trainable_parameters(shape, recipe.method)
    except InputError:
        return None  # the plan names the unknown target
    return TrainingSize(shape.total, trainable, memory.base_weight_bytes(shape, recipe.method, "bf16"))
