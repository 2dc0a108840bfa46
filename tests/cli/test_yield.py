"""`homelab yield` as it is typed: the answer first, and what is wrong with what was typed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from homelab.cli.main import run
from homelab.controller.run import leave_folder

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of two nodes that do not answer: nobody asks them before one is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOMELAB_CLUSTER", str(tmp_path / "cluster.toml"))
    monkeypatch.setenv("HOMELAB_RUNS", str(tmp_path / "runs"))
    nodes = "".join(f'[[nodes]]\nname = "{name}"\nhost = "127.0.0.1"\nport = {port}\n' for port, name in enumerate(("tower", "laptop"), 1))
    (tmp_path / "cluster.toml").write_text(nodes)
    return tmp_path


def test_there_and_back(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["yield", "tower", "--for", "2h"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("tower is free until ") and said[0].endswith("; no run uses it")
    assert said[-1] == "Next: homelab yield tower --back"
    assert "tower" in leave_folder.lasting(cluster / "runs")
    assert run(["yield", "tower", "--back", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "node": "tower",
        "given_back": False,
        "until": None,
        "runs": {},
        "supervised_on": {},
        "overridden": [],
    }
    assert leave_folder.lasting(cluster / "runs") == {}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (["towr"], 'Did you mean "tower"'),
        (["tower", "--for", "soon"], "is no duration"),
        (["tower", "--until", "99:00"], "is no time of day"),
        (["tower", "--for", "2h", "--until", "23:00"], "two ends are named"),
        (["tower", "--back", "--for", "2h"], "--back takes the node back now"),
        (["tower", "--back"], "there is nothing to take back"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_wrong_with_it(cluster: Path, capsys: pytest.CaptureFixture[str], typed: list[str], said: str) -> None:
    assert run(["yield", *typed]) == 2
    error = capsys.readouterr().err
    assert said in error and "where: " in error and "fix:" in error and "Traceback" not in error
    assert not (cluster / "runs" / leave_folder.NAME).exists()
