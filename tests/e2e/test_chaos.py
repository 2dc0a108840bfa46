"""The most telling faults of `scripts/chaos`: nobody helps, and the training is the one that nothing happened to."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest
from benchmarks.faults import catalogue
from benchmarks.faults.ground import Ground, ground
from benchmarks.faults.scene import is_exactly_once, play

from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths
from tests.lab.conftest import namespaces_missing

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(240)]

CASES = {case.name: case for case in catalogue.ALL}
# Where one node alone is to blame, the supervisor must say which.
ONE_NODE = ("worker-killed", "power-cut", "worker-frozen", "checkpoint-bit", "out-of-memory")


@pytest.fixture(scope="module")
def place() -> Iterator[Ground]:
    """A lab of its own, and the run that nothing happened to: one node computes the same, and needs no other."""
    if namespaces_missing():
        pytest.skip(namespaces_missing())
    with ground(*catalogue.FAST_LENGTH) as made:
        run = made.reference = made.launch("train.toml", "--nodes", "node1")
        deadline = time.monotonic() + 100
        while run.supervisor().get("doing") not in ("ended", "given up") and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (run.supervisor().get("why"), run.attempt()) == ("done", 1), run.logs(run.attempt())
        assert is_exactly_once(run, made.epochs)
        yield made


# Each starts the training two or three times over. A killed worker that the supervisor brings back is in test_law.py, quick; what a damaged
# checkpoint does is in tests/worker/checkpoints/test_spread.py.
@pytest.mark.thorough
@pytest.mark.parametrize("name", catalogue.FAST)
def test_survived(place: Ground, name: str) -> None:
    outcome = play(place, CASES[name], seed=1)
    if outcome.missing:
        pytest.skip(outcome.missing)
    assert outcome.survived, "\n".join([*outcome.why, *outcome.events, *outcome.log])
    restarts = store.read_object(RunPaths(place.desk.folder / "runs" / outcome.run).supervisor_json)["restarts"]
    if name in ONE_NODE:
        assert [restart["node"] for restart in restarts] == [outcome.node], restarts


@pytest.mark.thorough  # tests/benchmarks/test_chaos_scene.py has it without a lab
def test_what_this_machine_lacks_is_no_failure(place: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    found = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, *rest, **more: None if name == "cc" else found(name, *rest, **more))
    outcome = play(place, CASES["clock-jump"], seed=1)
    assert (outcome.survived, outcome.why) == (False, [])
    assert "cc is not installed" in outcome.missing and "apt install gcc" in outcome.missing
