"""Of which runs a fetched folder here is the result, by what the nodes say."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.features.stop import prune
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
