"""recipes/models: what `homelab new` decides today, and every model that people take has one."""

from __future__ import annotations

import dataclasses

import pytest
from pages import model_recipes

from homelab.controller.config.load import load_recipe
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.planning.model import families
from tests.builders import PROJECT_RECIPES

FOLDER = next(path.parent for path in PROJECT_RECIPES if path.parent.name == "models")
# What people train in 2026, by the beginning of a model's name.
FAMILIES = (
    "Qwen/Qwen3-",
    "Qwen/Qwen2.5-Coder",
    "meta-llama/Llama-3",
    "google/gemma-3",
    "mistralai/Mistral-Small",
    "microsoft/phi-4",
    "HuggingFaceTB/SmolLM3",
)


def test_the_folder_has_these_recipes_and_no_other() -> None:
    assert {file.stem for file in FOLDER.glob("*.toml")} == set(model_recipes.RECIPES)
    assert [family for family in FAMILIES if not any(one.model.startswith(family) for one in model_recipes.RECIPES.values())] == []


@pytest.mark.parametrize("name", model_recipes.RECIPES)
def test_a_recipe_is_what_new_decides_and_has_room_on_its_card(name: str) -> None:
    written = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    assert written == model_recipes.text(name), "again: scripts/docs --texts"
    recipe = load_recipe(FOLDER / f"{name}.toml")
    assert isinstance(recipe, TrainRecipe)
    assert families.known(recipe.model.name) is not None, "planned by its config.json"
    size_gb, attempt = next(iter(model_recipes.sizes(recipe.model.name).items()))
    assert f"# It fits a card with {size_gb} GB" in written
    # It is the same training; the precision is that of the machines that train it.
    assert recipe.method == attempt.recipe.method
    assert recipe.train == dataclasses.replace(attempt.recipe.train, precision="auto")
