"""clock: all machines agree on the time. Heartbeats, logs and certificates are compared by it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from homelab.checks.commands import answered, on_node
from homelab.checks.evidence import Evidence, Finding, Level

ID = "clock"
WARN_S = 1.0
FAIL_S = 5.0
_SET = "sudo timedatectl set-ntp true"


def judge(evidence: Evidence) -> Iterator[Finding]:
    """ok below 1 s, fail above 5 s, warn between. Where two or more nodes agree and only the controller differs, it is to blame."""
    offsets = {
        node.name: evidence.clock_offsets_s[node.name]
        for node, _ in answered(evidence)
        if node.name in evidence.clock_offsets_s
    }
    reference = 0.0
    spread = max(offsets.values()) - min(offsets.values()) if offsets else 0.0
    if len(offsets) > 1 and spread < WARN_S and abs(median(offsets.values())) >= WARN_S:
        reference = median(offsets.values())
        yield Finding(ID, "", _level(reference), f"this machine's clock is {_skew(-reference)} all nodes'", _SET)
    for node, _ in answered(evidence):
        if node.name not in offsets:
            yield Finding(ID, node.name, "warn", "its clock could not be compared", on_node(node, "timedatectl"))
            continue
        offset = offsets[node.name] - reference
        level = _level(offset)
        if level == "ok":
            yield Finding(ID, node.name, "ok", f"within {max(abs(offset), 0.01):.2f} s")
        else:
            yield Finding(ID, node.name, level, f"its clock is {_skew(offset)} this machine's", on_node(node, _SET))


def _level(offset_s: float) -> Level:
    return "ok" if abs(offset_s) < WARN_S else "fail" if abs(offset_s) > FAIL_S else "warn"


def _skew(offset_s: float) -> str:
    return f"{abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'}"
