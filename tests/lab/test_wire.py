"""What preflight and plan measure between isolated nodes is the rate of their cables."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from homelab.controller.config.load import load_cluster
from homelab.controller.features.preflight import gather
from homelab.controller.remote.fanout import Fleet
from homelab.lab import Lab
from tests.lab.conftest import needs_namespaces

pytestmark = [pytest.mark.timeout(90), pytest.mark.namespaces]


@needs_namespaces
def test_the_rate_of_the_cables_is_measured(tmp_path: Path) -> None:
    with Lab.up(tmp_path / "lab", nodes=3, backend="namespaces", rate="100mbit") as lab, Fleet(load_cluster(lab.cluster_file)) as fleet:
        started = time.monotonic()
        without = gather.evidence(fleet, recipe=None, material=[], port=29500, measure_wire=False)
        assert without.throughputs == {} and len(without.links) > 6
        between = time.monotonic()
        seen = gather.evidence(fleet, recipe=None, material=[], port=29500)
        assert time.monotonic() - between < 3 * (between - started) + 20, "bounded in time"
        assert len(seen.throughputs) == 6, seen.links
        # 100 Mbit/s are 12.5 MB/s. A node that gets no CPU time for a moment counts less, or more of what has gathered meanwhile.
        rounds = [seen.throughputs]
        while not all(any(6e6 < rates[pair] < 16e6 for rates in rounds) for pair in seen.throughputs) and len(rounds) < 5:
            rounds.append(gather.evidence(fleet, recipe=None, material=[], port=29500).throughputs)
    assert all(any(6e6 < rates[pair] < 16e6 for rates in rounds) for pair in seen.throughputs), rounds
