"""power: a laptop on battery throttles its GPU, and sleeps."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.checks.commands import answered
from homelab.checks.evidence import Evidence, Finding

ID = "power"


def judge(evidence: Evidence) -> Iterator[Finding]:
    """warn on battery."""
    for node, facts in answered(evidence):
        if facts.power == "battery":
            hint = f"plug it in, then: homelab preflight --only {ID}"
            yield Finding(ID, node.name, "warn", "runs on battery: it will throttle, and may sleep", hint)
        else:
            yield Finding(ID, node.name, "ok", "on mains" if facts.power == "mains" else "no battery")
