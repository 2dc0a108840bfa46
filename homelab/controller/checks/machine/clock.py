"""clock: all machines have the same time. Heartbeats, logs and certificates are compared by it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from homelab.controller.base.hint import Hint
from homelab.controller.checks.check import Problem, check, subject
from homelab.controller.checks.evidence import Evidence, Level, answered
from homelab.controller.checks.machine.install_commands import in_wsl
from homelab.controller.config.cluster import Node
from homelab.controller.facts.node import Facts
from homelab.controller.facts.node_commands import as_root, on_node

WARN_S = 1.0
FAIL_S = 5.0
_SET = "timedatectl set-ntp true"


@check("clock.skew", f"no clock is more than {WARN_S:.0f} s off ({FAIL_S:.0f} s: fail)", worst="fail", sees="login")
def skew(evidence: Evidence) -> Iterator[tuple[str, Problem]]:
    """ok below 1 s, fail above 5 s, warn between. Where two or more nodes agree and only the controller differs, it is to blame."""
    offsets = {node.name: evidence.clock_offsets_s[node.name] for node, _ in answered(evidence) if node.name in evidence.clock_offsets_s}
    reference = _reference(offsets)
    if reference:
        message = f"this machine's clock is {_skew(-reference)} all nodes'"
        yield "", Problem(_level(reference), message, f"sudo {_SET} (in WSL: sudo hwclock -s)")
    for node, facts in answered(evidence):
        if node.name not in offsets:
            yield node.name, Problem("warn", "its clock could not be compared", on_node(node, "timedatectl"))
            continue
        offset = offsets[node.name] - reference
        level = _level(offset)
        if level != "ok":
            # The clock of a WSL2 stands still while Windows sleeps, and no service inside of it sets it.
            fix = as_root(node, facts, "hwclock -s" if in_wsl(facts) else _SET)
            hint = Hint("{} (or in PowerShell: wsl --shutdown)", fix) if in_wsl(facts) else ""
            yield node.name, Problem(level, f"its clock is {_skew(offset)} this machine's", hint, fix)


def _reference(offsets: dict[str, float]) -> float:
    """The offset of all nodes together, where they agree and this machine alone is off; 0 otherwise."""
    spread = max(offsets.values()) - min(offsets.values()) if offsets else 0.0
    if len(offsets) > 1 and spread < WARN_S and abs(median(offsets.values())) >= WARN_S:
        return median(offsets.values())
    return 0.0


def _level(offset_s: float) -> Level:
    return "ok" if abs(offset_s) < WARN_S else "fail" if abs(offset_s) > FAIL_S else "warn"


def _skew(offset_s: float) -> str:
    size = f"{abs(offset_s):.1f} s" if abs(offset_s) < 86400 else f"{min(abs(offset_s) / 86400, 1e6):.0f} days"
    return f"{size} {'ahead of' if offset_s > 0 else 'behind'}"


@subject("clock", "all machines have the same time", after="ssh")
def _summary(evidence: Evidence, node: Node, facts: Facts) -> str:
    offset = evidence.clock_offsets_s[node.name] - _reference(dict(evidence.clock_offsets_s))
    return f"within {max(abs(offset), 0.01):.2f} s"
