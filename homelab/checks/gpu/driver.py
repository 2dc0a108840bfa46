"""The NVIDIA driver: it is installed, it runs, and the running one is the installed one; and the command that installs it."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.checks.check import Problem, check
from homelab.checks.evidence import Evidence
from homelab.config.cluster import Node
from homelab.facts.node import Facts
from homelab.node_commands import as_root, on_node

# Words of /etc/os-release's PRETTY_NAME -> how the driver is installed there.
_INSTALL = (
    (("ubuntu", "pop!_os", "mint"), "ubuntu-drivers install"),
    (("debian", "lmde", "kali"), "apt install nvidia-driver"),
    (("fedora",), "dnf install akmod-nvidia xorg-x11-drv-nvidia-cuda"),  # from RPM Fusion
    (("arch", "manjaro", "endeavouros", "cachyos"), "pacman -S nvidia-open nvidia-utils"),
)


@check("gpu.driver", "the NVIDIA driver is installed and answers", worst="fail", sees="gpu")
def missing(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where nvidia-smi is missing or fails on a node that should have cards."""
    if not node.gpus or facts.gpu.nvidia_smi == "ok" or _is_mismatch(facts):
        return
    answer = first_line(facts.gpu.nvidia_smi)
    if facts.gpu.nvidia_smi == "missing":
        if facts.amd:
            return  # gpu.amd says what there is
        yield _not_installed(node, facts)
    elif "no devices were found" in answer.lower():
        yield Problem(
            "fail",
            f"nvidia-smi: {answer}",
            f"look whether the machine sees it: {on_node(node, 'lspci | grep -i nvidia')}",
        )
    elif "blocked by the operating system" in answer.lower():  # Windows decides in WSL2
        yield Problem(
            "fail",
            f"nvidia-smi: {answer}",
            "install the newest NVIDIA driver in Windows (none in WSL), then: wsl --shutdown",
        )
    elif "couldn't communicate" in answer.lower():
        load = as_root(node, facts, "modprobe nvidia")
        hint = f"{_switched_on(node, facts)}{load} (its error says why: no module for this kernel, or Secure Boot); to install it anew: {install_driver(node, facts)}"
        yield Problem("fail", "nvidia-smi cannot reach the driver: its kernel module is not loaded", hint)
    else:
        restart = as_root(node, facts, "reboot")
        yield Problem("fail", f"nvidia-smi: {answer}", f"{restart}; if that does not help: {install_driver(node, facts)}")


@check("gpu.mismatch", "the running NVIDIA driver is the installed one", worst="fail", sees="gpu")
def mismatch(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where an update renewed the driver's files under its running kernel module."""
    if node.gpus and _is_mismatch(facts):
        message = "the NVIDIA driver was updated under the running one (Driver/library version mismatch): nothing can use the cards before a restart"
        yield Problem("fail", message, as_root(node, facts, "reboot"))


def install_driver(node: Node, facts: Facts) -> str:
    """The command that installs or renews the NVIDIA driver; in words for a distribution that is not known here."""
    system = facts.system.os.lower()
    command = next((command for words, command in _INSTALL if any(word in system for word in words)), None)
    if command is None:
        return f"install the newest NVIDIA driver on {node.name} the way its distribution does ({facts.system.os or 'unknown'}), and restart it"
    return as_root(node, facts, command, "reboot")


def first_line(text: str) -> str:
    """What a program said first."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "an error without words")[:200]


def _not_installed(node: Node, facts: Facts) -> Problem:
    bus = facts.gpu.on_bus
    message = "nvidia-smi is not there: no NVIDIA driver is installed"
    if bus is not None and bus.cards == 0:
        # Not certain (some virtual machines show no bus of their own), so the driver's command stays the last resort.
        command = on_node(node, "lspci | grep -i nvidia")
        hint = f"is the card seated, powered and enabled in the firmware? {command}; if it is there: {install_driver(node, facts)}"
        return Problem("fail", "nvidia-smi is not there, and the machine sees no NVIDIA card", hint)
    if bus is not None and bus.driver not in (None, "nvidia"):
        message += f" ({bus.driver} has {'it' if bus.cards == 1 else f'{bus.cards} cards'})"
    return Problem("fail", message, install_driver(node, facts))


def _switched_on(node: Node, facts: Facts) -> str:
    """For a laptop, whose card may be switched off in favour of the processor's graphics: prime-select intel, envycontrol -s integrated."""
    if facts.power.source is None:  # no battery
        return ""
    on = as_root(node, facts, "prime-select nvidia")
    return f"a laptop's card may be switched off to save power: {on} (or envycontrol -s nvidia), then restart it; else "


def _is_mismatch(facts: Facts) -> bool:
    return "version mismatch" in facts.gpu.nvidia_smi.lower()
