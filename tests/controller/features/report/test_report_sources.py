"""The energy of a report: from the nodes, and from what they said before where they are off now."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.features.report import report_sources
from homelab.controller.run import store
from homelab.shared.protocol.message import as_json
from homelab.shared.protocol.run_messages import CardJoules
from tests import builders
from tests.fakes import FakeFleet

CARD = CardJoules(index=0, uuid="GPU-a", name="RTX 3060", joules=3.6e6, measured_s=36000.0)


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_node_that_is_off_counts_with_what_it_said(tmp_path: Path, device: str) -> None:
    first, second = builders.NAMES[:2]
    plan = builders.plan(device=device)
    paths = builders.run_folder(tmp_path / "runs", plan=plan)
    fleet = FakeFleet(tmp_path / "nodes").answer("energies", {"attempts": {"1": [CARD]}}, [first, second])
    for name in builders.NAMES[2:]:
        fleet.answer("energies", {"attempts": {}}, [name])
    both = report_sources._energy(fleet, paths, {1: plan})
    assert sorted(both) == ([(1, name) for name in sorted((first, second))] if device == "cuda" else []), (
        "a plan for processors asks nobody"
    )
    fleet.nodes[first].is_off = True
    assert report_sources._energy(fleet, paths, {1: plan}) == both


def test_a_disk_that_refuses_the_energy_costs_no_report(tmp_path: Path) -> None:
    plan = builders.plan(device="cuda")
    paths = builders.run_folder(tmp_path / "runs", plan=plan)
    paths.energy_json.mkdir()  # it refuses root, too
    fleet = FakeFleet(tmp_path / "nodes").answer("energies", {"attempts": {"1": [CARD]}}, list(builders.NAMES))
    try:
        assert report_sources._energy(fleet, paths, {1: plan})[1, builders.NAMES[0]][0].joules == CARD.joules
        assert "it cannot be written" in store.UNWRITTEN[paths.energy_json].message
    finally:
        store.UNWRITTEN.pop(paths.energy_json, None)


def test_a_damaged_file_is_as_none(tmp_path: Path) -> None:
    paths = builders.run_folder(tmp_path / "runs", plan=builders.plan())
    store.write_json(
        paths.energy_json, {"tower": {"attempts": {"1": [{"index": "x"}]}}, "laptop": 3, "mini": {"attempts": {"2": [as_json(CARD)]}}}
    )
    found = report_sources._energy(FakeFleet(tmp_path / "nodes"), paths, {})
    assert [(place, cards[0].joules) for place, cards in found.items()] == [((2, "mini"), 3.6e6)]
