"""python: the worker's interpreter and packages are there, and the same on all nodes."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from homelab.checks.commands import WORKER_PACKAGES, answered, create_environment, listed, pip_install
from homelab.checks.evidence import Evidence, Finding
from homelab.config.cluster import Node
from homelab.config.recipe import Recipe
from homelab.facts import Facts

ID = "python"
OLDEST = (3, 11)
# Compared between nodes where they are there, though the worker does not import all of them by name.
_ALSO_COMPARED = ("safetensors", "tokenizers")


def judge(evidence: Evidence) -> Iterator[Finding]:
    """The interpreter, then what is missing, then what differs between nodes.

    A version that differs is a fail (the same step could compute something else); another build of the same version
    (2.13.0+cu128 beside 2.13.0+cpu) is a warning.
    """
    needed = packages_needed(evidence.recipe)
    usable = {node.name: facts for node, facts in answered(evidence) if not _is_fallback(node, facts)}
    common = _common_versions(usable, _compared(evidence.recipe, needed))
    for node, facts in answered(evidence):
        if node.name not in usable:
            message = f"there is no Python at {node.python}; {facts.python_executable} answered in its place"
            yield Finding(ID, node.name, "fail", message, create_environment(node, _pinned(needed, common)))
            continue
        found = [
            *_old_python(node, facts, evidence.recipe, _pinned(needed, common)),
            *_missing(node, facts, needed, common),
            *_different(node, facts, usable, common),
        ]
        yield from found or [Finding(ID, node.name, "ok", _summary(facts, needed))]


def packages_needed(recipe: Recipe | None) -> tuple[str, ...]:
    """Packages without which this recipe cannot train; without a recipe, those of every run of the built-in worker."""
    if recipe is None:
        return WORKER_PACKAGES
    if recipe.script is not None:
        return ("torch",)
    needed = list(WORKER_PACKAGES)
    if (recipe.method and recipe.method.kind == "qlora") or (recipe.train and recipe.train.optimizer != "adamw"):
        needed.append("bitsandbytes")
    if recipe.data and any((name or "").startswith("hub:") for name in (recipe.data.train, recipe.data.eval)):
        needed.append("datasets")
    if recipe.method and recipe.method.backend == "unsloth":
        needed.append("unsloth")
    if recipe.tracking.tensorboard:
        needed.append("tensorboard")
    return tuple(needed)


def _compared(recipe: Recipe | None, needed: tuple[str, ...]) -> tuple[str, ...]:
    return needed if recipe is not None and recipe.script is not None else (*needed, *_ALSO_COMPARED)


def _is_fallback(node: Node, facts: Facts) -> bool:
    """True when the agent was started with `python3` because nothing is at the configured path.

    The interpreter's own name tells it from a wrapper script at that path, which ends in another executable too.
    """
    if not facts.python_executable:
        return False
    configured = posixpath.normpath(re.sub(r"^~(?=/|$)", lambda _: facts.home, node.python))
    return (
        posixpath.normpath(facts.python_executable) != configured
        and _version_free(facts.python_executable) == "python3"
    )


def _version_free(executable: str) -> str:
    return re.sub(r"^python3(\.\d+)?$", "python3", posixpath.basename(executable))


def _old_python(node: Node, facts: Facts, recipe: Recipe | None, requirements: list[str]) -> Iterator[Finding]:
    numbers = _numbers(facts.python_version)[:2]
    if numbers >= OLDEST or (recipe is not None and recipe.script is not None):
        return
    wanted = ".".join(map(str, OLDEST))
    message = f"Python {facts.python_version} at {node.python}: the worker needs {wanted} or newer"
    yield Finding(ID, node.name, "fail", message, create_environment(node, requirements, f"python{wanted}"))


def _missing(node: Node, facts: Facts, needed: tuple[str, ...], common: Mapping[str, str]) -> Iterator[Finding]:
    missing = [name for name in needed if not facts.packages.get(name)]
    if missing:
        verb = "are" if len(missing) > 1 else "is"
        hint = pip_install(node, _pinned(missing, common))
        yield Finding(ID, node.name, "fail", f"{listed(missing)} {verb} not installed in {node.python}", hint)


def _common_versions(usable: Mapping[str, Facts], names: tuple[str, ...]) -> dict[str, str]:
    """The version of each package that most nodes have; of equally frequent ones the newest."""
    common = {}
    for name in names:
        versions = [version for facts in usable.values() if (version := facts.packages.get(name))]
        if versions:
            plain = Counter(_plain(version) for version in versions)
            best = max(plain, key=lambda version: (plain[version], _numbers(version), version))
            builds = Counter(version for version in versions if _plain(version) == best)
            common[name] = max(builds, key=lambda version: builds[version])
    return common


def _different(node: Node, facts: Facts, usable: Mapping[str, Facts], common: Mapping[str, str]) -> Iterator[Finding]:
    versions: list[str] = []
    builds: list[str] = []
    for name, wanted in common.items():
        mine = facts.packages.get(name)
        if mine and mine != wanted:
            (versions if _plain(mine) != _plain(wanted) else builds).append(name)
    for names, level in ((versions, "fail"), (builds, "warn")):
        if not names:
            continue
        shown = "; ".join(
            f"{name} is {facts.packages[name]} here, {common[name]} on {_holders(usable, name, common[name])}"
            for name in names
        )
        if level == "fail":
            yield Finding(
                ID, node.name, "fail", shown, pip_install(node, [f"{name}=={_plain(common[name])}" for name in names])
            )
        else:
            yield Finding(
                ID, node.name, "warn", f"another build of the same version: {shown}", _same_build(node, names, common)
            )


def _same_build(node: Node, names: list[str], common: Mapping[str, str]) -> str:
    """Local builds of torch lie in one index each; other packages' do not have a place that is known."""
    build = common["torch"].partition("+")[2] if names == ["torch"] else ""
    if re.fullmatch(r"cu\d+|cpu|rocm[\d.]+|xpu", build):
        return pip_install(
            node, [f"torch=={common['torch']}"], f"--index-url https://download.pytorch.org/whl/{build} "
        )
    return pip_install(node, [f"{name}=={_plain(common[name])}" for name in names], "--force-reinstall --no-deps ")


def _holders(usable: Mapping[str, Facts], name: str, version: str) -> str:
    return listed(other for other, facts in usable.items() if facts.packages.get(name) == version)


def _pinned(names: tuple[str, ...] | list[str], common: Mapping[str, str]) -> list[str]:
    return [f"{name}=={_plain(common[name])}" if name in common else name for name in names]


def _plain(version: str) -> str:
    """Without the local build: 2.13.0 for 2.13.0+cpu (PEP 440)."""
    return version.partition("+")[0]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", _plain(version)))


def _summary(facts: Facts, needed: tuple[str, ...]) -> str:
    shown = [name for name in ("torch", "transformers") if name in needed]
    return ", ".join(f"{name} {facts.packages[name]}" for name in shown)
