"""The command that installs packages into a node's environment, by whoever made it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from homelab.controller.base.hint import Command, homelab
from homelab.controller.config.cluster import Node
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import pip_install


def install_packages(node: Node, facts: Facts, requirements: Iterable[str], options: str = "") -> Command:
    """`homelab setup` where that has made the environment: it holds no pip, the node may have no way out, and setup knows what belongs there."""
    return setup(node) if facts.python.made_by_setup else pip_install(node, requirements, options)


def setup(node: Node) -> Command:
    """`homelab setup` for this node, whose `python` may be that of the environment which trains with Unsloth."""
    return homelab("setup", node.name, *(["--unsloth"] if node.python == node.unsloth_python else []))
