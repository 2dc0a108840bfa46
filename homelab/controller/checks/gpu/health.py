"""The health of the cards: temperature, throttling, power supply, memory errors, PCIe link, MIG."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.units import binary_size, listed
from homelab.controller.checks.check import Problem, check
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import Node
from homelab.controller.facts import node_commands
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import as_root, nvidia_smi, on_node
from homelab.shared.protocol.card_messages import GpuFacts

HOT_IDLE_C = 80.0
IDLE_PERCENT = 10.0  # a card at work may well be at 83 degrees: that is what its fans are set to
LOW_POWER = 0.75  # of the maker's limit: many turn a card down to 80 % for quiet, which costs a few per cent of speed
FEW_LANES = 4  # one in so many of the lanes that could be there
# Why clocks are held down, as far as it costs speed and a person can do something. Not here: idle, the power cap (every card
# at work reaches it), clocks that were asked for, sync boost, the display's wishes.
SLOWED = {
    "hw_thermal_slowdown": "it is too hot (hardware limit)",
    "sw_thermal_slowdown": "it is too hot (driver limit)",
    "hw_power_brake_slowdown": "the power supply told it to slow down",
    "hw_slowdown": "the hardware slows it down (heat, or too little power)",
}
_COOL = "clean its fans and improve its air flow"
_POWER = "check its power cables and the power supply; a laptop: plug in its own charger"


@check("gpu.temperature", "an idle card is cool", worst="warn", sees="gpu", after="gpu.bf16")
def temperature(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for a card that is hot before it has anything to do."""
    for card in _cards(node, facts):
        idle = card.utilization_percent is not None and card.utilization_percent < IDLE_PERCENT
        if idle and card.temperature_c is not None and card.temperature_c >= HOT_IDLE_C:
            message = f"GPU {card.index} has {card.temperature_c:.0f} °C while idle: it will slow down as soon as it works"
            yield Problem("warn", message, Hint("{}; then look again: {}", _COOL, homelab("preflight --only gpu.temperature")))


@check("gpu.throttle", "no card is slowed down by heat or power", worst="warn", sees="gpu")
def throttle(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for a card that is slowed down by heat or power just now."""
    for card in _cards(node, facts):
        active = [reason for reason in SLOWED if reason in card.slowed_by]
        if len(active) > 1 and "hw_slowdown" in active:
            active.remove("hw_slowdown")  # it is set together with its cause
        if not active:
            continue
        why = listed(SLOWED[reason] for reason in active)
        degrees = f" at {card.temperature_c:.0f} °C" if card.temperature_c is not None else ""
        hot = any("thermal" in reason for reason in active)
        command = on_node(node, nvidia_smi(facts, "-q -d PERFORMANCE,TEMPERATURE,POWER"))
        yield Problem("warn", f"GPU {card.index} is slowed down{degrees}: {why}", f"{_COOL if hot else _POWER}; to see it: {command}")


@check("gpu.power_limit", "the power limit of the cards is the usual one", worst="warn", sees="gpu")
def power_limit(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for a power limit far below the maker's."""
    for card in _cards(node, facts):
        limit, default = card.power_limit_w, card.power_limit_default_w
        if limit is None or not default or limit >= LOW_POWER * default:
            continue
        message = f"GPU {card.index} may use {limit:.0f} W, {limit / default:.0%} of its usual {default:.0f} W"
        if "laptop" in card.name.lower() or "max-q" in card.name.lower():
            hint = f"plug the laptop in and choose the performance profile: {on_node(node, 'powerprofilesctl set performance')}"
        else:
            hint = f"if you did not want that: {as_root(node, facts, nvidia_smi(facts, f'-i {card.index} -pl {default:.0f}'))}"
        yield Problem("warn", message, hint)


@check("gpu.ecc", "the memory of the cards has no errors", worst="fail", sees="gpu")
def ecc(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where results may be wrong or the card cannot repair itself; warn where a restart finishes the repair."""
    for card in _cards(node, facts):
        restart = node_commands.restart(node, facts)
        if card.repair_failed:
            message = f"GPU {card.index} has bad memory that it can no longer replace by spare memory"
            yield Problem("fail", message, "replace the card (this is a case for the warranty), or take it out of cluster.toml")
        elif card.errors_now:
            message = f"GPU {card.index} had {_errors(card.errors_now)} since its driver was loaded"
            yield Problem("fail", message, f"{restart}; if they come back, the card or its power supply is failing")
        elif card.repair_pending:
            yield Problem("warn", f"GPU {card.index} needs a restart to replace bad memory by spare memory", restart)
        elif card.errors_ever is not None and card.errors_ever > card.errors_mended:
            message = f"GPU {card.index} had {_errors(card.errors_ever)} since it was made, {card.errors_mended} of them repaired"
            yield Problem("warn", message, f"check later whether there are more: {on_node(node, nvidia_smi(facts, '-q -d ECC'))}")


@check("gpu.recovery", "no card waits for a reset", worst="fail", sees="gpu")
def recovery(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """fail where the driver itself asks for a reset or a reboot."""
    for card in _cards(node, facts):
        if card.recovery_action:
            reset = nvidia_smi(facts, f"-i {card.index} --gpu-reset")
            command = as_root(node, facts, reset) if card.recovery_action == "Reset" else node_commands.restart(node, facts)
            message = f"GPU {card.index}: the driver asks for: {card.recovery_action.lower()}"
            yield Problem("fail", message, f"end the programs that use it, then: {command}")


@check("gpu.pcie", "the cards have most of their PCIe lanes", worst="warn", sees="gpu")
def pcie(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for a card on a quarter of its lanes or less. The generation is not judged: an idle card lowers it."""
    for card in _cards(node, facts):
        lanes, could = card.pcie_width, card.pcie_width_max
        if lanes and could and lanes * FEW_LANES <= could:
            message = f"GPU {card.index} has {lanes} of {could} PCIe lanes: loading and exchange with other cards are slower"
            yield Problem(
                "warn", message, "put the card into the slot next to the processor, without a riser; an external case has fewer lanes"
            )


@check("gpu.mig", "no card is split by MIG", worst="warn", sees="gpu")
def mig(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for a card that is split: a process sees one instance of it, not the card."""
    for card in _cards(node, facts):
        if not card.mig:
            continue
        sizes = [binary_size(size) for size in card.mig_bytes if size]
        parts = f"split by MIG into {len(card.mig_bytes)} ({listed(sizes)})" if sizes else "in MIG mode, without an instance"
        message = f"GPU {card.index} is {parts}: a process gets one instance, not the card"
        yield Problem("warn", message, f"to have the whole card: {as_root(node, facts, nvidia_smi(facts, f'-i {card.index} -mig 0'))}")


def _cards(node: Node, facts: Facts) -> tuple[GpuFacts, ...]:
    """The cards that the owner trains on; none of a node without GPUs in cluster.toml."""
    return facts.gpu.cards if node.gpus else ()


def _errors(count: int) -> str:
    return f"{count} uncorrected memory error{'s' if count > 1 else ''}"
