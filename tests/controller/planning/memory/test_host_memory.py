"""The memory of a rank on a CPU: of the machine, or of its control group where that leaves less."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.planning.machines.machines import RankSlot
from tests import builders
from tests.builders import NAMES

GB = 10**9


@pytest.mark.parametrize(
    ("system", "memory"),
    [
        ({}, (32 * GB, 12 * GB)),
        ({"memory_limit_bytes": 4 * GB, "memory_limit_used_bytes": 1 * GB}, (4 * GB, 1 * GB)),
        ({"memory_limit_bytes": 30 * GB, "memory_limit_used_bytes": 2 * GB}, (32 * GB, 12 * GB)),  # the machine itself has less free
        ({"memory_limit_bytes": 4 * GB, "memory_total_bytes": None, "memory_available_bytes": None}, (4 * GB, 0)),
        ({"memory_total_bytes": None, "memory_available_bytes": None}, (None, 0)),
    ],
)
def test_what_leaves_less(system: dict[str, Any], memory: tuple[int | None, int]) -> None:
    whole = {
        "memory_total_bytes": 32 * GB,
        "memory_available_bytes": 20 * GB,
        "memory_limit_bytes": None,
        "memory_limit_used_bytes": None,
        **system,
    }
    facts = builders.facts(NAMES[0])
    facts = facts.model_copy(update={"system": facts.system.model_copy(update=whole)})
    node = builders.cluster(NAMES[:1]).nodes[0]
    assert RankSlot(0, node, 0, "cpu", facts).memory() == memory
