"""What a launcher makes of a plan: the commands, or the one document, that start it, for one way to start programs on several machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from homelab.controller.base.models import Value
from homelab.controller.planning.types import LaunchDocument, LaunchSpec, NodePlan, Placement
from homelab.shared.protocol import layout


class NodeCommand(Value):
    """What is executed on one node: an argument list and the variables beside it (no secrets in them)."""

    node: str
    argv: tuple[str, ...]
    environment: dict[str, str]


class Launcher(ABC):
    """One way to start a plan. `title` says in a few words how."""

    name: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def render(self, spec: LaunchSpec, placement: Placement) -> tuple[NodeCommand, ...]:
        """One command for each node, in the plan's order."""

    def render_plan(self, spec: LaunchSpec, placement: Placement) -> LaunchDocument | None:
        """One document for all nodes, shown in place of the commands; None for a launcher that has none."""
        return None


def program_of(spec: LaunchSpec, node: NodePlan) -> tuple[str, ...]:
    """The arguments of Python on this node."""
    return (*((f"{node.workdir}/{spec.script}",) if spec.script else ()), *spec.arguments)


def environment_of(spec: LaunchSpec, node: NodePlan) -> dict[str, str]:
    """The variables of a node's processes: those of every node, and its own before them."""
    properties = {
        "name": node.name, "interface": node.interface, "code_dir": f"{node.workdir}/{spec.code}", "run_dir": node.run_dir,
        "saved_dir": f"{node.run_dir}/{layout.SAVED}",
    }  # fmt: skip
    return {**{name: properties[key] for name, key in spec.node_environment.items()}, **spec.environment, **node.environment}
