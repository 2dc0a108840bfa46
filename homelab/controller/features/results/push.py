"""The sequence of `homelab push`: the right to the repository first, then the files, then one commit."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from homelab.controller.base.errors import InputError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.models import DisplayValue
from homelab.controller.base.say import Say
from homelab.controller.features.results import fetch, receive
from homelab.controller.features.results.hub import Hub, checked_name
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_folder, store
from homelab.controller.run.paths import RunPaths

_TEXT_FILES = (".json", ".md", ".jinja", ".txt")


@dataclass(frozen=True)
class PushRequest:
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


def push(fleet: Fleet, paths: RunPaths, place: Path, wanted: PushRequest, say: Say) -> Pushed:
    """Bring the model to `place` and upload it. Raises HomelabError, InputError; without the right nothing is fetched."""
    model = run_folder.description_of(paths).recipe.model
    local_base = model.name if model is not None and model.is_folder else None
    if local_base and not wanted.base_model:
        raise _unnamed_base(local_base, paths.name, wanted.repository)
    # Adapters of older runs may name a folder of the node though their model is the hub's.
    of_hub = model.name if model is not None and not model.is_folder else None
    base = checked_name(wanted.base_model) if wanted.base_model else of_hub
    hub = Hub(checked_name(wanted.repository))
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
    """The fetched files as they are uploaded, hard links where they can be; this machine's and the nodes' folders are in none of them.

    Their names, below `place`: what a program of one's own has saved may lie in folders. What a person has added to the folder is theirs, and stays.
    """
    names = sorted(store.read_object(place / receive.RECORD).get("files") or {})
    for name in names:
        source, target = place / name, folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if base and source.suffix in _TEXT_FILES:
            text = source.read_text(encoding="utf-8", errors="surrogateescape")
            old = {local_base} if local_base else set()
            if source.name == "adapter_config.json":
                old.add(_base_of(text, source))
            text = with_hub_name(text, old, base)
            target.write_text(in_card(text, base) if source.name == "README.md" else text, encoding="utf-8", errors="surrogateescape")
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
            "this adapter does not name its base", where=str(path), hint="fetch it again: move the folder away, then run the command again"
        ) from None


def _unnamed_base(folder: str, run: str, repository: str) -> InputError:
    """The refusal of a push where nobody could load the base."""
    return InputError(
        f"the recipe names a folder as the base model ({folder}), which nobody on the hub has", where=f"{run}: [model] name",
        hint=Hint("give its name on the hub: {}", homelab("push --base-model ORGANISATION/MODEL", run, repository)),
    )  # fmt: skip


def with_hub_name(text: str, folders: Collection[str], name: str) -> str:
    """The text with the hub's name in place of the folders, also as they stand in JSON strings; the longest first, since one may begin as another."""
    for folder in sorted({folder.rstrip("/") for folder in folders} - {"", name}, key=len, reverse=True):
        for form in (folder, json.dumps(folder)[1:-1]):
            text = text.replace(form, name)
    return text


def in_card(text: str, name: str) -> str:
    """The model card with the hub's name: `homelab.worker.checkpoints.model_card` writes only the last part of a folder's."""
    front = re.match(r"---\n(?:.*\n)*?base_model: (.*)\n", text)
    if front is None:
        return text
    try:
        shown = str(json.loads(front[1]))
    except ValueError:
        shown = front[1].strip()
    text = text[: front.start(1)] + json.dumps(name) + text[front.end(1) :]
    return text.replace(f"\n`{shown}` fine-tuned", f"\n`{name}` fine-tuned", 1)
