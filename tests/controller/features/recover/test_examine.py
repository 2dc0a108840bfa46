"""What a recovery by hand knows of the nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from homelab.controller.features.recover import examine
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(60)
NOBODY = {"supervisor": None, "claim": None, "stopped_attempt": None}
END = {"returncode": 1, "signal": None, "ended_at": 990.0, "stopped": False}


@pytest.mark.parametrize(("today", "lost"), [("tower", []), ("desk", ["tower"])])
def test_a_machine_that_has_the_name_of_a_dead_one_is_not_dead(tmp_path: Path, today: str, lost: list[str]) -> None:
    """It was the laptop when the run was launched, and is to be stopped and used as such."""
    plan = builders.plan([builders.rank_plan(number, name) for number, name in enumerate(("tower", "laptop"))])
    paths = builders.run_folder(tmp_path / "runs", recipe=builders.recipe(), plan=plan)
    fleet = FakeFleet(tmp_path / "nodes", [today]).answer("supervisor-look", {"supervisor": None, "owner": NOBODY})
    ended = builders.raw_reply(today, rank=1, as_node="laptop", agent_alive=False, torchrun_alive=False, exit=END)
    fleet.answer("poll", {**ended, "owner": NOBODY})
    assert list(examine.examine(fleet, paths, lambda text: None).unreachable) == lost
