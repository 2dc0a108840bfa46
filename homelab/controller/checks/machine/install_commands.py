"""The commands that install something on a node: packages of its system by its distribution, packages of its Python, the NVIDIA driver. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from homelab.controller.base import hardware
from homelab.controller.base.hint import Command, homelab
from homelab.controller.base.shell import quote_words
from homelab.controller.config.cluster import Node
from homelab.controller.facts import card_generation
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import by_root, on_node, path_word, pip_install, restart, written_as_root
from homelab.controller.planning.machines import cards

# Words of /etc/os-release's PRETTY_NAME.
UBUNTU = ("ubuntu", "pop!_os", "mint")
DEBIAN = ("debian", "lmde", "kali")
FEDORA = ("fedora",)
ARCH = ("arch", "manjaro", "endeavouros", "cachyos")


def by_distribution(facts: Facts, commands: Iterable[tuple[tuple[str, ...], str]]) -> str | None:
    """The first of `commands` whose distributions this node's is among, None for another one."""
    words_of_system = re.split(r"[\s/]+", facts.system.os.lower())  # whole words: "arch" is in the machine's name aarch64, too
    return next((command for words, command in commands if not set(words).isdisjoint(words_of_system)), None)


def install_packages(node: Node, facts: Facts, requirements: Iterable[str], options: str = "") -> Command:
    """`homelab setup` where that has made the environment: it holds no pip, the node may have no way out, and setup knows what belongs there; also for
    a Python of the system that takes no packages: setup says what to edit. Else pip, or what the environment has in its place.
    """
    seen, python = facts.python, path_word(node.python)
    if seen.made_by_setup or seen.is_managed:
        return setup(node)
    if seen.has_pip is not False:
        return pip_install(node, requirements, options)
    if seen.uv and PurePosixPath(seen.uv).name == "uv":
        return on_node(node, f"{path_word(seen.uv)} pip install --python {python} {options}{quote_words(requirements)}")
    return on_node(node, f"{python} -m ensurepip", f"{python} -m pip install {options}{quote_words(requirements)}")


def setup(node: Node) -> Command:
    """`homelab setup` for this node, whose `python` may be that of the environment which trains with Unsloth."""
    return homelab("setup", node.name, *(["--unsloth"] if node.python == node.unsloth_python else []))


# How the driver is installed.
_INSTALL = (
    (UBUNTU, "ubuntu-drivers install"),
    (DEBIAN, "apt install nvidia-driver"),
    (FEDORA, "dnf install akmod-nvidia xorg-x11-drv-nvidia-cuda"),
    (ARCH, "pacman -S nvidia-open nvidia-utils"),
)
# Branch 580 is the last one for Maxwell, Pascal and Volta; the open kernel modules of later ones begin with Turing. ubuntu-drivers chooses by the
# card, and Debian 13 has branch 550.
_TURING = (7, 5)
_INSTALL_580 = ((FEDORA, "dnf install akmod-nvidia-580xx xorg-x11-drv-nvidia-580xx-cuda"),)
_AUR_580 = ((ARCH, "yay -S nvidia-580xx-dkms nvidia-580xx-utils"),)
# Windows has the driver; one of Linux inside of WSL hides it.
IN_WINDOWS = "install or renew the NVIDIA driver in Windows (do not install one inside of WSL; remove one that is there), then in PowerShell: wsl --shutdown"


def install_driver(node: Node, facts: Facts) -> str:
    """The command that installs or renews the NVIDIA driver; in words for a distribution that is not known here, and for WSL."""
    if in_wsl(facts):
        return IN_WINDOWS
    old = _before_turing(node, facts)
    of_aur = by_distribution(facts, _AUR_580) if old else None
    if of_aur:
        return f"{on_node(node, of_aur)} (from the AUR: branch 580 is the last one that drives {old}), then {restart(node, facts)}"
    command = by_distribution(facts, (*_INSTALL_580, *_INSTALL) if old else _INSTALL)
    if command is None:
        newest = f"driver of branch 580 (the last one that drives {old})" if old else "newest NVIDIA driver"
        return f"install the {newest} on {node.name} in the way of its distribution ({facts.system.os or 'unknown'}), and restart it"
    steps = (*_repository(facts), by_root(command, facts), by_root("reboot", facts))
    return on_node(node, *steps)


def _repository(facts: Facts) -> tuple[Command, ...]:
    """What makes the driver known to the packages of the system: Debian has it in parts of its archive that are off, Fedora not at all."""
    debian = re.match(r"Debian\b.*?(?:\((\w+)\)|(\w+)/sid)", facts.system.os)
    if debian:
        archive = f"deb http://deb.debian.org/debian {debian[1] or debian[2]} contrib non-free non-free-firmware"
        return written_as_root(facts, [archive], "/etc/apt/sources.list.d/nvidia-driver.list"), by_root("apt update", facts)
    if by_distribution(facts, ((FEDORA, "dnf"),)):
        # RPM Fusion's own instructions (rpmfusion.org/Configuration)
        release = "https://mirrors.rpmfusion.org/{0}/fedora/rpmfusion-{0}-release-$(rpm -E %fedora).noarch.rpm"
        return (by_root(f"dnf install {release.format('free')} {release.format('nonfree')}", facts),)
    return ()


def _before_turing(node: Node, facts: Facts) -> str:
    """The first card of the node that no driver after branch 580 drives, as the node or else its owner names it; empty where there is none."""
    there = cards.everything(facts)
    known = [(card.name, card_generation.of_card(card, facts.gpu)) for card in there] or [
        (gpu.model, hardware.generation(gpu.model)) for gpu in node.gpus
    ]
    return next((cards.short(name) for name, capability in known if capability is not None and capability < _TURING), "")


def in_wsl(facts: Facts) -> bool:
    """Whether the node is a Linux in Windows."""
    return facts.network.wsl is not None
