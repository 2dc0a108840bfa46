"""The adapter that a training begins with: found beside the recipe, compared with the recipe, and shipped as its data is."""

from __future__ import annotations

import json
import re
from pathlib import Path, PurePath
from typing import Any

from homelab.controller.base.errors import InputError, MissingError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.config.recipe import TrainRecipe

_WEIGHTS, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_MODELS = "models"  # where `homelab fetch RUN` puts RUN
# Adapters of earlier versions name the quantised base that a node had kept (`homelab.worker.model.quantised_cache`).
_KEPT, _ODD = re.compile(r"(?P<model>.+)-nf4-[0-9a-f]{16}-(?:float32|bfloat16|float16)"), re.compile(r"[^a-z0-9._-]+")
_OTHER_KINDS = ("use_dora", "use_rslora", "modules_to_save", "alora_invocation_tokens", "rank_pattern", "alpha_pattern")


def weights_of(recipe: TrainRecipe, named: str, recipe_path: Path) -> Path:
    """The file of the adapter's weights. `named`: a folder relative to the recipe, or the run that was fetched into models/ beside it or in a folder above.

    Raises InputError where it is not there, or was trained with other settings than the recipe's: it would be another adapter.
    """
    where = f"{recipe_path}, key model.adapter: {named}"
    beside = recipe_path.resolve().parent
    folder = folder_of(named, beside)
    if folder is None:
        is_there = (beside / Path(named).expanduser()).is_dir()
        is_run = PurePath(named).name == named
        raise (InputError if is_there else MissingError)(
            f"this folder has no {_WEIGHTS}" if is_there else "there is no adapter of this name", where=where,
            hint=Hint(
                "{} brings the adapter of a run; paths are relative to the recipe",
                homelab("fetch", named, str(beside / _MODELS / named)) if is_run and not is_there else homelab("fetch RUN"),
            ),
        )  # fmt: skip
    try:
        settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"its {_SETTINGS} cannot be read: {error}", where=where, hint="fetch the adapter again, with all its files"
        ) from error
    if not isinstance(settings, dict):
        raise InputError(f"its {_SETTINGS} is no object", where=where, hint="fetch the adapter again, with all its files")
    _refuse_other(settings, recipe, where)
    return folder / _WEIGHTS


def folder_of(named: str, beside: Path) -> Path | None:
    """The folder that `named` means in a recipe that lies in `beside`, by that alone: a queue has another working folder. None where there is none."""
    places = [beside / Path(named).expanduser(), *(root / _MODELS / named for root in (beside, *beside.parents))]
    return next((place for place in places if (place / _WEIGHTS).is_file()), None)


def _refuse_other(settings: dict[str, Any], recipe: TrainRecipe, where: str) -> None:
    odd = [key for key in _OTHER_KINDS if settings.get(key)]
    if settings.get("peft_type") != "LORA" or odd:
        raise InputError(
            f"homelab cannot go on with this kind of adapter ({odd[0] if odd else str(settings.get('peft_type'))[:40]})", where=where,
            hint="take a plain LoRA adapter; or merge it into its base, and name the merged folder in [model] name",
        )  # fmt: skip
    for key, name, own in (("r", "rank", recipe.method.rank), ("lora_alpha", "alpha", recipe.method.alpha)):
        if settings.get(key) != own:
            raise InputError(
                f"the adapter was trained with {name} {settings.get(key)}, and the recipe has {own:g}", where=where,
                hint=f"edit the recipe: [method] {name} = {settings.get(key)}",
            )  # fmt: skip
    base = str(settings.get("base_model_name_or_path") or "")[:200]
    kept, own_name = _KEPT.fullmatch(PurePath(base).name), PurePath(recipe.model.name).name
    its_name = kept["model"] if kept else PurePath(base).name
    if base and its_name != (_ODD.sub("-", own_name.lower()) if kept else own_name):
        raise InputError(
            f"the adapter was trained on {its_name}, and the recipe's model is {own_name}", where=where,
            hint=f"edit the recipe: [model] name = {'the model of that name' if kept else json.dumps(base)}",
        )  # fmt: skip
