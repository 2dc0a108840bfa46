"""python: the worker's interpreter and packages are installed and the same on all nodes, and the shipped code is complete."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from homelab.controller.base import torch_builds
from homelab.controller.base.hint import Command, Hint
from homelab.controller.base.units import listed
from homelab.controller.checks.check import Problem, check, subject
from homelab.controller.checks.evidence import Evidence, Level, answered
from homelab.controller.checks.machine import version_drift
from homelab.controller.checks.machine.install_commands import install_driver, install_packages, setup
from homelab.controller.checks.machine.version_drift import common_versions, numbers, packages_compared, packages_needed, plain
from homelab.controller.config.cluster import Node
from homelab.controller.config.interpreter import UNSLOTH_VERSIONS, key_of, uses_unsloth
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import create_environment, environment_of, on_node, path_word
from homelab.controller.planning.environment.torch_choice import capabilities

OLDEST = (3, 11)


@check("python.interpreter", "there is a Python at the path of cluster.toml", worst="fail", sees="python", is_certain=True)
def interpreter(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where nothing is at the configured path and the agent was started with another Python."""
    if facts.python.is_another:
        message = f"there is no Python at {node.python}; {facts.python.executable} answered instead"
        # What a program of the user's needs, nobody but them knows.
        create = create_environment(node, _wanted(evidence)) if _is_script(evidence) else setup(node)
        edit = f'edit cluster.toml, node {node.name} or [defaults]: {key_of(evidence.recipe)} = "..."'
        if environment_of(node) and re.fullmatch(r"python(3(\.\d+)?)?", posixpath.basename(node.python)):
            yield Problem("fail", message, Hint("{} (or, if that is not the right path, {})", create, edit), create)
        else:  # a new environment has no such file in it
            yield Problem("fail", message, f"{edit}; to make a new environment with the needed packages: {create}")


@check("python.version", f"Python is {'.'.join(map(str, OLDEST))} or newer, and the same x.y on all nodes", worst="fail", sees="python")
def version(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail for a Python that is too old for the worker, warn for another x.y than most nodes have (patches do not matter)."""
    if facts.python.is_another or not facts.python.version:
        return
    oldest = ".".join(map(str, OLDEST))
    if numbers(facts.python.version)[:2] < OLDEST and not _is_script(evidence):
        message = f"Python {facts.python.version} at {node.python}: the worker needs {oldest} or newer"
        yield Problem("fail", message, _new_environment(evidence, node, oldest))
        return
    others = {name: numbers(other.python.version)[:2] for name, other in version_drift.usable(evidence).items() if other.python.version}
    counts = Counter(others.values())
    common = max(counts, key=lambda pair: (counts[pair], pair))
    if others[node.name] != common:
        common_version = ".".join(map(str, common))
        message = (
            f"Python is {facts.python.version} here, {common_version} on {listed(name for name, pair in others.items() if pair == common)}"
        )
        yield Problem("warn", message, _new_environment(evidence, node, common_version))


@check(
    "python.packages", "every package that the training imports is installed, and none is too new for Unsloth", worst="fail", sees="python"
)
def missing(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail for packages that the recipe's training imports and that are not there."""
    if facts.python.is_another:
        return
    names = [name for name in packages_needed(evidence.recipe) if not facts.python.packages.get(name)]
    if names:
        verb = "are" if len(names) > 1 else "is"
        fix = install_packages(node, facts, _pinned(names, _pins(evidence)))
        yield Problem("fail", f"{listed(names)} {verb} not installed in {node.python}", fix=fix)
    if uses_unsloth(evidence.recipe):
        yield from _too_new_for_unsloth(node, facts)


@check("python.same", "the packages and NCCL have the same versions on all nodes", worst="fail", sees="python")
def same(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail for another version than most nodes have: the same step could compute something else, or not even begin (NCCL).

    Without a recipe, warn for packages that some recipes need.
    """
    if facts.python.is_another:
        return
    yield from _other_versions("fail", evidence, node, facts, packages_compared(evidence.recipe))
    if evidence.recipe is None:
        yield from _other_versions("warn", evidence, node, facts, version_drift.PERHAPS_NEEDED)
    common = _common_field(evidence, node, "nccl")
    # NCCL comes with torch: where another release of torch is installed, torch has to be fixed. Another build of the same release has another NCCL, too.
    if common and facts.python.nccl and facts.python.nccl != common and not _torch_differs(evidence, facts):
        message = f"NCCL is {facts.python.nccl} here, {common} on {_holding(evidence, 'nccl', common)}: they cannot communicate"
        yield _with_nccl(evidence, node, facts, common, message)


@check("python.same_build", "torch is the same build on all nodes with cards, and on all without", worst="warn", sees="python")
def same_build(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for another build of the same version (2.13.0+cu130 beside 2.13.0+cu126): its kernels may round otherwise.

    Nodes with and without GPUs are compared among themselves: they need different builds.
    """
    if facts.python.is_another:
        return
    common, peers = _common(evidence), _alike(evidence, node)
    differing = {}
    for name in common:
        installed = facts.python.packages.get(name)
        builds = [entry for other in peers.values() if (entry := other.python.packages.get(name)) and plain(entry) == plain(common[name])]
        if installed and plain(installed) == plain(common[name]) and installed != (most := version_drift.common_build(iter(builds))):
            differing[name] = most
    if differing:
        builds_text = "; ".join(
            f"{name} is {facts.python.packages[name]} here, {most} on {_holders(peers, name, most)}" for name, most in differing.items()
        )
        yield Problem("warn", f"another build of the same version: {builds_text}", fix=_install_build(node, facts, differing))
        return
    cuda = _common_field(evidence, node, "torch_cuda")
    if (
        cuda
        and facts.python.torch_cuda
        and facts.python.torch_cuda != cuda
        and plain(facts.python.packages.get("torch") or "") == plain(common.get("torch", ""))
    ):
        message = f"torch is built for CUDA {facts.python.torch_cuda} here, for {cuda} on {_holding(evidence, 'torch_cuda', cuda)}"
        build = f"cu{cuda.replace('.', '')}"
        yield Problem("warn", message, fix=_install_build(node, facts, {"torch": f"{plain(common['torch'])}+{build}"}))


@check("python.code", "homelab's code on the node was not changed", worst="fail", sees="python")
def code(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where the agent runs from other files than those that were shipped."""
    if not evidence.code_hash or not facts.python.code_hash or facts.python.code_hash == evidence.code_hash:
        return
    remove = on_node(node, f"rm -r {path_word(f'{node.workdir}/code/{evidence.code_hash}')}")
    message = "homelab's code on the node was changed or is damaged"
    if facts.runs.alive:  # it runs from that folder
        yield Problem("fail", message, f"when run {listed(facts.runs.alive)} has ended: {remove} (homelab then sends it again)")
    else:
        yield Problem("fail", message, Hint("{} (homelab then sends it again)", remove), fix=remove)


def _other_versions(level: Level, evidence: Evidence, node: Node, facts: Facts, names: tuple[str, ...]) -> Iterator[Problem]:
    usable = version_drift.usable(evidence)
    common = common_versions(usable, names)
    other = {
        name: installed for name in common if (installed := facts.python.packages.get(name)) and plain(installed) != plain(common[name])
    }
    if other:
        message = "; ".join(
            f"{name} is {installed} here, {common[name]} on {_holders(usable, name, common[name])}" for name, installed in other.items()
        )
        yield Problem(level, message, fix=install_packages(node, facts, [f"{name}=={plain(common[name])}" for name in other]))


def _too_new_for_unsloth(node: Node, facts: Facts) -> Iterator[Problem]:
    """It replaces parts of these packages: in a newer one than it was made for they are not what it expects."""
    versions = {
        name: (installed, limit)
        for name, limit in facts.python.unsloth_takes.items()
        if (installed := facts.python.packages.get(name)) and not _within(installed, limit)
    }
    if versions:
        versions_text = "; ".join(f"{name} is {installed} here; Unsloth takes {limit}" for name, (installed, limit) in versions.items())
        fix = install_packages(node, facts, [f"{name}{limit}" for name, (_, limit) in versions.items()])
        yield Problem("fail", f"too new for Unsloth {facts.python.unsloth}: {versions_text}", fix=fix)


def _within(version: str, limit: str) -> bool:
    """Whether 5.17.0 is within "<=5.17.0" or "<6"."""
    parts, most = numbers(version), numbers(limit)
    width = max(len(parts), len(most))
    parts, most = parts + (0,) * (width - len(parts)), most + (0,) * (width - len(most))
    return parts <= most if limit.startswith("<=") else parts < most


def _new_environment(evidence: Evidence, node: Node, release: str) -> str:
    """venv keeps the Python of a folder that is there already, so the old environment has to go first."""
    return f"install Python {release} there, move the old environment away, then: {create_environment(node, _wanted(evidence), f'python{release}')}"


def _install_build(node: Node, facts: Facts, builds: Mapping[str, str]) -> Command:
    """Local builds of torch lie in one index each; other packages' do not have a place that is known."""
    build = builds["torch"].partition("+")[2] if list(builds) == ["torch"] else ""
    if re.fullmatch(r"cu\d+|cpu|rocm[\d.]+|xpu", build):
        return install_packages(node, facts, [f"torch=={builds['torch']}"], f"--index-url https://download.pytorch.org/whl/{build} ")
    return install_packages(node, facts, [f"{name}=={plain(release)}" for name, release in builds.items()], "--force-reinstall --no-deps ")


def _common(evidence: Evidence) -> dict[str, str]:
    return common_versions(version_drift.usable(evidence), packages_compared(evidence.recipe))


def _alike(evidence: Evidence, node: Node) -> dict[str, Facts]:
    """The nodes that have GPUs as this one does, or none as this one."""
    usable = version_drift.usable(evidence)
    return {
        other.name: usable[other.name] for other, _ in answered(evidence) if other.name in usable and bool(other.gpus) == bool(node.gpus)
    }


def _common_field(evidence: Evidence, node: Node, field: str) -> str | None:
    """The value that most nodes like this one have; of equally frequent ones the newest."""
    values = Counter(str(value) for facts in _alike(evidence, node).values() if (value := getattr(facts.python, field)))
    return max(values, key=lambda value: (values[value], numbers(value)), default=None)


def _with_nccl(evidence: Evidence, node: Node, facts: Facts, nccl: str, message: str) -> Problem:
    """How this node gets the NCCL that most have: with their build of torch, where its cards and its driver can do with that one."""
    its_cuda = Counter(other.python.torch_cuda for other in _alike(evidence, node).values() if other.python.nccl == nccl).most_common(1)[0][
        0
    ]
    release = plain(facts.python.packages.get("torch") or "")
    build = next((build for build in torch_builds.builds_of(release) if build.cuda == its_cuda), None)
    if build is None or its_cuda == facts.python.torch_cuda or not build.runs_on(capabilities(facts)):
        # NCCL compares its own version number, not that of CUDA (src/init.cc, "Mismatched NCCL version detected").
        major = (facts.python.torch_cuda or "12").partition(".")[0]
        return Problem("fail", message, fix=install_packages(node, facts, [f"nvidia-nccl-cu{major}=={nccl}"]))
    install = _install_build(node, facts, {"torch": f"{release}+{build.tag}"})
    if build.suits(facts.gpu.driver_cuda):
        return Problem("fail", message, fix=install)
    return Problem("fail", message, f"{build.tag} needs driver {build.driver} or newer: {install_driver(node, facts)}; then: {install}")


def _torch_differs(evidence: Evidence, facts: Facts) -> bool:
    """Whether this node's torch is another release than most nodes have. Another build of the same release does not count."""
    return plain(facts.python.packages.get("torch") or "") != plain(_common(evidence).get("torch", ""))


def _holding(evidence: Evidence, field: str, value: str) -> str:
    return listed(name for name, facts in version_drift.usable(evidence).items() if getattr(facts.python, field) == value)


def _holders(usable: Mapping[str, Facts], name: str, release: str) -> str:
    return listed(other for other, facts in usable.items() if facts.python.packages.get(name) == release)


def _wanted(evidence: Evidence) -> list[str]:
    return _pinned(packages_needed(evidence.recipe), _pins(evidence))


def _pins(evidence: Evidence) -> dict[str, str]:
    """What the others have; for Unsloth, which takes few versions of other packages, else those that were tested with it."""
    return (UNSLOTH_VERSIONS if uses_unsloth(evidence.recipe) else {}) | _common(evidence)


def _pinned(names: tuple[str, ...] | list[str], common: Mapping[str, str]) -> list[str]:
    return [f"{name}=={plain(common[name])}" if name in common else name for name in names]


def _is_script(evidence: Evidence) -> bool:
    return evidence.recipe is not None and evidence.recipe.script is not None


@subject("python", "the worker's Python and packages are installed, and the same everywhere", after="clock")
def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    names = [name for name in ("torch", "transformers") if name in packages_needed(evidence.recipe)]
    return ", ".join(f"{name} {facts.python.packages[name]}" for name in names)
