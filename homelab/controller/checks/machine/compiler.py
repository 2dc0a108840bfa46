"""A C compiler and Python's headers, for the packages that compile a part of themselves on the node."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.base.hint import NO_COMMAND, Command, Hint, homelab
from homelab.controller.checks.check import Problem, check
from homelab.controller.checks.evidence import Evidence
from homelab.controller.checks.machine.install_commands import ARCH, DEBIAN, FEDORA, UBUNTU, by_distribution
from homelab.controller.config.cluster import Node
from homelab.controller.facts.machine import CompilerFacts
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import as_root

# The compiler, and the headers of the distribution's own Python: {} is its release. Arch packs the headers with Python.
_COMPILER = ((UBUNTU + DEBIAN, "apt install gcc libc6-dev"), (FEDORA, "dnf install gcc"), (ARCH, "pacman -S gcc"))
_HEADERS = ((UBUNTU + DEBIAN, " python{}-dev"), (FEDORA, " python3-devel"), (ARCH, " python"))


@check(
    "python.compiler",
    "a node with cards can compile C, as Unsloth does at its first step",
    worst="fail",
    sees="python",
    after="python.code",
)
def compiler(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where a recipe for Unsloth trains on cards, and the compiler or Python's headers are missing: it would end after minutes of loading.

    The node answers for such a recipe alone: on a CPU, and without Unsloth, nothing is compiled.
    """
    seen = facts.python.compiler
    if seen is None or not facts.gpu.cards or facts.python.is_another:
        return
    if seen.compiler is None:
        message = "Unsloth compiles C at its first step, and there is no compiler: neither gcc nor clang, nor the one that CC names"
    elif seen.error:
        message = f"Unsloth compiles C at its first step, and {seen.compiler} cannot: {seen.error}"
    else:
        return
    install = _install(node, facts, seen)
    if install:
        yield Problem("fail", message, fix=install)
    else:
        own = Hint("{}, which brings a Python with its headers", homelab("setup", node.name, "--unsloth"))
        words = f"on {node.name} ({facts.system.os or 'an unknown system'}): install gcc and the headers of its Python (python3-dev, python3-devel)"
        yield Problem("fail", message, Hint("{}; or {}", words, own) if seen.compiler else words)


def _install(node: Node, facts: Facts, seen: CompilerFacts) -> Command:
    """The command of the node's distribution; none where it is unknown, or where headers are missing that the distribution does not have: those of
    uv's and conda's Pythons come with them."""
    is_of_system = seen.headers.startswith("/usr/include/")
    compiler, headers = by_distribution(facts, _COMPILER), by_distribution(facts, _HEADERS)
    if compiler is None or headers is None or (not is_of_system and "Python.h" in (seen.error or "")):
        return NO_COMMAND
    release = ".".join(facts.python.version.split(".")[:2])
    return as_root(node, facts, compiler + headers.format(release) if is_of_system else compiler)
