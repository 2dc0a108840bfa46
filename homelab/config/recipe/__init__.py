"""A recipe: what is trained and how. Nothing in `[train]` names a node; which node computes what belongs to the plan."""

from homelab.config.recipe.data import Data, HubData
from homelab.config.recipe.operation import Checkpoint, LogPolicy, Recovery, Tracking
from homelab.config.recipe.parallel import Parallel
from homelab.config.recipe.recipe import Recipe, RecipeFile, Script, ScriptRecipe, TrainRecipe, parse_recipe
from homelab.config.recipe.training import Method, Model, Precision, Train

__all__ = [
    "Checkpoint", "Data", "HubData", "LogPolicy", "Method", "Model", "Parallel", "Precision", "Recipe", "RecipeFile", "Recovery", "Script", "ScriptRecipe",
    "Tracking", "Train", "TrainRecipe", "parse_recipe",
]  # fmt: skip
