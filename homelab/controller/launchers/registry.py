"""The launchers that `homelab plan --launcher` knows, and a plan with the commands of one of them."""

from __future__ import annotations

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.launchers.base import Launcher
from homelab.controller.launchers.torchrun_ssh import TorchrunSsh
from homelab.controller.planning.types import Plan

LAUNCHERS: dict[str, Launcher] = {}
DEFAULT = TorchrunSsh.name


def register(launcher: Launcher) -> None:
    """Make a launcher known to `homelab plan --launcher`."""
    LAUNCHERS[launcher.name] = launcher


def launcher_named(name: str) -> Launcher:
    """The launcher of this name. Raises InputError for one that is not registered."""
    if name not in LAUNCHERS:
        raise InputError(
            f'no launcher is named "{name}".{did_you_mean(name, list(LAUNCHERS))}',
            where="--launcher",
            hint=f"the launchers are: {', '.join(LAUNCHERS)}",
        )
    return LAUNCHERS[name]


def rendered(plan: Plan, launcher: str = DEFAULT) -> Plan:
    """The plan with every node's command and whole environment, and the launcher's document where it has one.

    Raises InputError for a launcher that is not registered.
    """
    assert plan.launch is not None, "this plan has its commands"
    chosen = launcher_named(launcher)
    commands = chosen.render(plan.launch, plan.placement)
    nodes = [
        node.model_copy(update={"command": command.argv, "environment": command.environment, "python": ""})
        for node, command in zip(plan.nodes, commands, strict=True)
    ]
    document = chosen.render_plan(plan.launch, plan.placement)
    return plan.model_copy(update={"nodes": tuple(nodes), "launch": None, "document": document})


register(TorchrunSsh())
