"""What a recipe brings along from the controller: data files and scripts that are shipped, named by their content."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from homelab.config.recipe import Recipe
from homelab.errors import InputError
from homelab.node.files import digest_and_rows
from homelab.planning.rows import DataFile

_HUB = "hub:"


@dataclass(frozen=True)
class Material:
    """One file or hub id a recipe needs. `role`: train, eval or script.

    kind "shipped": `local` is sent to every node; "on-node": `path` must lie there already; "hub": `path` is the hub id.
    `rows` (about) and `size_bytes` are known of shipped files alone.
    """

    role: str
    kind: str
    path: str
    local: Path | None = None
    sha256: str | None = None
    size_bytes: int | None = None
    rows: int | None = None

    def node_path(self, workdir: str) -> str:
        """Where the file is on a node (twin of `homelab.node.transfer.data_path`)."""
        if self.kind == "shipped":
            assert self.sha256 and self.local
            return f"{workdir}/data/{self.sha256[:16]}/{self.local.name}"
        return self.path


def of_recipe(recipe: Recipe, recipe_path: Path) -> list[Material]:
    """Everything the recipe names. Raises InputError when a file that is to be shipped is not there or is empty."""
    wanted: list[tuple[str, str, str]] = []
    if recipe.data:
        wanted.append(("train", recipe.data.train, "data.train"))
        if recipe.data.eval:
            wanted.append(("eval", recipe.data.eval, "data.eval"))
    if recipe.script:
        wanted.append(("script", recipe.script.path, "script.path"))
    return [_material(role, name, recipe_path, key) for role, name, key in wanted]


def _material(role: str, name: str, recipe_path: Path, key: str) -> Material:
    if name.startswith(_HUB):
        return Material(role, "hub", name.removeprefix(_HUB))
    if name.startswith(("/", "~")) and role != "script":
        return Material(role, "on-node", name)
    local = (recipe_path.resolve().parent / Path(name).expanduser()).resolve()
    if not local.is_file():
        raise InputError(
            "this file is not there" if not local.exists() else "this is not a file",
            where=f"{recipe_path}, key {key}: {local}",
            hint="paths are relative to the recipe; a path that starts with / or ~/ means a file that is on every node",
        )
    try:
        if local.stat().st_size == 0:
            raise InputError(
                "this file is empty", where=f"{recipe_path}, key {key}: {local}", hint="put at least one sample into it"
            )
        digest, rows = digest_and_rows(local)
        return Material(role, "shipped", str(local), local, digest, local.stat().st_size, rows)
    except PermissionError as error:
        raise InputError(
            "this file cannot be read", where=f"{recipe_path}, key {key}: {local}", hint=f"ls -l {shlex.quote(str(local))}"
        ) from error


def files_of(items: Iterable[Material]) -> dict[str, DataFile]:
    """What the plan may know of data that does not lie on the nodes, by role. A hub id stands for its content."""
    return {
        item.role: DataFile(item.size_bytes, item.rows, item.sha256 or item.path)
        for item in items
        if item.kind != "on-node" and item.role != "script"
    }


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
