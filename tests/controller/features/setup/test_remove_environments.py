"""What teardown leaves on a node is named, with what a person does about it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from homelab.controller.features.setup import remove_environments
from homelab.node.setup import record
from tests import builders
from tests.fakes import FakeFleet


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFleet:
    """A node that is this machine."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return FakeFleet(
        tmp_path, ["tower"], builders.cluster(("tower",), nodes={"tower": {"host": "local", "workdir": str(tmp_path / "tower")}})
    )


def test_an_environment_that_was_moved_to_another_disk_goes_by_the_command_of_the_hint(fleet: FakeFleet, tmp_path: Path) -> None:
    record.note(record.folder())
    record.note(str(tmp_path / "home/env"))
    (tmp_path / "home/env").rename(tmp_path / "large disk")
    (tmp_path / "home/env").symlink_to(tmp_path / "large disk")
    _, errors = remove_environments.remove(fleet, ["tower"], lambda text: None)
    error = errors["tower"]
    assert error.message == f"teardown follows no link: {tmp_path}/home/env, which leads to {tmp_path}/large disk"
    command, _, again = error.hint.removeprefix("if nothing else is in there: ").partition(" && ")
    assert again == "homelab teardown tower"
    subprocess.run(command, shell=True, check=True)
    assert not (tmp_path / "large disk").exists()
    done, errors = remove_environments.remove(fleet, ["tower"], lambda text: None)
    assert not errors and done["tower"].removed and not record.read()["folders"]


def test_a_folder_that_holds_the_workdir_is_looked_at_by_a_person(fleet: FakeFleet, tmp_path: Path) -> None:
    record.write({"folders": [str(tmp_path / "tower")], "parents": [], "locks": {}})
    (tmp_path / "tower").mkdir()
    _, errors = remove_environments.remove(fleet, ["tower"], lambda text: None)
    assert f"ls -la {tmp_path}/tower" in errors["tower"].hint and errors["tower"].hint.endswith("then: homelab teardown tower")
