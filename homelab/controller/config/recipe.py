"""A whole recipe: one that the built-in worker trains, or one that brings its own program. Nothing in `[train]` names a node; which node computes
what belongs to the plan. The sections are those of `homelab.shared.recipe`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import model_validator

from homelab.controller.base.models import ConfigModel
from homelab.controller.config.environment import RecipeEnvironment, refusal_of_the_law
from homelab.shared.law import model_chance
from homelab.shared.protocol.row_forms import LABELLED, PREFERENCE
from homelab.shared.recipe import Checkpoint, Data, Method, Model, Objective, Parallel, Recovery, Script, Tracking, Train
from homelab.shared.recipe.neutral import NEUTRAL

_SECTIONS = ("model", "data", "method", "train", "script")  # the others may change on a recovery
_BY_EVALUATION = ("keep_best", "early_stopping")  # of [train]


class RunSections(ConfigModel):
    """The sections that every recipe has. They say who computes what, and how often to save: they may change on a recovery."""

    parallel: Parallel = Parallel()
    checkpoint: Checkpoint = Checkpoint()
    recovery: Recovery = Recovery()
    tracking: Tracking = Tracking()
    environment: RecipeEnvironment = {}

    def law_hash(self, data_digests: tuple[str, ...]) -> str:
        """Fingerprint (sha256, 16 hex digits) of what decides the training: model, data, method, train or script, and the data's digests.

        The moment of the launch is no part of it, so that two launches on different days count as one training. Only a chat template that writes the date
        makes other rows then: a law: line names the date, and a run goes on with the rows that it began with, by their digest, whatever the moment.
        """
        text = json.dumps([deciding(self.model_dump(mode="json"), model_chance.DRAWS), list(data_digests)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class TrainRecipe(RunSections):
    """A recipe that the built-in worker trains. `script` is null in run.json."""

    model: Model
    data: Data
    method: Method
    train: Train
    objective: Objective | None = None
    script: None = None


class ScriptRecipe(RunSections):
    """A recipe that brings its own program. The sections of the built-in worker are null in run.json."""

    model: None = None
    data: None = None
    method: None = None
    train: None = None
    objective: None = None
    script: Script


Recipe = TrainRecipe | ScriptRecipe


class RecipeFile(RunSections):
    """All that a recipe file may hold. Its validation reports every fault at once, with the key that it is at."""

    model: Model | None = None
    data: Data | None = None
    method: Method | None = None
    train: Train | None = None
    objective: Objective | None = None
    script: Script | None = None

    @model_validator(mode="after")
    def _worker_or_script(self) -> RecipeFile:
        built_in = {"model": self.model, "data": self.data, "method": self.method, "train": self.train}
        if self.script is None:
            missing = [name for name, section in built_in.items() if section is None]
            if missing:
                raise ValueError("missing " + ", ".join(f"[{name}]" for name in missing) + " (or give a [script])")
        elif any(section is not None for section in (*built_in.values(), self.objective)):
            raise ValueError("a [script] has its own training: remove [model], [data], [method], [train] and [objective]")
        return self

    @model_validator(mode="after")
    def _pairs_have_an_objective(self) -> RecipeFile:
        if self.data is None or self.method is None:
            return self
        if self.objective is None:
            kind = self.data.columns.kind if self.data.columns is not None and self.data.format == "auto" else self.data.format
            if kind == PREFERENCE:
                raise ValueError(
                    'rows with two answers need an objective: add [objective] with kind = "dpo"; or name the answer to learn with [data] columns'
                )
            if kind == LABELLED:
                raise ValueError('labelled answers need an objective: add [objective] with kind = "kto"; or leave `label` out')
            return self
        form = self.objective.format
        if self.data.format not in ("auto", form):
            raise ValueError(
                f'kind = "{self.objective.kind}" learns from {self.objective.rows}: leave [data] format out, or set it to "{form}" (it is "{self.data.format}")'
            )
        if self.data.columns is not None and not self.data.columns.fits(form):
            named = (
                "`prompt` and `completion`, or `messages`, and `label`"
                if form == LABELLED
                else "`chosen` and `rejected`, and `prompt` where it stands alone"
            )
            raise ValueError(f'kind = "{self.objective.kind}" learns from {self.objective.rows}: [data] columns names {named}')
        for key, used, fix in (
            ("[data] packing", self.data.packing, "answers stay apart: leave it out"),
            ("[data] completion_only = false", not self.data.completion_only, "the answers are compared: leave it out"),
            ('[method] backend = "unsloth"', self.method.backend == "unsloth", "Unsloth computes its own loss: leave it out"),
        ):
            if used:
                raise ValueError(f"{key} does not work with [objective]: {fix}")
        return self

    @model_validator(mode="after")
    def _an_adapter_goes_on(self) -> RecipeFile:
        if self.model is None or self.method is None or self.model.adapter is None:
            return self
        if self.method.kind == "full":
            raise ValueError(
                '[model] adapter is for kind = "lora" or "qlora": to train all weights, merge it and name the merged folder in `name`'
            )
        if self.method.backend == "unsloth":
            raise ValueError("[model] adapter works with transformers alone: leave [method] backend out")
        return self

    @model_validator(mode="after")
    def _what_is_chosen_is_measured(self) -> RecipeFile:
        if self.train is None or self.data is None or not self.train.chooses_by_evaluation:
            return self
        if self.data.eval is None and not self.data.eval_fraction:
            raise ValueError("[train] keep_best and early_stopping need the loss over held-out rows: set [data] eval or eval_fraction")
        if not self.tracking.eval_every_steps:
            raise ValueError("[train] keep_best and early_stopping need evaluations: set [tracking] eval_every_steps")
        return self

    @model_validator(mode="after")
    def _the_worker_computes_what_is_written(self) -> RecipeFile:
        for name in self.environment if self.script is None else ():
            why = refusal_of_the_law(name)
            if why is not None:
                raise ValueError(f"[environment] {name} cannot be set here: {why}")
        return self


def parse_recipe(content: object, *, strict: bool | None = None) -> Recipe:
    """The recipe of a file's content. Raises pydantic's ValidationError, of `RecipeFile`, with every fault."""
    file = RecipeFile.model_validate(content, strict=strict)
    sections = {name: getattr(file, name) for name in RecipeFile.model_fields}
    if file.objective is not None and file.data is not None:
        sections["data"] = replace(file.data, format=file.objective.format)  # so that all who read rows know what they look for
    return TrainRecipe(**sections) if file.script is None else ScriptRecipe(**sections)


def deciding(recipe: Mapping[str, Any], draws: object = None) -> Mapping[str, Any]:
    """The part of the recipe that its fingerprint is made of. `draws`: how a pass draws random numbers (`model_chance.DRAWS`), which counts where the
    recipe has any; None in the run.json of an older version. Raises KeyError, TypeError or AttributeError for what is no recipe."""
    law: dict[str, Any] = {name: recipe.get(name) for name in _SECTIONS}
    if recipe.get("objective"):
        law["objective"] = recipe["objective"]
    for name, neutral in NEUTRAL.items():
        if law.get(name):
            law[name] = {key: value for key, value in law[name].items() if key not in neutral or value != neutral[key]}
    if law["method"]:
        has_dropout = law["method"]["kind"] != "full" and law["method"].get("dropout")
        if draws is not None and (has_dropout or law["method"].get("model_dropout")):
            law[model_chance.DRAWS_KEY] = draws
        law["method"].pop("backend", None)  # the library (transformers or Unsloth) is no part of the law
    if law["train"]:
        if any(law["train"].get(key) for key in _BY_EVALUATION):
            law["eval_every_steps"] = recipe["tracking"].get("eval_every_steps")
        else:
            law["train"] = {key: value for key, value in law["train"].items() if key not in _BY_EVALUATION}
    if law["script"] and recipe.get("environment"):
        law["environment"] = recipe["environment"]  # a program may read any of it
    return law
