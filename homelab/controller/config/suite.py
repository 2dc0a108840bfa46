"""A benchmark suite: one recipe, trained by several strategies on several sets of nodes, and in variations."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.base.models import ConfigModel
from homelab.controller.config import file_faults, load
from homelab.controller.config.cluster import Cluster, NetworkProfileName, NetworkSettings
from homelab.controller.config.recipe import RecipeFile, parse_recipe
from homelab.shared.recipe import parallel

SAME = {"fsdp": "zero3"}  # two names of one strategy
LEAST_COUNTED = 3  # steps of a run


NodeSet = Literal["each", "all"] | int | tuple[str, ...]


Content = dict[str, Any]
"""A recipe as TOML has it."""


class Variation(ConfigModel):
    """Keys of the recipe that are another value in these cells: `set = { train.seq_len = 512 }`; `network`: another [network] profile."""

    name: str = Field(min_length=1, max_length=40)
    set: dict[str, Any] = {}
    network: Literal["auto", NetworkProfileName] | None = None


class Suite(ConfigModel):
    """What is run. `nodes`: "each" node alone, the first so many of cluster.toml, "all", or a list of names.

    Each run does `steps` optimizer steps, of which the first `warmup` are not counted; every cell runs `repeats` times, in turn with the others.
    """

    recipe: str = Field(min_length=1)
    strategies: tuple[str, ...] = ("ddp", "zero2", "zero3")
    nodes: tuple[NodeSet, ...] = ("each", "all")
    steps: int = Field(default=12, le=100_000)
    warmup: int = Field(default=3, ge=1)
    repeats: int = Field(default=3, ge=1, le=100)
    minutes_per_run: float = Field(default=60.0, gt=0)
    variations: tuple[Variation, ...] = ()

    @field_validator("strategies")
    @classmethod
    def _known_and_different(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        known = [name for name in parallel.STRATEGY_NAMES if name != "auto"]
        for name in names:
            if name not in known:
                raise ValueError(f"{', '.join(known)}.{did_you_mean(name, known)}")
        twice = _twice([SAME.get(name, name) for name in names])
        if twice:
            raise ValueError(
                f"name each strategy once; {twice} is there twice" + (" (fsdp is another name of zero3)" if twice == "zero3" else "")
            )
        if not names:
            raise ValueError("one strategy or more")
        return names

    @field_validator("nodes")
    @classmethod
    def _sets_differ(cls, sets: tuple[NodeSet, ...]) -> tuple[NodeSet, ...]:
        if not sets:
            raise ValueError('at least one set of nodes, like ["each", 2, "all"]')
        if any((isinstance(one, int) and one < 1) or one == () for one in sets):
            raise ValueError("a set needs at least one node")
        twice = _twice([str(sorted(one)) if isinstance(one, tuple) else str(one) for one in sets])
        if twice:
            raise ValueError(f"name each set of nodes once; {twice} is there twice")
        return sets

    @model_validator(mode="after")
    def _something_is_counted(self) -> Suite:
        if self.steps < self.warmup + LEAST_COUNTED:
            raise ValueError(f"steps = {self.steps} leaves fewer than {LEAST_COUNTED} steps after warmup = {self.warmup}")
        twice = _twice([variation.name for variation in self.variations])
        if twice:
            raise ValueError(f'two variations are called "{twice}"')
        return self

    def cluster_of(self, variation: str, cluster: Cluster) -> Cluster:
        """The cluster that the cells of a variation run on: with its network profile, where it has one."""
        profile = next((one.network for one in self.variations if one.name == variation), None)
        return cluster if profile is None else cluster.model_copy(update={"wire": NetworkSettings(profile=profile)})


def load_suite(path: Path) -> tuple[Suite, Mapping[str, Content]]:
    """The suite, and the content of the recipe of each variation ("" where there are none). Raises InputError with all faults of a file.

    In it the run is as long as the suite says, and neither evaluates nor saves in between: that is not what is measured.
    """
    text, data = load.read(path, "suite", "a suite needs a recipe, strategies and nodes: see recipes/bench/")
    try:
        suite = Suite.model_validate(data)
    except ValidationError as error:
        file_faults.raise_faults(path, text, file_faults.faults_of(error, Suite))
        raise AssertionError("a validation error without a fault") from error
    recipe_path = path.parent / suite.recipe
    recipe_text, recipe = load.read(recipe_path, "recipe", "`recipe` is relative to the suite's file")
    contents = {}
    for variation in suite.variations or (Variation(name="base", set={}),):
        content = _cell_recipe(recipe, variation.set, suite.steps)
        try:
            parsed = parse_recipe(content)
        except ValidationError as error:
            faults = file_faults.faults_of(error, RecipeFile)
            if not variation.set:
                file_faults.raise_faults(recipe_path, recipe_text, faults)
            said = "; ".join(f"{'.'.join(map(str, place))}: {message}" for place, message in faults)
            raise InputError(
                f'variation "{variation.name}" makes an impossible recipe: {said}', where=str(path), hint="change its `set`, or the recipe"
            ) from error
        if parsed.model is None:
            raise InputError(
                "a [script] counts no tokens, so there is nothing to compare",
                where=str(recipe_path),
                hint="name a recipe with [model] and [data]",
            )
        contents[variation.name if suite.variations else ""] = content
    return suite, contents


def _cell_recipe(recipe: dict[str, Any], changes: dict[str, Any], steps: int) -> dict[str, Any]:
    content = _merged(copy.deepcopy(recipe), changes)
    if not isinstance(content.get("train"), dict):
        return content
    content["train"] = {key: value for key, value in content["train"].items() if key not in ("epochs", "keep_best", "early_stopping")} | {
        "steps": steps
    }
    if isinstance(content.get("data"), dict):
        content["data"] = {key: value for key, value in content["data"].items() if not key.startswith("eval")}
    content["tracking"] = {"tensorboard": False}
    content["checkpoint"] = {"every_steps": steps}
    return content


def _merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merged(base[key], value)
        else:
            base[key] = value
    return base


def _twice(names: Sequence[str]) -> str:
    return next((name for place, name in enumerate(names) if name in names[:place]), "")
