"""python: the worker's interpreter and packages are there, and the same on all nodes; and the code of ours is whole."""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from homelab import torch_builds
from homelab.checks import differences
from homelab.checks.check import Check, Problem, Subject
from homelab.checks.commands import (
    answered,
    create_environment,
    environment_of,
    listed,
    on_node,
    path_word,
    pip_install,
)
from homelab.checks.differences import common_versions, numbers, packages_compared, packages_needed, plain
from homelab.checks.evidence import Evidence, Level
from homelab.checks.gpu_driver import install_driver
from homelab.checks.torch_cuda import capabilities
from homelab.config.cluster import Node
from homelab.config.interpreter import UNSLOTH_VERSIONS, key_of, uses_unsloth
from homelab.facts import Facts

OLDEST = (3, 11)


def interpreter(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where nothing is at the configured path and the agent was started with another Python."""
    if differences.is_fallback(node, facts):
        message = f"there is no Python at {node.python}; {facts.python_executable} answered in its place"
        create = create_environment(node, _wanted(evidence))
        edit = f'edit cluster.toml, node {node.name} or [defaults]: {key_of(evidence.recipe)} = "..."'
        if environment_of(node) and re.fullmatch(r"python(3(\.\d+)?)?", posixpath.basename(node.python)):
            yield Problem("fail", message, f"{create} (or, where that is not the right path, {edit})", create)
        else:  # a new environment has no such file in it
            yield Problem("fail", message, f"{edit}; to make a new environment with what is needed: {create}")


def version(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail for a Python that is too old for the worker, warn for another x.y than most nodes have (patches do not matter)."""
    if differences.is_fallback(node, facts) or not facts.python_version:
        return
    oldest = ".".join(map(str, OLDEST))
    if numbers(facts.python_version)[:2] < OLDEST and not _is_script(evidence):
        message = f"Python {facts.python_version} at {node.python}: the worker needs {oldest} or newer"
        yield Problem("fail", message, _new_environment(evidence, node, oldest))
        return
    others = {
        name: numbers(seen.python_version)[:2]
        for name, seen in differences.usable(evidence).items()
        if seen.python_version
    }
    counts = Counter(others.values())
    common = max(counts, key=lambda pair: (counts[pair], pair))
    if others[node.name] != common:
        wanted = ".".join(map(str, common))
        message = f"Python is {facts.python_version} here, {wanted} on {listed(name for name, pair in others.items() if pair == common)}"
        yield Problem("warn", message, _new_environment(evidence, node, wanted))


def missing(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail for packages that the recipe's training imports and that are not there."""
    if differences.is_fallback(node, facts):
        return
    names = [name for name in packages_needed(evidence.recipe) if not facts.packages.get(name)]
    if names:
        verb = "are" if len(names) > 1 else "is"
        fix = pip_install(node, _pinned(names, _pins(evidence)))
        yield Problem("fail", f"{listed(names)} {verb} not installed in {node.python}", fix=fix)
    if uses_unsloth(evidence.recipe):
        yield from _too_new_for_unsloth(node, facts)


def same(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail for another version than most nodes have: the same step could compute something else, or not even begin (NCCL).

    Without a recipe, warn for packages that some recipes need.
    """
    if differences.is_fallback(node, facts):
        return
    yield from _other_versions("fail", evidence, node, facts, packages_compared(evidence.recipe))
    if evidence.recipe is None:
        yield from _other_versions("warn", evidence, node, facts, differences.PERHAPS_NEEDED)
    common = _common_field(evidence, node, "nccl")
    # NCCL comes with torch: where another release of torch is, that has to be mended. Another build of the same release has another NCCL, too.
    if common and facts.nccl and facts.nccl != common and not _torch_differs(evidence, facts):
        message = f"NCCL is {facts.nccl} here, {common} on {_holding(evidence, 'nccl', common)}: they do not talk with each other"
        yield _with_nccl(evidence, node, facts, common, message)


def same_build(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for another build of the same version (2.13.0+cu130 beside 2.13.0+cu126): its kernels may round otherwise.

    Nodes with and without GPUs are compared among themselves: they need different builds.
    """
    if differences.is_fallback(node, facts):
        return
    common, peers = _common(evidence), _alike(evidence, node)
    found = {}
    for name in common:
        mine = facts.packages.get(name)
        builds = [
            entry
            for other in peers.values()
            if (entry := other.packages.get(name)) and plain(entry) == plain(common[name])
        ]
        if mine and plain(mine) == plain(common[name]) and mine != (most := differences.common_build(iter(builds))):
            found[name] = most
    if found:
        shown = "; ".join(
            f"{name} is {facts.packages[name]} here, {most} on {_holders(peers, name, most)}"
            for name, most in found.items()
        )
        yield Problem("warn", f"another build of the same version: {shown}", fix=_install_build(node, found))
        return
    cuda = _common_field(evidence, node, "torch_cuda")
    if (
        cuda
        and facts.torch_cuda
        and facts.torch_cuda != cuda
        and plain(facts.packages.get("torch") or "") == plain(common.get("torch", ""))
    ):
        message = (
            f"torch is built for CUDA {facts.torch_cuda} here, for {cuda} on {_holding(evidence, 'torch_cuda', cuda)}"
        )
        build = f"cu{cuda.replace('.', '')}"
        yield Problem("warn", message, fix=_install_build(node, {"torch": f"{plain(common['torch'])}+{build}"}))


def code(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where the agent runs from other files than those that were shipped."""
    if not evidence.code_hash or not facts.code_hash or facts.code_hash == evidence.code_hash:
        return
    remove = on_node(node, f"rm -r {path_word(f'{node.workdir}/code/{evidence.code_hash}')}")
    message = "homelab's code on the node was changed or is damaged"
    if facts.runs_alive:  # it runs from that folder
        yield Problem(
            "fail", message, f"when run {listed(facts.runs_alive)} has ended: {remove} (it is shipped anew then)"
        )
    else:
        yield Problem("fail", message, f"{remove} (it is shipped anew then)", fix=remove)


def _other_versions(
    level: Level, evidence: Evidence, node: Node, facts: Facts, names: tuple[str, ...]
) -> Iterator[Problem]:
    usable = differences.usable(evidence)
    common = common_versions(usable, names)
    other = {name: mine for name in common if (mine := facts.packages.get(name)) and plain(mine) != plain(common[name])}
    if other:
        shown = "; ".join(
            f"{name} is {mine} here, {common[name]} on {_holders(usable, name, common[name])}"
            for name, mine in other.items()
        )
        yield Problem(level, shown, fix=pip_install(node, [f"{name}=={plain(common[name])}" for name in other]))


def _too_new_for_unsloth(node: Node, facts: Facts) -> Iterator[Problem]:
    """It replaces parts of these packages: in a newer one than it was made for they are not what it expects."""
    found = {name: (mine, limit) for name, limit in facts.unsloth_takes.items() if (mine := facts.packages.get(name)) and not _within(mine, limit)}
    if found:
        shown = "; ".join(f"{name} is {mine} here, it takes {limit}" for name, (mine, limit) in found.items())
        yield Problem("fail", f"too new for Unsloth {facts.unsloth}: {shown}", fix=pip_install(node, [f"{name}{limit}" for name, (_, limit) in found.items()]))


def _within(version: str, limit: str) -> bool:
    """Whether 5.17.0 is within "<=5.17.0" or "<6"."""
    mine, most = numbers(version), numbers(limit)
    width = max(len(mine), len(most))
    mine, most = mine + (0,) * (width - len(mine)), most + (0,) * (width - len(most))
    return mine <= most if limit.startswith("<=") else mine < most


def _new_environment(evidence: Evidence, node: Node, wanted: str) -> str:
    """venv keeps the Python of a folder that is there already, so the old environment has to go first."""
    return f"install Python {wanted} there, move the old environment away, then: {create_environment(node, _wanted(evidence), f'python{wanted}')}"


def _install_build(node: Node, builds: Mapping[str, str]) -> str:
    """Local builds of torch lie in one index each; other packages' do not have a place that is known."""
    build = builds["torch"].partition("+")[2] if list(builds) == ["torch"] else ""
    if re.fullmatch(r"cu\d+|cpu|rocm[\d.]+|xpu", build):
        return pip_install(
            node, [f"torch=={builds['torch']}"], f"--index-url https://download.pytorch.org/whl/{build} "
        )
    return pip_install(
        node, [f"{name}=={plain(wanted)}" for name, wanted in builds.items()], "--force-reinstall --no-deps "
    )


def _common(evidence: Evidence) -> dict[str, str]:
    return common_versions(differences.usable(evidence), packages_compared(evidence.recipe))


def _alike(evidence: Evidence, node: Node) -> dict[str, Facts]:
    """The nodes that have GPUs as this one does, or none as this one."""
    usable = differences.usable(evidence)
    return {
        other.name: usable[other.name]
        for other, _ in answered(evidence)
        if other.name in usable and bool(other.gpus) == bool(node.gpus)
    }


def _common_field(evidence: Evidence, node: Node, field: str) -> str | None:
    """The value that most nodes like this one have; of equally frequent ones the newest."""
    values = Counter(str(value) for facts in _alike(evidence, node).values() if (value := getattr(facts, field)))
    return max(values, key=lambda value: (values[value], numbers(value)), default=None)


def _with_nccl(evidence: Evidence, node: Node, facts: Facts, wanted: str, message: str) -> Problem:
    """How this node gets the NCCL that most have: with their build of torch, where its cards and its driver can do with that one."""
    its_cuda = Counter(other.torch_cuda for other in _alike(evidence, node).values() if other.nccl == wanted).most_common(1)[0][0]
    release = plain(facts.packages.get("torch") or "")
    build = next((build for build in torch_builds.builds_of(release) if build.cuda == its_cuda), None)
    if build is None or its_cuda == facts.torch_cuda or not build.runs_on(capabilities(facts)):
        # NCCL compares its own version number, not that of CUDA (src/init.cc, "Mismatched NCCL version detected").
        major = (facts.torch_cuda or "12").partition(".")[0]
        return Problem("fail", message, fix=pip_install(node, [f"nvidia-nccl-cu{major}=={wanted}"]))
    install = _install_build(node, {"torch": f"{release}+{build.tag}"})
    if build.suits(facts.driver_cuda):
        return Problem("fail", message, fix=install)
    return Problem("fail", message, f"{build.tag} needs driver {build.driver} or newer: {install_driver(node, facts)}; then: {install}")


def _torch_differs(evidence: Evidence, facts: Facts) -> bool:
    """Another release; another build of the same one is no reason not to look at what came with it."""
    return plain(facts.packages.get("torch") or "") != plain(_common(evidence).get("torch", ""))


def _holding(evidence: Evidence, field: str, value: str) -> str:
    return listed(name for name, facts in differences.usable(evidence).items() if getattr(facts, field) == value)


def _holders(usable: Mapping[str, Facts], name: str, wanted: str) -> str:
    return listed(other for other, facts in usable.items() if facts.packages.get(name) == wanted)


def _wanted(evidence: Evidence) -> list[str]:
    return _pinned(packages_needed(evidence.recipe), _pins(evidence))


def _pins(evidence: Evidence) -> dict[str, str]:
    """What the others have; for Unsloth, which takes few versions of other packages, else those that were tested with it."""
    return (UNSLOTH_VERSIONS if uses_unsloth(evidence.recipe) else {}) | _common(evidence)


def _pinned(names: tuple[str, ...] | list[str], common: Mapping[str, str]) -> list[str]:
    return [f"{name}=={plain(common[name])}" if name in common else name for name in names]


def _is_script(evidence: Evidence) -> bool:
    return evidence.recipe is not None and evidence.recipe.script is not None


def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    shown = [name for name in ("torch", "transformers") if name in packages_needed(evidence.recipe)]
    return ", ".join(f"{name} {facts.packages[name]}" for name in shown)


SUBJECT = Subject(
    "python",
    "the worker's Python and packages are there, and the same everywhere",
    (
        Check("python.interpreter", "there is a Python where cluster.toml says", "fail", "python", of_node=interpreter),
        Check(
            "python.version",
            f"Python is {'.'.join(map(str, OLDEST))} or newer, and the same x.y on all nodes",
            "fail",
            "python",
            of_node=version,
        ),
        Check(
            "python.packages", "every package that the training imports is installed, and none is too new for Unsloth", "fail", "python", of_node=missing
        ),
        Check(
            "python.same", "the packages and NCCL have the same versions on all nodes", "fail", "python", of_node=same
        ),
        Check(
            "python.same_build", "torch is the same build on all nodes of a kind", "warn", "python", of_node=same_build
        ),
        Check("python.code", "homelab's code on the node is what was shipped there", "fail", "python", of_node=code),
    ),
    _summary,
)
