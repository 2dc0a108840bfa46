"""The command that installs packages into a node's environment, by whoever made it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from homelab.config.cluster import Node
from homelab.facts.node import Facts
from homelab.node_commands import pip_install
from homelab.text.hint import Command, homelab


def install_packages(node: Node, facts: Facts, requirements: Iterable[str], options: str = "") -> Command:
    """`homelab setup` where that has made the environment: it holds no pip, the node may have no way out, and setup knows what belongs there."""
    return setup(node) if facts.python.made_by_setup else pip_install(node, requirements, options)


def setup(node: Node) -> Command:
    """`homelab setup` for this node, whose `python` may be that of the environment which trains with Unsloth."""
    return homelab("setup", node.name, *(["--unsloth"] if node.python == node.unsloth_python else []))
