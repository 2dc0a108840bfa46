"""Data sets of the hub that a recipe trains on, on this machine: as the library `datasets` has prepared them, which it takes without a network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from homelab.controller.base import package
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.sanitize import plain
from homelab.controller.base.say import Say
from homelab.controller.config.recipe import Recipe
from homelab.controller.features.setup.model_source import ModelSource, part_of
from homelab.controller.run import hub_token
from homelab.shared.recipe import HubData

_LAST = "dataset_info.json"  # without it the library takes the folder for none


def of_recipe(recipe: Recipe, say: Say) -> list[ModelSource]:
    """The folders of the data that nodes would else fetch for themselves; several splits of one configuration are one. Raises HomelabError."""
    named = [recipe.data.hub(role) for role in ("train", "eval")] if recipe.data else []
    sources = {}
    for data in named:
        if data is not None:
            source = _prepared(data, say)
            sources[source.place, source.commit] = source
    return list(sources.values())


def _prepared(data: HubData, say: Say) -> ModelSource:
    """The folder ORG___NAME/CONFIGURATION/VERSION/COMMIT below the library's cache (datasets 5.2, builder.py), and where it lies there."""
    say(f"fetching hub:{data.path}, unless it is here already")
    question = {"path": data.path, "config": data.config, "revision": data.revision, "token": hub_token.value()}
    words = [sys.executable, "-P", "-m", "homelab.worker.tools.prepared_data"]
    done = subprocess.run(words, input=json.dumps(question), capture_output=True, text=True, check=False)
    if "No module named 'datasets'" in done.stderr:
        raise HomelabError(
            f"the library that fetches hub:{data.path} is not installed here", where="this machine", hint=package.install("datasets")
        )
    if done.returncode != 0:
        why = plain((done.stderr.strip().splitlines() or ["it says nothing"])[-1])[:300]
        raise HomelabError(
            f"hub:{data.path} cannot be fetched: {why}", where="this machine",
            hint=Hint("check its name and configuration, and the way to the hub. Private data needs a token: export HF_TOKEN=...; then: {}", homelab("setup --recipe FILE")),
        )  # fmt: skip
    answer = json.loads(done.stdout.splitlines()[-1])
    folder = Path(answer["folder"])
    files = sorted((path for path in folder.iterdir() if path.is_file()), key=lambda path: (path.name == _LAST, path.name))
    place = folder.parent.relative_to(Path(answer["cache"])).as_posix()
    return ModelSource(f"hub:{data.path}", folder.name, {part_of(path): path for path in files}, f"data:{place}")
