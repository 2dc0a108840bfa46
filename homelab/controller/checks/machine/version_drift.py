"""What is not the same on all nodes: versions of packages, drivers and files, as rows of a table with the cells that differ."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from homelab.controller.checks.evidence import Evidence, answered
from homelab.controller.config.interpreter import uses_unsloth
from homelab.controller.config.recipe import Recipe
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import WORKER_PACKAGES
from homelab.controller.facts.training import ModelFacts

# Compared between nodes where they are there, though the worker does not import all of them by name.
ALSO_COMPARED = ("safetensors", "tokenizers")
# Compared without a recipe: the later recipe may need them.
PERHAPS_NEEDED = ("trl", "bitsandbytes", "unsloth", "datasets")
NOT_THERE = "not there"

Row = tuple[str, dict[str, str]]


def table(evidence: Evidence) -> list[Row]:
    """(what, {node: value}) of everything that is not the same on the nodes that answered; nothing for nodes that do not know it."""
    rows: list[Row] = [
        ("python", {name: facts.python.version for name, facts in usable(evidence).items() if facts.python.version}),
        *((name, _package(evidence, name)) for name in _all_packages(evidence)),
        ("torch's CUDA", _field(evidence, lambda facts: facts.python.torch_cuda)),
        ("NCCL", _field(evidence, lambda facts: facts.python.nccl)),
        ("NVIDIA driver", _field(evidence, lambda facts: facts.gpu.driver_version)),
        ("driver's CUDA", _field(evidence, lambda facts: facts.gpu.driver_cuda)),
        ("homelab's code", _field(evidence, lambda facts: facts.python.code_hash)),
        ("model", _model(evidence)),
        *((f"data, {role}", _data(evidence, role)) for role in ("train", "eval")),
    ]
    return [(row, cells) for row, cells in rows if len({_compared_as(row, cell) for cell in cells.values()}) > 1]


def packages_needed(recipe: Recipe | None) -> tuple[str, ...]:
    """Packages without which this recipe cannot train; without a recipe, those of every run of the built-in worker."""
    if recipe is None:
        return WORKER_PACKAGES
    if recipe.script is not None:
        return ("torch",)
    needed = list(WORKER_PACKAGES)
    if (recipe.method and recipe.method.quantisation) or (recipe.train and recipe.train.optimizer != "adamw"):
        needed.append("bitsandbytes")
    if recipe.data and any((name or "").startswith("hub:") for name in (recipe.data.train, recipe.data.eval)):
        needed.append("datasets")
    if uses_unsloth(recipe):
        needed += [name for name in ("unsloth", "unsloth-zoo", "trl", "datasets") if name not in needed]
    if recipe.tracking.tensorboard:
        needed.append("tensorboard")
    return tuple(needed)


def packages_compared(recipe: Recipe | None) -> tuple[str, ...]:
    """Packages whose versions must not differ between nodes."""
    needed = packages_needed(recipe)
    return needed if recipe is not None and recipe.script is not None else (*needed, *ALSO_COMPARED)


def usable(evidence: Evidence) -> dict[str, Facts]:
    """The nodes whose configured Python answered: the packages of another one say nothing."""
    return {node.name: facts for node, facts in answered(evidence) if not facts.python.is_another}


def common_versions(facts_of: Mapping[str, Facts], names: tuple[str, ...]) -> dict[str, str]:
    """The version of each package that most nodes have; of equally frequent ones the newest."""
    common = {}
    for name in names:
        versions = [version for facts in facts_of.values() if (version := facts.python.packages.get(name))]
        if versions:
            counts = Counter(plain(version) for version in versions)
            best = max(counts, key=lambda version: (counts[version], numbers(version), version))
            common[name] = common_build(version for version in versions if plain(version) == best)
    return common


def common_build(versions: Iterator[str]) -> str:
    """The most frequent of several builds of a version."""
    builds = Counter(versions)
    return max(builds, key=lambda version: builds[version])


def plain(version: str) -> str:
    """Without the local build: 2.13.0 for 2.13.0+cpu (PEP 440)."""
    return version.partition("+")[0]


def numbers(version: str) -> tuple[int, ...]:
    """(2, 13, 0) for 2.13.0+cpu."""
    return tuple(int(number) for number in re.findall(r"\d{1,9}", plain(version)))


def _compared_as(row: str, value: str) -> str:
    """Patches of the same Python are the same."""
    return ".".join(map(str, numbers(value)[:2])) if row == "python" else value


def _all_packages(evidence: Evidence) -> list[str]:
    names = {name for facts in evidence.facts.values() for name in facts.python.packages}
    compared = (*packages_compared(evidence.recipe), *PERHAPS_NEEDED)
    return sorted(names & set(compared), key=lambda name: (name not in WORKER_PACKAGES, compared.index(name)))


def _package(evidence: Evidence, name: str) -> dict[str, str]:
    return {node: facts.python.packages[name] or NOT_THERE for node, facts in usable(evidence).items() if name in facts.python.packages}


def _field(evidence: Evidence, field: Callable[[Facts], str | None]) -> dict[str, str]:
    return {node.name: value for node, facts in answered(evidence) if (value := field(facts))}


def _model(evidence: Evidence) -> dict[str, str]:
    """By digest where every node that has it made one, else by size: a digest is no size."""
    cells = {node.name: NOT_THERE for node, facts in answered(evidence) if facts.model is not None and not facts.model.found}
    models = {node.name: facts.model for node, facts in answered(evidence) if facts.model is not None and facts.model.found}
    if models and all(model.files for model in models.values()):
        return cells | _model_digests(models, is_folder=bool(evidence.recipe and evidence.recipe.model and evidence.recipe.model.is_folder))
    return cells | {name: f"{model.size_bytes} bytes" for name, model in models.items() if model.size_bytes is not None}


def _model_digests(models: Mapping[str, ModelFacts], *, is_folder: bool) -> dict[str, str]:
    """12 hex digits of what is known of the files on every node: full digests, or samples of large files.

    Which files there are counts for a folder alone: of a hub model what is missing is downloaded.
    """
    names = {name for model in models.values() for name in model.files}
    if not is_folder:
        names = {name for name in names if all(name in model.files for model in models.values())}
    whole = {name for name in names if all(name in model.files and model.files[name].sha256 for model in models.values())}
    cells = {}
    for node, model in models.items():
        values: list[tuple[str, object]] = []
        for name in sorted(names & model.files.keys()):
            file = model.files[name]
            values.append((name, file.sha256 if name in whole else (file.size_bytes, file.sampled)))
        cells[node] = hashlib.sha256(repr(values).encode()).hexdigest()[:12]
    return cells


def _data(evidence: Evidence, role: str) -> dict[str, str]:
    cells = {}
    for node, facts in answered(evidence):
        file = facts.data.get(role)
        if file is not None and (file.sha256 or not file.found):
            cells[node.name] = (file.sha256 or "")[:12] if file.found else NOT_THERE
    return cells
