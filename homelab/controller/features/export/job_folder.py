"""The folder of an exported job: the scheduler's file, the code, the data, and the run as it begins. It is written whole or not at all."""

from __future__ import annotations

import importlib.metadata
import io
import os
import re
import shutil
import tarfile
import tempfile
from pathlib import Path

from homelab import __distribution__
from homelab.controller.attempt import start
from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import InputError
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.features.launch import prepare, run_description
from homelab.controller.planning.types import LaunchDocument, Plan
from homelab.controller.remote import ship
from homelab.controller.run import store
from homelab.shared.protocol import layout

_WORKER = re.compile(r"""extra\s*==\s*['"]worker['"]""")


def refuse_taken(folder: Path) -> None:
    """Raises InputError where something is in its place already: a job that runs may be reading it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(
            "there is something already", where=f"--output {folder}", hint="name another folder; an earlier job may still read this one"
        )


def write(
    folder: Path, document: LaunchDocument, recipe: TrainRecipe, recipe_path: Path, plan: Plan, items: list[RecipeInput], at: str
) -> None:
    """Write all of it beside its place, then move it there. Raises InputError where the disk does not take it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise InputError(
            f"the folder cannot be created: {error.strerror}", where=f"--output {folder}", hint=store.disk_error_hint(folder.parent, error)
        ) from error
    try:
        with store.disk_errors_as_hints(folder):
            _fill(partial, recipe, recipe_path, plan, items, at)
            (partial / document.file_name).write_text(document.text, encoding="utf-8")
            partial.chmod(0o755)
            if folder.is_dir():  # empty
                folder.rmdir()
            os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fill(folder: Path, recipe: TrainRecipe, recipe_path: Path, plan: Plan, items: list[RecipeInput], at: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(ship.CODE.archive())) as code:
        code.extractall(folder / layout.CODE / ship.CODE.content_hash(), filter="data")
    for item in items:
        if item.local is not None:
            target = Path(item.node_path(str(folder)))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(item.local, target)
    run_dir = folder / layout.run(plan.run)
    cluster = Cluster(name="job", nodes=())
    prepared = prepare.Prepared(recipe, recipe_path, items, Evidence(cluster, plan.head, plan.master_port), [], [], plan, None)
    described = run_description.describe(prepared, cluster, plan)
    store.write_json(run_dir / layout.RUN_JSON, {**described, "data": start.data_on_node(items, at, described["data"])})
    content = plan.model_dump(mode="json")
    store.write_json(run_dir / layout.plan_json(0), {**content, "nodes": [], "master_address": "", "shared_folder": True})
    shutil.copyfile(recipe_path, folder / recipe_path.name)
    (folder / "requirements.txt").write_text("\n".join(_worker_packages()) + "\n", encoding="utf-8")


def _worker_packages() -> list[str]:
    """What the training needs, as this package says it (the extra `worker` of pyproject.toml)."""
    return [line.split(";")[0].strip() for line in importlib.metadata.requires(__distribution__) or [] if _WORKER.search(line)]
