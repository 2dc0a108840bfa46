"""What a step's seconds went into: compute, wire, wait. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from homelab.controller.dashboard.step_rate import WINDOW_STEPS
from homelab.controller.remote.poll_reply import Metric


def wire_s(of_rank: Mapping[int, Sequence[Metric]]) -> dict[int, float]:
    """Step -> seconds that the data need on the wire: of the rank that communicated for the shortest time.

    A rank's `communication_s` begins when it has its own gradients and ends with those of all. The slowest rank waits for nobody, so its time is
    the wire's; what others have more, they wait. Steps of which a rank's line is missing are left out, and old ones. One rank alone has no wire.
    """
    ranks = [
        {line.step: line.communication_s for line in lines[-WINDOW_STEPS:] if line.communication_s is not None}
        for lines in of_rank.values()
    ]
    if len(ranks) < 2:
        return {}
    common = set.intersection(*(set(seconds) for seconds in ranks))
    return {step: min(seconds[step] for seconds in ranks) for step in common}


def parts(line: Metric, wire: Mapping[int, float]) -> tuple[float | None, float | None]:
    """(wire, wait) of one rank's step, in seconds; None where other ranks have not told of this step."""
    if line.communication_s is None or line.step not in wire:
        return None, None
    return wire[line.step], max(0.0, line.communication_s - wire[line.step])
