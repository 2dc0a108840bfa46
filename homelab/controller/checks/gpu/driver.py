"""The NVIDIA driver: it is installed, it runs, and the running one is the installed one; and the command that installs it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from homelab.controller.base.hint import Hint, homelab
from homelab.controller.checks.check import Problem, check
from homelab.controller.checks.evidence import Evidence
from homelab.controller.checks.machine.install_commands import IN_WINDOWS, in_wsl, install_driver
from homelab.controller.config.cluster import Node
from homelab.controller.facts import nvidia_answer
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import as_root, nvidia_smi, on_node, restart

_SEAT = "if it comes back: power cables, cooling, seat of the card in its slot (switch the machine off first)"


@check("gpu.driver", "the NVIDIA driver is installed and answers", worst="fail", sees="gpu")
def missing(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where nvidia-smi is missing, fails, or names a card that it cannot use, on a node that should have cards; warn for its other complaints."""
    if not node.gpus or _is_mismatch(facts):
        return
    if facts.gpu.nvidia_smi == "ok":
        yield from (_complaint(kind, line, node, facts) for kind, line in nvidia_answer.complaints(facts))
    elif facts.gpu.nvidia_smi != "missing":
        lines = [line for line in facts.gpu.nvidia_smi.splitlines() if line.strip()] or [""]
        line = next((line for line in lines if nvidia_answer.kind_of(line)), lines[0])
        yield _complaint(nvidia_answer.kind_of(line), first_line(line), node, facts)
    elif not facts.amd or facts.gpu.are_on_bus:  # else gpu.amd says what there is
        yield _not_installed(node, facts)


def _complaint(kind: str, line: str, node: Node, facts: Facts) -> Problem:
    """What nvidia-smi said, with what mends it. A card that stopped answering is not forgotten: it is brought back."""
    restart_it, message = restart(node, facts), f"nvidia-smi: {line}"
    if kind == "inforom":
        tried = homelab("preflight --only gpu.compute")
        return Problem(
            "warn",
            message,
            Hint("test whether the card computes: {}; the card has lost its own error records; only its maker can restore them", tried),
        )
    if kind == "cut-off":
        return Problem(
            "warn", message, f"try again: {on_node(node, nvidia_smi(facts, '-q -x | tail'))}; if it ends like this again, {restart_it}"
        )
    if kind == "permissions":
        group = (
            as_root(node, facts, f"usermod -aG video,render {shlex.quote(facts.system.user)}")
            if facts.system.user
            else "usermod -aG video,render USER"
        )
        hint = (
            f"{on_node(node, 'ls -l /dev/nvidia*')} shows who may use it; {group}, then log in again; a container: start it with --gpus all"
        )
        return Problem("fail", message, hint)
    if in_wsl(facts) or kind == "blocked":
        return Problem("fail", message, IN_WINDOWS)
    if kind == "lost":
        hint = f"{restart_it}; {_SEAT}; to see it: {on_node(node, 'journalctl -k | grep Xid')}"
    elif kind == "no-devices":
        hint = f"check whether the machine sees it: {on_node(node, 'lspci | grep -i nvidia')}; if it does: {restart_it}; if not: check its slot, power and firmware settings"
    elif kind == "no-driver":
        load = as_root(node, facts, "modprobe nvidia")
        message = "nvidia-smi cannot reach the driver: its kernel module is not loaded"
        hint = f"{_switched_on(node, facts)}{load} (its error says why: no module for this kernel, or Secure Boot); to install it anew: {install_driver(node, facts)}"
    else:
        hint = f"{restart_it} (a container: start it again); if that does not help: {install_driver(node, facts)}"
    return Problem("fail", message, hint)


@check("gpu.mismatch", "the NVIDIA driver that runs is the installed one", worst="fail", sees="gpu")
def mismatch(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where an update renewed the driver's files under its running kernel module."""
    if node.gpus and _is_mismatch(facts):
        message = "the NVIDIA driver was updated while the old one runs (Driver/library version mismatch): no program can use the cards until a restart"
        if in_wsl(facts):
            message = "the NVIDIA driver of Windows and a library inside of WSL differ (Driver/library version mismatch)"
        yield Problem("fail", message, IN_WINDOWS if in_wsl(facts) else restart(node, facts))


def first_line(text: str) -> str:
    """What a program said first."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "an error without words")[:200]


def _not_installed(node: Node, facts: Facts) -> Problem:
    bus = facts.gpu.on_bus
    message = "nvidia-smi is not there: no NVIDIA driver is installed"
    if bus is not None and bus.cards == 0 and not in_wsl(facts):
        # Not certain (some virtual machines show no bus of their own), so the driver's command stays the last resort.
        command = on_node(node, "lspci | grep -i nvidia")
        hint = f"is the card in its slot, powered, and enabled in the firmware? {command}; if it is there: {install_driver(node, facts)}"
        return Problem("fail", "nvidia-smi is not there, and the machine sees no NVIDIA card", hint)
    if bus is not None and bus.driver not in (None, "nvidia"):
        message += f" ({bus.driver} has {'it' if bus.cards == 1 else f'{bus.cards} cards'})"
    return Problem("fail", message, install_driver(node, facts))


def _switched_on(node: Node, facts: Facts) -> str:
    """For a laptop, whose card may be switched off in favour of the processor's graphics: prime-select intel, envycontrol -s integrated."""
    if facts.power.source is None:  # no battery
        return ""
    on = as_root(node, facts, "prime-select nvidia")
    return f"the card of a laptop may be switched off to save power: {on} (or envycontrol -s nvidia), then restart it; if not, "


def _is_mismatch(facts: Facts) -> bool:
    return nvidia_answer.kind_of(facts.gpu.nvidia_smi) == "mismatch"
