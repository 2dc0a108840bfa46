"""The question for facts: how long it waits, and what follows from the moments of its answer."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.attempt.inputs import RecipeInput
from homelab.controller.base.errors import HomelabError
from homelab.controller.features.preflight import data_sample, gather, model_build, preflight
from homelab.node import facts
from homelab.node.probes import amd, data, gpu, nvidia, nvlink, power, xid
from homelab.node.system import c_compiler, hub
from tests import builders
from tests.controller.checks import healthy
from tests.fakes import FakeFleet

WSLINFO_S, NFT_S = 5.0, 3.0


def test_it_waits_longer_than_all_programs_of_a_node_that_hang_one_after_the_other() -> None:
    cards = 2 * nvidia.TIMEOUT_S + nvlink._TIMEOUT_S + gpu._PROBE_TIMEOUT_S
    others = c_compiler._LIMIT_S + len(xid._LOGS) * xid._TIMEOUT_S + 2 * amd._TIMEOUT_S + power._JOURNAL_S
    assert cards + others + WSLINFO_S + NFT_S + hub.CONNECT_S + 10 < gather.ALL_PROBES_S


@pytest.mark.parametrize("waits", [True, False])
def test_a_preflight_waits_for_a_node_that_reads_large_data_and_a_recovery_does_not(tmp_path: Path, waits: bool) -> None:
    fleet = FakeFleet(tmp_path).answer("facts", HomelabError("asked", where="here", hint="none"))
    material = [RecipeInput("train", "on-node", "/data/train.jsonl")]
    gather.facts(fleet, recipe=builders.recipe(), material=material, port=29500, for_person=waits)
    waited = {request["timeout_s"] for node in fleet.nodes.values() for request in node.requests}
    assert waited == {gather.ALL_PROBES_S + gather.DATA_S if waits else gather.FACTS_TIMEOUT_S}


@pytest.mark.parametrize(("offset_s", "seen_s"), [(8.0, 8.0), (-8.0, -8.0), (0.0, 0.0)])
def test_a_clock_is_compared_at_the_moment_of_its_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offset_s: float, seen_s: float
) -> None:
    """The probes go on for ten seconds after it: a clock that ran eight seconds ahead was within them."""
    now = [1_700_000_000.0]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def answer(request: Any) -> dict[str, Any]:
        read = now[0] + offset_s
        now[0] += 10.0
        return {"node": "tower", "system": {"time": read, "time_s_ago": 10.0}}

    fleet = FakeFleet(tmp_path, ["tower"]).answer("facts", answer)
    seen = gather.facts(fleet, recipe=None, material=[], port=29500)
    assert seen.clock_offsets_s["tower"] == pytest.approx(seen_s, abs=0.01)


def test_a_node_says_how_long_ago_it_read_its_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "PROBES", ("system", "data"))
    monkeypatch.setattr(data, "read", lambda request: time.sleep(0.2))
    system = facts.collect({"node": "tower", "workdir": str(tmp_path)})["system"]
    assert 0.2 <= system["time_s_ago"] < 30.0


@pytest.mark.parametrize("for_person", [True, False])
def test_ctrl_c_gives_up_nodes_that_take_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, for_person: bool) -> None:
    fleet, given_up = FakeFleet(tmp_path, ["tower", "laptop"]), threading.Event()
    monkeypatch.setattr(fleet, "give_up_all", given_up.set)

    def interrupted(request: Any) -> Any:
        raise KeyboardInterrupt

    def waits(request: Any) -> Any:
        given_up.wait(20 if for_person else 0)
        raise HomelabError("given up", where="here", hint="none")

    fleet.answer("facts", interrupted, ["tower"]).answer("facts", waits, ["laptop"])
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        gather.facts(fleet, recipe=None, material=[], port=29500, for_person=for_person)
    assert given_up.is_set() is for_person and time.monotonic() - began < 15, "a recovery asks the nodes more: it has claims to give back"


def test_ctrl_c_gives_up_the_look_at_the_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fleet, given_up = FakeFleet(tmp_path), threading.Event()
    monkeypatch.setattr(fleet, "give_up_all", given_up.set)
    seen = healthy.cpu(healthy.recipe())
    monkeypatch.setattr(gather, "facts", lambda *_, **__: seen)
    monkeypatch.setattr(data_sample, "look", lambda *_: given_up.wait(20))
    monkeypatch.setattr(model_build, "look", lambda *_: given_up.wait(20))

    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(gather, "with_links", interrupted)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        preflight.look(fleet, seen.recipe, [], skip=(), test_collective="never", run_name=lambda evidence: "run")
    assert given_up.is_set() and time.monotonic() - began < 15
