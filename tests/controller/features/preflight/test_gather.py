"""The question for facts: how long it waits, and what follows from the moments of its answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import HomelabError
from homelab.controller.features.preflight import gather
from homelab.node.probes import amd, gpu, nvidia, nvlink, power, xid
from homelab.node.system import c_compiler, hub
from tests import builders
from tests.fakes import FakeFleet

WSLINFO_S, NFT_S = 5.0, 3.0


def test_it_waits_longer_than_all_programs_of_a_node_that_hang_one_after_the_other() -> None:
    cards = 2 * nvidia.TIMEOUT_S + nvlink._TIMEOUT_S + gpu._PROBE_TIMEOUT_S
    others = c_compiler._LIMIT_S + len(xid._LOGS) * xid._TIMEOUT_S + 2 * amd._TIMEOUT_S + power._JOURNAL_S
    assert cards + others + WSLINFO_S + NFT_S + hub.CONNECT_S + 10 < gather.FACTS_TIMEOUT_S


@pytest.mark.parametrize("waits", [True, False])
def test_a_preflight_waits_for_a_node_that_reads_large_data_and_a_recovery_does_not(tmp_path: Path, waits: bool) -> None:
    fleet = FakeFleet(tmp_path).answer("facts", HomelabError("asked", where="here", hint="none"))
    data = [RecipeInput("train", "on-node", "/data/train.jsonl")]
    gather.facts(fleet, recipe=builders.recipe(), material=data, port=29500, waits_for_data=waits)
    waited = {request["timeout_s"] for node in fleet.nodes.values() for request in node.requests}
    assert waited == {gather.FACTS_TIMEOUT_S + (gather.DATA_S if waits else 0)}
