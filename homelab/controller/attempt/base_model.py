"""What this machine knows of a recipe's base model, without a network: its config.json in the model's folder, or in the hub's cache."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homelab.controller.base.errors import InputError
from homelab.controller.config.recipe import Recipe, TrainRecipe
from homelab.shared.protocol import hub_cache, model_forms
from homelab.shared.recipe import Model

_MOST_BYTES = 16 << 20  # those with a list of all quantised layers have one or two


@dataclass(frozen=True)
class LocalModel:
    """`config`: the model's config.json; None where it is not here. `fault`: why what lies here is no base model."""

    config: dict[str, Any] | None = None
    fault: InputError | None = None


def look(recipe: Recipe) -> LocalModel:
    """The model of a recipe as it lies here. Raises nothing: the nodes may have another one."""
    if not isinstance(recipe, TrainRecipe):
        return LocalModel()
    try:
        folder = _folder(recipe.model)
        if folder is None:
            return LocalModel()
        names = os.listdir(folder)
        if "config.json" in names:
            return LocalModel(_read(folder / "config.json"))
        kind = model_forms.instead(names)
        if kind or recipe.model.is_folder:  # a snapshot of the hub may hold a part of the files
            raise _other(folder, kind)
    except InputError as error:
        return LocalModel(fault=error)
    except (OSError, ValueError):  # no file can have such a name
        pass
    return LocalModel()


def beside(recipe: Recipe) -> list[str]:
    """Names that may have been meant by the one in the recipe: of the model folders beside it, or of what is in the hub's cache."""
    if not isinstance(recipe, TrainRecipe):
        return []
    try:
        if not recipe.model.is_folder:
            return hub_cache.model_names()
        above = Path(recipe.model.name).expanduser().parent
        return [
            str(Path(recipe.model.name).parent / name) for name in sorted(os.listdir(above)) if (above / name / "config.json").is_file()
        ]
    except (OSError, ValueError):
        return []


def _folder(model: Model) -> Path | None:
    """Where the model would lie here."""
    if model.is_folder:
        return Path(model.name).expanduser()
    found = hub_cache.snapshot(model.name, model.revision)
    return Path(found) if found is not None else None


def _read(path: Path) -> dict[str, Any]:
    """A config.json. Raises InputError for one that cannot be read, is too large or holds no JSON object."""
    again = f"copy the model's folder again from where it came; to look at it: head -c 300 {shlex.quote(str(path))}"
    try:
        if not path.is_file():
            raise InputError("config.json of the model is not a file", where=str(path), hint=again)
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise InputError(
                f"config.json of the model has {size} bytes, but no model needs more than {_MOST_BYTES}", where=str(path), hint=again
            )
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(
            f"config.json of the model cannot be read: {error.strerror}", where=str(path), hint=f"ls -l {shlex.quote(str(path))}"
        ) from None
    except (ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else str(error).partition(";")[0]
        raise InputError(f"config.json of the model is not valid JSON: {why}", where=str(path), hint=again) from None
    if not isinstance(content, dict):
        raise InputError("config.json of the model is not a JSON object", where=str(path), hint=again)
    return content


def _other(folder: Path, kind: str) -> InputError:
    """The error for a folder without a config.json, or with something known in a model's place."""
    if not kind:
        return InputError(
            f"{folder} is not a model folder: it has no config.json", where="recipe, [model] name",
            hint=f"copy the model there (`rsync -a MODEL/ {shlex.quote(str(folder))}/`), or give a hub id like org/name",
        )  # fmt: skip
    seen, edit = model_forms.HELD[kind]
    return InputError(
        f"{folder} {seen}", where="recipe, [model] name", hint=f"edit the recipe: {edit or '[model] name = the model that they belong to'}"
    )
