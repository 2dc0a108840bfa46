"""gpu.xid: what the NVIDIA driver wrote into the kernel log since the machine was started.

Meanings and what to do: NVIDIA's "XID Errors" guide (docs.nvidia.com/deploy/xid-errors).
"""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.base.units import listed
from homelab.controller.checks.check import Problem, check
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import Node
from homelab.controller.facts import node_commands
from homelab.controller.facts.gpu import Xid
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import as_root

# After these the card does not work before it is reset, or what it computed is not to be trusted.
LOST = {
    48: "an uncorrected memory error",
    64: "bad memory could not be taken out of use",
    79: "the card fell off the bus (power, heat or a bad seat)",
    95: "an uncorrected memory error that spread",
    119: "the card's own processor (GSP) did not answer",
    120: "the card's own processor (GSP) failed",
}
# These point to the hardware too, and the card goes on.
HARDWARE = {
    62: "the card's microcontroller halted",
    63: "bad memory was taken out of use",
    74: "an NVLink error",
    92: "many corrected memory errors",
    94: "an uncorrected memory error, contained to one program",
    109: "a context switch timed out",
}
# These are mostly a program's own fault, and a crashed one leaves them behind; so many of them are more than one crash.
PROGRAM = {
    8: "a program hung on the card",
    13: "a program's kernel failed (out of its bounds, or an illegal instruction)",
    31: "a program used memory that is not its own",
    32: "a program's command stream was damaged",
    43: "a program's channel was stopped",
    45: "the work of a program was removed after it ended",
    69: "a program's graphics commands failed",
}
MANY = 20
_NAMED = 4


@check("gpu.xid", "the NVIDIA driver reported no errors of the cards", worst="fail", sees="xid", after="gpu.mig")
def xid(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where a card is lost and does not compute any more, warn for other signs of bad hardware and for a great many crashes."""
    if not node.gpus or not facts.xid:
        return
    card_lost = [entry for entry in facts.xid if entry.code in LOST]
    hardware = [entry for entry in facts.xid if entry.code in HARDWARE]
    program = [entry for entry in facts.xid if entry.code in PROGRAM]
    crashes = sum(entry.count for entry in program if entry.code != 45)
    if not (card_lost or hardware or crashes >= MANY):
        return
    named = card_lost + hardware or program
    command = f"to see it: {as_root(node, facts, 'dmesg | grep Xid')}"
    message = f"the kernel log has {listed(_sentence(entry) for entry in named[:_NAMED])}"
    if card_lost and not _computes(facts):
        restart = node_commands.restart(node, facts)
        yield Problem("fail", message, f"{restart}; if it comes back: power cables, cooling, seat of the card; {command}")
    else:
        yield Problem("warn", message, f"{command}; if it comes back: power cables, cooling, seat of the card" if card_lost else command)


def _computes(facts: Facts) -> bool:
    """Whether every card has worked since the last report (the node keeps no older answer): then it was reset since."""
    devices = (facts.gpu.torch or {}).get("devices") or []
    return bool(facts.gpu.cards) and len(devices) == len(facts.gpu.cards) and all(device.get("matmul_ok") for device in devices)


def _sentence(entry: Xid) -> str:
    words = LOST.get(entry.code) or HARDWARE.get(entry.code) or PROGRAM[entry.code]
    times = f" {entry.count} times" if entry.count > 1 else ""
    ago = f", {'last ' if entry.count > 1 else ''}{_age(entry.last_s_ago)} ago" if entry.last_s_ago is not None else ""
    return f"Xid {entry.code}{times} for {entry.bus_id}: {words}{ago}"


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
