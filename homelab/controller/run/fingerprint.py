"""The identity of a training: its recipe, the content of its data and its base model, from the run's records. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from homelab.controller.config.recipe import Recipe, deciding
from homelab.controller.facts.training import ModelFacts, ModelFile
from homelab.controller.planning.types import Plan
from homelab.shared.law import model_chance
from homelab.shared.protocol import model_forms
from homelab.shared.recipe import Precision

_LONGEST = 40


def as_begun(recipe: Recipe, plan: Plan, strategy: str | None = None) -> Recipe:
    """The recipe with what "auto" came to in `plan`, an earlier attempt's, where it decides what is computed: other nodes make no other
    training of it. `strategy`: that a person names for the next attempt; else the one that was named for `plan`. It is no part of the law."""
    strategy = strategy or plan.strategy_by_hand
    if strategy is not None:
        recipe = recipe.model_copy(update={"parallel": replace(recipe.parallel, strategy=strategy)})
    if recipe.train is None or recipe.train.precision != "auto":
        return recipe
    return recipe.model_copy(update={"train": replace(recipe.train, precision=cast(Precision, plan.precision))})


def law_of(described: Mapping[str, Any]) -> dict[str, Any]:
    """What decides the training, of a run.json: the sections as they were written, and the digest of each data file.

    Not by way of `Recipe`: a newer version may know more keys, and a run goes on as what it was. Raises KeyError, TypeError,
    AttributeError or ValueError for what is no run.json.
    """
    law = deciding(described["recipe"], described.get(model_chance.DRAWS_KEY))
    return {**law, "sha256": {role: entry["sha256"] for role, entry in described["data"].items() if entry}}


def fingerprint(described: Mapping[str, Any]) -> str | None:
    """`Recipe.law_hash` of what stands in a run.json now, None for what is none. It differs from `recipe_hash` there after an edit."""
    try:
        law = law_of(described)
        digests = sorted(f"{role}:{digest}" for role, digest in law.pop("sha256").items())
    except (KeyError, TypeError, AttributeError, ValueError):
        return None
    return hashlib.sha256(json.dumps([law, digests], sort_keys=True).encode()).hexdigest()[:16]


def law_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`train.learning_rate: 0.01 -> 0.005` for all that decides the training and differs between two run.json."""
    return list(_differences(law_of(before), law_of(now)))


def model_record(facts: ModelFacts | None) -> dict[str, Any] | None:
    """The base model as run.json keeps it: what its config.json says, and its files. None where it is not on the node yet."""
    if facts is None or not facts.found or facts.config is None:
        return None
    files = {name: file.model_dump(mode="json", exclude={"blob"}) for name, file in facts.files.items()}
    return {"config": {key: value for key, value in facts.config.items() if key not in model_forms.HISTORY}, "files": files}


def model_differences(record: Mapping[str, Any], facts: ModelFacts | None, *, is_folder: bool) -> list[str]:
    """What of the base model is not as `model_record` kept it. Like is compared with like: full digests, or samples of large files.

    Which files there are counts for a folder alone: of a hub model what is missing is downloaded. Nothing for a record that is
    damaged, or of a node where the model is not there (its own check says so).
    """
    now = model_record(facts)
    config, files = record.get("config"), record.get("files")
    if now is None or not isinstance(config, dict) or not isinstance(files, dict):
        return []
    differences = [f"config.json, {line}" for line in _differences(config, now["config"])]
    for name in sorted({*files, *now["files"]}):
        try:
            before = ModelFile.model_validate(files[name]) if name in files else None
        except ValueError:
            continue
        after = ModelFile.model_validate(now["files"][name]) if name in now["files"] else None
        if before is None or after is None:
            if is_folder and record.get("files"):
                differences.append(f"{name} {'was not there' if before is None else 'is gone'}")
        elif before.size_bytes != after.size_bytes:
            differences.append(f"{name}: {before.size_bytes} -> {after.size_bytes} bytes")
        elif (before.sampled, after.sampled) != (None, None) and before.sampled != after.sampled:
            differences.append(f"{name}: other content")
        elif before.sha256 and after.sha256 and before.sha256 != after.sha256:
            differences.append(f"{name}: sha256 {before.sha256[:12]} -> {after.sha256[:12]}")
    return differences


def _differences(before: Any, now: Any, key: str = "") -> Iterator[str]:
    """Rising by key, nested objects by their innermost keys."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in sorted({*before, *now}):
            yield from _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield f"{key}: {_short(before)} -> {_short(now)}"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."
