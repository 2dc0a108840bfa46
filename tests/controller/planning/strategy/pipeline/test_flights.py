"""How many micro-batches each stage keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from homelab.controller.planning.strategy.pipeline.micro_batching import MicroBatching


def test_a_roomy_stage_before_tight_ones_keeps_only_a_few_more() -> None:
    """With more, the two would wait for each other in every first step."""
    tight: Any = SimpleNamespace(stages=6, passes=range(20), fits=lambda rank, stage, count, flight: rank == 0 or flight <= 2)
    assert MicroBatching.in_flight(tight, range(6), [4] * 6) == (10, 2, 2, 2, 2, 1)
