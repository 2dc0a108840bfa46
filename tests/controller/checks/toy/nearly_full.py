"""A check as somebody adds one: this function, and disk.nearly_full.toml beside it."""

from __future__ import annotations

from collections.abc import Iterator

from homelab.controller.checks.check import Problem, check
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import Node
from homelab.controller.facts.node import Facts


@check("disk.nearly_full", "a tenth of the disk is free", worst="warn", sees="resources", after="disk.room")
def nearly_full(evidence: Evidence, node: Node, facts: Facts) -> Iterator[Problem]:
    """warn for a disk that is nearly full."""
    free, total = facts.resources.disk_free_bytes, facts.resources.disk_total_bytes
    if free is not None and total is not None and 10 * free < total:
        yield Problem("warn", f"{free / total:.0%} of the disk is free", "df -h")
