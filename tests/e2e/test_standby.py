"""A fault whose next attempt is done by processes that waited for it: the training is the one that nothing happened to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.controller.attempt import start
from homelab.controller.run import store
from homelab.lab import Lab
from homelab.shared.protocol import files, waiting_mark
from scripts.practice.desk import Desk, Run, wait_until
from tests.e2e.test_supervisor import of_run, wait_for_attempt
from tests.e2e.test_yield import NODES, STEPS, assert_lawful, looked_after, undisturbed  # noqa: F401

pytestmark = [pytest.mark.slow, pytest.mark.namespaces, pytest.mark.timeout(600), pytest.mark.thorough]


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The supervisor is in this process: from the second attempt on nodes prepare the next one at its first steps."""
    monkeypatch.setattr(start, "_STANDBY_AFTER_S", 0.0)
    yield


def waiting(lab: Lab, run: Run) -> dict[str, list[int]]:
    """Node -> its ranks that wait with their imports done."""
    return {
        node: [pid for pid in pids if files.text(f"/proc/{pid}/comm") == waiting_mark.WAITS]
        for node, pids in lab.processes_of_run(run.name).items()
    }


def test_two_faults_one_without_and_one_with_processes_that_wait(desk: Desk, lab: Lab, undisturbed: Run) -> None:  # noqa: F811
    run = desk.launch("house.toml")
    paths = of_run(desk, run)
    with looked_after(desk, run) as end:
        run.wait_for_step(1, 20)
        lab.fault("node2", "kill-worker")
        wait_for_attempt(paths, 2)
        wait_until(lambda: all(len(pids) == 1 for pids in waiting(lab, run).values()), 60)
        held = {node: pids[0] for node, pids in waiting(lab, run).items()}
        lab.fault("node3", "kill-worker")
        wait_for_attempt(paths, 3)
        run.wait_for_step(3, store.read_object(paths.plan_json(3))["resume_step"] + 1)
        for node in NODES:
            assert files.text(f"/proc/{held[node]}/comm") == waiting_mark.AT_WORK, "the same process does the third attempt"
            environment = Path(f"/proc/{held[node]}/environ").read_bytes()
            assert waiting_mark.VARIABLE.encode() in environment
        assert end.result(timeout=300) == "done"
    assert run.attempts() == [1, 2, 3]
    assert_lawful(run, undisturbed)
    assert not any(lab.processes_of_run(run.name).values())


def test_a_stop_by_hand_ends_those_that_wait(desk: Desk, lab: Lab, undisturbed: Run) -> None:  # noqa: F811
    run = desk.launch("house.toml")
    paths = of_run(desk, run)
    with looked_after(desk, run):
        run.wait_for_step(1, 20)
        lab.fault("node2", "kill-worker")
        wait_for_attempt(paths, 2)
        wait_until(lambda: all(len(pids) == 1 for pids in waiting(lab, run).values()), 60)
        assert desk.json("stop", run.name)["clean"]
        assert not any(lab.processes_of_run(run.name).values())
    assert desk.json("status", run.name, code=None)["state"] == "stopped"
