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

# {x.y} is the release of the Python that trains. Arch packs the headers with Python.
_INSTALL = (
    (UBUNTU + DEBIAN, "apt install gcc libc6-dev python{}-dev"),
    (FEDORA, "dnf install gcc python3-devel"),
    (ARCH, "pacman -S gcc python"),
)


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
    """The command of the node's distribution; none where it is unknown, or where the headers are those of another Python than the distribution's."""
    command = by_distribution(facts, _INSTALL)
    if command is None or (seen.compiler and not seen.headers.startswith("/usr/include/")):
        return NO_COMMAND
    return as_root(node, facts, command.format(".".join(facts.python.version.split(".")[:2])))
