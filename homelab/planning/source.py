"""What a recipe's data comes to, in the plan's words: which revision of the hub, and whether plain prompts go into a chat template. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from homelab.config.recipe import Recipe
from homelab.facts import Facts
from homelab.planning.model import Choice
from homelab.planning.rows import DataFile


def choices(recipe: Recipe, facts: Mapping[str, Facts], data: Mapping[str, DataFile]) -> list[Choice]:
    """One for each role that the hub has, and one for the template where plain prompts may meet it."""
    if recipe.data is None:
        return []
    found = []
    for role in ("train", "eval"):
        named = recipe.data.hub(role)
        if named is None:
            continue
        seen = data[role].hub if role in data else None
        revision = (seen or named).revision
        whose = "the recipe says so" if named.revision else "the newest when it was looked at"
        because = f"revision {revision}, {whose}: every node and every attempt loads that one" if revision else (
            "the newest revision at the launch; ranks that load another one end the run before its first step"
        )
        value = ", ".join(filter(None, (f"hub:{named.path}", named.config, f"split {named.split}")))
        found.append(Choice(subject=f"{role} data", value=value, because=because))
    return found + _template(recipe, facts)


def _template(recipe: Recipe, facts: Mapping[str, Facts]) -> list[Choice]:
    assert recipe.data is not None
    has_one = any(known.model.has_chat_template for known in facts.values() if known.model)
    if recipe.data.template == "none":
        because = '[data] template = "none": plain prompts and completions are joined as they stand, as TRL does'
        return [Choice(subject="chat template", value="not used", because=because)]
    if not has_one or recipe.data.format not in ("auto", "prompt-completion"):
        return []
    because = 'the model has one: plain prompts and completions go into it as one question and its answer; [data] template = "none" joins them as they stand, as TRL does'
    return [Choice(subject="chat template", value="used", because=because)]
