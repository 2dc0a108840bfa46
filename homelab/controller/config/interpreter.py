"""Which of a node's Pythons trains a recipe.

Unsloth's releases take other versions of transformers, TRL and datasets than the rest (its metadata: transformers <= 5.17.0, trl <= 1.15.0,
datasets < 5), so it has an environment of its own on every node.
"""

from __future__ import annotations

from homelab.controller.config.cluster import Cluster
from homelab.controller.config.recipe import Recipe

# What the law was tested with (homelab/controller/features/setup/unsloth-packages.txt), for nodes that have nothing yet.
UNSLOTH_VERSIONS = {
    "torch": "2.13.0", "transformers": "5.17.0", "peft": "0.21.2", "accelerate": "1.15.0", "unsloth": "2026.10.9", "unsloth-zoo": "2026.10.9",
    "trl": "1.15.0", "datasets": "4.8.5", "bitsandbytes": "0.50.2", "tensorboard": "2.21.0",
}  # fmt: skip


def uses_unsloth(recipe: Recipe | None) -> bool:
    """Whether the recipe is trained by Unsloth."""
    return recipe is not None and recipe.method is not None and recipe.method.backend == "unsloth"


def for_recipe(cluster: Cluster, recipe: Recipe | None) -> Cluster:
    """The same cluster, where `python` of every node is that of the environment which this recipe trains in."""
    return with_unsloth(cluster) if uses_unsloth(recipe) else cluster


def with_unsloth(cluster: Cluster) -> Cluster:
    """The same cluster, where `python` of every node is its `unsloth_python`."""
    nodes = tuple(node.model_copy(update={"python": node.unsloth_python}) for node in cluster.nodes)
    return cluster.model_copy(update={"nodes": nodes})


def key_of(recipe: Recipe | None) -> str:
    """The key of cluster.toml that names that Python."""
    return "unsloth_python" if uses_unsloth(recipe) else "python"
