"""The sequence of `homelab push`: the right to the repository first, then the files, then one commit."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from homelab.controller.base.errors import InputError
from homelab.controller.base.models import DisplayValue
from homelab.controller.base.say import Say
from homelab.controller.features.results import base_name, fetch, receive, repository_name
from homelab.controller.features.results.hub import Hub
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_folder
from homelab.controller.run.paths import RunPaths


@dataclass(frozen=True)
class Wanted:
    """`base_model`: the hub's name of the base, where the recipe names a folder. `is_merged`: what `homelab merge` has made."""

    repository: str
    base_model: str | None = None
    is_merged: bool = False
    is_public: bool = False


class Pushed(DisplayValue):
    """What a push has done."""

    run: str
    repository: str
    address: str
    is_public: bool
    files: tuple[str, ...]
    folder: str


def push(fleet: Fleet, paths: RunPaths, place: Path, wanted: Wanted, say: Say) -> Pushed:
    """Bring the model to `place` and upload it. Raises HomelabError, InputError; without the right nothing is fetched."""
    model = run_folder.description_of(paths).recipe.model
    local_base = model.name if model is not None and model.is_folder else None
    if local_base and not wanted.base_model:
        raise base_name.unnamed(local_base, paths.name, wanted.repository)
    base = repository_name.checked(wanted.base_model) if wanted.base_model else None
    hub = Hub(repository_name.checked(wanted.repository))
    say(f"asking the hub for {wanted.repository}")
    address = hub.create(is_public=wanted.is_public)
    done = (fetch.merged if wanted.is_merged else fetch.model)(fleet, paths, place, say)
    # Not in the folder that was fetched: that one stays as the node has it.
    with tempfile.TemporaryDirectory(prefix=".push-", dir=place.parent) as temporary:
        folder = Path(temporary) / "model"
        names = _copy(place, folder, local_base, base)
        say(f"uploading {len(names)} files to {wanted.repository}")
        hub.upload(folder, f"{paths.name}, trained with homelab")
    return Pushed(
        run=paths.name, repository=wanted.repository, address=address, is_public=wanted.is_public, files=tuple(names), folder=done.folder
    )


def _copy(place: Path, folder: Path, local_base: str | None, base: str | None) -> list[str]:
    """The fetched files as they are uploaded, hard links where they can be; this machine's and the nodes' folders are in none of them."""
    folder.mkdir()
    names = sorted(
        path.name for path in place.iterdir() if path.is_file() and path.name != receive.RECORD and not path.name.startswith(".")
    )
    for name in names:
        source, target = place / name, folder / name
        if base and source.suffix in base_name.TEXT:
            text = source.read_text(encoding="utf-8", errors="surrogateescape")
            old = {local_base} if local_base else set()
            if name == "adapter_config.json":
                old.add(_base_of(text, source))
            text = base_name.replaced(text, old, base)
            target.write_text(base_name.in_card(text, base) if name == "README.md" else text, encoding="utf-8", errors="surrogateescape")
            continue
        try:
            os.link(source, target)
        except OSError:  # another file system
            shutil.copyfile(source, target)
    return names


def _base_of(text: str, path: Path) -> str:
    try:
        return str(json.loads(text)["base_model_name_or_path"])
    except (ValueError, KeyError, TypeError):
        raise InputError(
            "this adapter does not name its base", where=str(path), hint="fetch it anew: move the folder away, then the same once more"
        ) from None
