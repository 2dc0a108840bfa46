"""Which distribution a node has, for the commands that install a system's packages. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from homelab.controller.facts.node import Facts

# Words of /etc/os-release's PRETTY_NAME.
UBUNTU = ("ubuntu", "pop!_os", "mint")
DEBIAN = ("debian", "lmde", "kali")
FEDORA = ("fedora",)
ARCH = ("arch", "manjaro", "endeavouros", "cachyos")


def of(facts: Facts, commands: Iterable[tuple[tuple[str, ...], str]]) -> str | None:
    """The first of `commands` whose distributions this node's is among, None for another one."""
    system = facts.system.os.lower()
    return next((command for words, command in commands if any(word in system for word in words)), None)
