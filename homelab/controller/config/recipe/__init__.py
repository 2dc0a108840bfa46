"""A recipe: what is trained and how. Nothing in `[train]` names a node; which node computes what belongs to the plan."""

from homelab.controller.config.recipe.data import Data, HubData
from homelab.controller.config.recipe.operation import Checkpoint, LogPolicy, Recovery, Tracking
from homelab.controller.config.recipe.parallel import Parallel
from homelab.controller.config.recipe.recipe import Recipe, RecipeFile, Script, ScriptRecipe, TrainRecipe, parse_recipe
from homelab.controller.config.recipe.training import Method, Model, Precision, Train

__all__ = [
    "Checkpoint", "Data", "HubData", "LogPolicy", "Method", "Model", "Parallel", "Precision", "Recipe", "RecipeFile", "Recovery", "Script", "ScriptRecipe",
    "Tracking", "Train", "TrainRecipe", "parse_recipe",
]  # fmt: skip
