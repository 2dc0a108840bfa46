"""What a recipe, or a run that goes on, needs from the controller: data files and scripts that are shipped, named by their content."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from homelab.controller.attempt import begun_adapter, script_imports
from homelab.controller.base.errors import InputError, MissingError
from homelab.controller.config.recipe import Recipe, ScriptRecipe, TrainRecipe
from homelab.controller.planning.speed.dataset_size import DataFile
from homelab.controller.run import run_record
from homelab.controller.run import shipped_files as shipped
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol import layout
from homelab.shared.protocol.digest import file_sha256, sha256_and_rows
from homelab.shared.protocol.file_kind import SUFFIXES
from homelab.shared.recipe import HubData


@dataclass(frozen=True)
class RecipeInput:
    """One file or hub id a recipe needs. `role`: train, eval, adapter, script, or "script:" and the path of a file that is shipped with it.

    kind "shipped": `local` is sent to every node; "on-node": `path` must lie there already; "hub": `path` is the hub id, and `hub` says what of it.
    `rows` (about) and `size_bytes` are known of shipped files alone. A script with others beside it shares a `folder` with them, named
    by the content of all, and `inside` is the place in it.
    """

    role: str
    kind: str
    path: str
    local: Path | None = None
    sha256: str | None = None
    size_bytes: int | None = None
    rows: int | None = None
    folder: str | None = None
    inside: str | None = None
    hub: HubData | None = None

    @property
    def name(self) -> str:
        """The file's name, with the folders that it is shipped in."""
        assert self.local is not None
        return self.inside or self.local.name

    @property
    def place(self) -> dict[str, str]:
        """What a node has to be told of a place in a shared folder."""
        return {"folder": self.folder, "inside": self.inside} if self.folder and self.inside else {}

    @property
    def identity(self) -> str | None:
        """What tells the content from any other, as far as it is known here: sha256 of a file, or what is loaded from the hub."""
        return self.hub.identity if self.hub is not None else self.sha256

    def node_path(self, workdir: str) -> str:
        """Where the file is on a node."""
        if self.kind == "shipped":
            assert self.sha256 and self.local
            return f"{workdir}/{layout.data_file({'sha256': self.sha256, 'name': self.name, **self.place})}"
        return self.path


def of_recipe(recipe: Recipe, recipe_path: Path, *, folder: Path | None = None) -> list[RecipeInput]:
    """Everything the recipe names. Data is relative to `folder`, by default that of the recipe. Raises InputError when a file that is to be shipped
    is not there or is empty."""
    items: list[RecipeInput] = []
    if isinstance(recipe, TrainRecipe):
        for role, name in (("train", recipe.data.train), ("eval", recipe.data.eval)):
            if (hub := recipe.data.hub(role)) is not None:
                items.append(RecipeInput(role, "hub", hub.path, hub=hub))
            elif name:
                items.append(_material(role, name, recipe_path, f"data.{role}", folder))
        if recipe.model.adapter is not None:
            weights = begun_adapter.weights_of(recipe, recipe.model.adapter, recipe_path)
            items.append(RecipeInput("adapter", "shipped", str(weights), weights, file_sha256(weights), weights.stat().st_size))
    if isinstance(recipe, ScriptRecipe):
        items += _program(_material("script", recipe.script.path, recipe_path, "script.path"), recipe.script.files, recipe_path)
    return items


def _program(script: RecipeInput, named: Sequence[str], recipe_path: Path) -> list[RecipeInput]:
    """The script, and what is shipped beside it: together they are one program."""
    assert script.local is not None
    items = [replace(script, inside=script.local.name)]
    for inside, local in script_imports.beside(script.local, named, recipe_path).items():
        try:
            items.append(
                RecipeInput(f"script:{inside}", "shipped", str(local), local, file_sha256(local), local.stat().st_size, inside=inside)
            )
        except OSError as error:
            raise InputError(
                f"a file that homelab sends with the script cannot be read: {error.strerror}", where=f"{recipe_path}, [script]: {local}",
                hint=f"ls -l {shlex.quote(str(local))}",
            ) from error  # fmt: skip
    if len(items) == 1:
        return [script]
    folder = hashlib.sha256(json.dumps(sorted((item.inside, item.sha256) for item in items)).encode()).hexdigest()
    return [replace(item, folder=folder) for item in items]


def _material(role: str, name: str, recipe_path: Path, key: str, folder: Path | None = None) -> RecipeInput:
    if name.startswith(("/", "~")) and role != "script":
        return RecipeInput(role, "on-node", name)
    link = (folder or recipe_path.resolve().parent) / Path(name).expanduser()
    local = link.resolve()
    if role != "script" and link.suffix in SUFFIXES:  # caches call the file behind a link by its digest
        local = link.parent.resolve() / link.name
    if not local.is_file():
        raise (InputError if local.exists() else MissingError)(
            "this is not a file" if local.exists() else "this file does not exist",
            where=f"{recipe_path}, key {key}: {local}",
            hint=_of_folder(name, local, key)
            or "paths are relative to the recipe; a path that starts with / or ~/ means a file that is on every node",
        )
    try:
        if local.stat().st_size == 0:
            raise InputError("this file is empty", where=f"{recipe_path}, key {key}: {local}", hint="put at least one sample into it")
        digest, rows = sha256_and_rows(local)
        return RecipeInput(role, "shipped", str(local), local, digest, local.stat().st_size, rows)
    except PermissionError as error:
        raise InputError(
            "this file cannot be read", where=f"{recipe_path}, key {key}: {local}", hint=f"ls -l {shlex.quote(str(local))}"
        ) from error


def _of_folder(name: str, local: Path, key: str) -> str | None:
    """The edit that names a file of a folder, where there is one that could be meant."""
    suffixes = (".py",) if key == "script.path" else SUFFIXES
    try:
        files = sorted(file.name for file in local.iterdir() if file.suffix in suffixes and file.is_file())
    except OSError:
        return None
    section, _, word = key.partition(".")
    return f"this is a folder; edit the recipe: [{section}] {word} = {json.dumps(str(Path(name, files[0])))}" if files else None


def files_of(items: Iterable[RecipeInput]) -> dict[str, DataFile]:
    """What the plan may know of data that does not lie on the nodes, by role."""
    return {
        item.role: DataFile(item.size_bytes, item.rows, item.identity, item.hub)
        for item in items
        if item.kind != "on-node" and item.role in ("train", "eval")
    }


def of_run(paths: RunPaths, run_json: Mapping[str, Any]) -> list[RecipeInput]:
    """What the run needs; a shipped file from where it was at the launch, or the copy in the run's folder."""
    return [_input(paths, role, entry) for role, entry in run_json["data"].items() if entry is not None]


def _input(paths: RunPaths, role: str, entry: Mapping[str, Any]) -> RecipeInput:
    local = None
    if entry.get("sent") == "shipped":
        own = [Path(original)] if (original := shipped.original_of(entry)) else []
        inside = run_record.inside(entry.get("inside") or entry["name"])
        candidates = [*own, paths.code / entry["sha256"] / inside, paths.code / inside]
        # The person may have edited the file since: only the content that the run began with counts.
        local = next((path for path in candidates if path.is_file() and file_sha256(path) == entry["sha256"]), candidates[-1])
    hub = None
    if entry["kind"] == "hub":
        hub = HubData(entry["path"], entry.get("config"), entry.get("split", "train"), entry.get("revision"))
    return RecipeInput(
        role, entry.get("sent", "on-node"), entry["path"], local, entry["sha256"] if local else None,
        folder=entry.get("folder"), inside=entry.get("inside"), hub=hub,
    )  # fmt: skip
