"""What a recipe's data comes to, in the plan's words: which revision of the hub, and whether plain prompts go into a chat template. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from homelab.controller.config.recipe import Recipe, ScriptRecipe, TrainRecipe
from homelab.controller.facts.node import Facts
from homelab.controller.planning.speed.dataset_size import DataFile
from homelab.controller.planning.types import Choice


def choices(recipe: Recipe, facts: Mapping[str, Facts], data: Mapping[str, DataFile]) -> list[Choice]:
    """One for each role that the hub has, and one for the template where plain prompts may meet it."""
    if isinstance(recipe, ScriptRecipe):
        return []
    reasons = []
    for role in ("train", "eval"):
        named = recipe.data.hub(role)
        if named is None:
            continue
        resolved = data[role].hub if role in data else None
        revision = (resolved or named).revision
        origin = "the recipe says so" if named.revision else "the newest when it was looked at"
        because = (
            f"revision {revision}, {origin}: every node and every attempt loads that one"
            if revision
            else ("the newest revision at the launch; ranks that load another one end the run before its first step")
        )
        value = ", ".join(filter(None, (f"hub:{named.path}", named.config, f"split {named.split}")))
        reasons.append(Choice(subject=f"{role} data", value=value, because=because))
    return reasons + _template(recipe, facts)


def _template(recipe: TrainRecipe, facts: Mapping[str, Facts]) -> list[Choice]:
    has_one = any(node_facts.model.has_chat_template for node_facts in facts.values() if node_facts.model)
    if recipe.data.template == "none":
        because = '[data] template = "none": plain prompts and completions are joined as they stand, as TRL does'
        return [Choice(subject="chat template", value="not used", because=because)]
    if not has_one or recipe.data.format not in ("auto", "prompt-completion"):
        return []
    because = 'the model has one: plain prompts and completions go into it as one question and its answer; [data] template = "none" joins them as they stand, as TRL does'
    return [Choice(subject="chat template", value="used", because=because)]
