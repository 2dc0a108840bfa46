"""The sections of a recipe, each once: the controller validates them, and the worker computes with them.

They are frozen dataclasses of the standard library and run on Python 3.9, because they are shipped to the nodes. A limit is a mark in the type of
its field; a rule over several keys is a `__post_init__`. What each key means stands in `homelab/docs/reference/recipe.SECTION.toml`.
"""

from homelab.shared.recipe.data import Columns, Data, HubData
from homelab.shared.recipe.objective import Objective
from homelab.shared.recipe.operation import Checkpoint, LogPolicy, Recovery, Tracking
from homelab.shared.recipe.parallel import Parallel
from homelab.shared.recipe.program import Script
from homelab.shared.recipe.training import Method, Model, Precision, Train

__all__ = [
    "Checkpoint", "Columns", "Data", "HubData", "LogPolicy", "Method", "Model", "Objective", "Parallel", "Precision", "Recovery", "Script", "Tracking", "Train",
]  # fmt: skip
