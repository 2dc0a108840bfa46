"""Of which runs a fetched folder here is the result, by what the nodes say."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.base.errors import UnreachableError
from homelab.controller.features.stop import prune
from homelab.controller.run import pruning, store, supervisor_lock, supervisor_record
from homelab.shared.protocol import files
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(30)
RUN = builders.RUN


@pytest.mark.parametrize(
    ("result", "fetched", "only"),
    [
        ("final", "", "its trained model is only on tower"),
        ("final", "final", ""),
        ("final", "exports/step-00000040", "its trained model is only on tower"),
        ("saved", "", "what its program has saved is only on tower"),
        ("saved", "saved", ""),
        ("", "", ""),
    ],
)
def test_what_was_fetched_is_no_loss(tmp_path: Path, result: str, fetched: str, only: str) -> None:
    fleet = FakeFleet(tmp_path / "nodes", ["tower"])
    entry = {
        "name": RUN,
        "created_at": 9.0,
        "attempt": 1,
        "alive": False,
        "exit": {"returncode": 0, "ended_at": 9.0},
        "final": True,
        "busy": "",
    }
    fleet.answer("runs", {"runs": [entry]}).answer("run-weigh", {"runs": {RUN: {"bytes": 7, "result": result, "step": 40, "busy": ""}}})
    if fetched:
        files.write_json(tmp_path / "models" / RUN / "fetched.json", {"from": f"/home/me/homelab/runs/{RUN}/{fetched}", "files": {}})
    ((run,), _) = prune.candidates(fleet, tmp_path / "runs", tmp_path / "models", lambda text: None)
    assert (run.only, run.step, run.bytes_on) == (only, 40, {"tower": 7})


def test_a_run_that_no_node_has_any_more_can_be_removed(tmp_path: Path) -> None:
    """Its nodes were installed anew, or have left the cluster, while its last state here was "running"."""
    runs = tmp_path / "runs"
    paths = builders.run_folder(runs)
    store.set_state(paths, "running", 1)
    empty = FakeFleet(tmp_path / "nodes").answer("runs", {"runs": []}).answer("run-weigh", {"runs": {}})
    silent = FakeFleet(tmp_path / "off").answer("runs", {"runs": []})
    silent.answer("run-weigh", UnreachableError("no route to host", where="node laptop", hint="wake it"))

    def why(fleet: FakeFleet) -> tuple[str, str]:
        ((run,), _) = prune.candidates(fleet, runs, tmp_path / "models", lambda text: None)
        return run.state, pruning.choose([run], [run.name], 0)[1].get(run.name, "")

    assert why(empty) == ("lost", "")
    assert why(silent) == ("lost", "laptop, oldtower, tower could not be asked, and the run may be active there")
    with supervisor_lock.held(paths):
        assert why(empty) == ("running", "its supervisor is working here")
    supervisor_record.record_holder(paths, supervisor_record.LAUNCHING, wants_supervisor=False)
    assert why(empty) == ("running", "it is running"), "the command that launches it is at work"
