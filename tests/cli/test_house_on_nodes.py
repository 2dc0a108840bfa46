"""A node leaves by itself: a real program of its owner runs there, with the commands that a person types meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from homelab.controller.config import load
from homelab.controller.features.supervise import house_judge, supervision
from homelab.controller.run import event_log, store
from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab
from scripts.practice.desk import Desk, copy_of_cluster, wait_until
from scripts.practice.misconfigurations.node_changes import running
from tests.cli.conftest import complaint
from tests.cli.test_yield_on_nodes import SKIPPED, typed

pytestmark = pytest.mark.timeout(300)
GAME = "owners-game"
SAID = f"node2 was given back to its owner: {GAME} runs there"


@pytest.fixture
def desk(desk: Desk, cli_lab: Lab, tmp_path: Path) -> Desk:
    """node2 belongs to somebody who plays."""
    desk.cluster = copy_of_cluster(cli_lab, tmp_path / "house")
    text = desk.cluster.read_text()
    desk.cluster.write_text(text.replace('name = "node2"\n', f'name = "node2"\nyield_to = ["{GAME}"]\n'))
    assert load.load_cluster(desk.cluster).node("node2").yield_to == (GAME,)
    return desk


class Game:
    """A program that the owner of node2 starts and ends there."""

    def __init__(self, lab: Lab) -> None:
        self._lab, self._running = lab, ExitStack()
        self._program = Path(lab.state.node("node2").workdir).parent / GAME
        shutil.copy(shutil.which("sleep") or "/bin/sleep", self._program)

    def begins(self) -> None:
        self._running.enter_context(running(self._lab, "node2", str(self._program), "300"))

    def ends(self) -> None:
        self._running.close()


@pytest.fixture
def game(cli_lab: Lab) -> Iterator[Game]:
    found = Game(cli_lab)
    yield found
    found.ends()


def test_the_owner_plays_and_has_played(desk: Desk, game: Game, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house_judge, "QUIET_S", 2.0)
    game.begins()
    refused = complaint(desk, "launch", "script.toml", *SKIPPED, code=1)
    assert refused["message"] == SAID and refused["where"] == "node node2"
    assert typed(refused) == ["launch", "script.toml", "--nodes", "node1"]
    assert refused["hint"].endswith("; or take it back: homelab yield node2 --back")
    back = desk.homelab("yield", "node2", "--back").stdout.splitlines()
    assert back[:2] == ["node2 was taken back; no run waits for it", f"this counts no more until it is over once: {GAME} runs there"]
    run = desk.json("launch", "script.toml", *SKIPPED)["run"]
    paths = RunPaths(desk.folder / "runs" / run)

    def nodes_of(attempt: int) -> list[str]:
        return [node["name"] for node in store.read_object(paths.plan_json(attempt)).get("nodes", ())]

    def told(kind: str) -> list[str]:
        return [line["what"] for line in event_log.lines(paths) if line["event"] == kind]

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(supervision.supervise, load.load_cluster(desk.cluster), paths, lambda text: None)
        try:
            wait_until(lambda: desk.json("status", run)["state"] == "running", 60.0)
            game.ends()
            (kept,) = (desk.folder / "runs" / "given-back").glob("*.json")
            wait_until(lambda: store.read_object(kept)["against"] == [], 30.0, lambda: kept.read_text())
            assert nodes_of(1) == ["node1", "node2"] and not paths.plan_json(2).exists()
            game.begins()
            wait_until(lambda: nodes_of(2) == ["node1"], 60.0, lambda: str(event_log.lines(paths)))
            assert told("given-back") == [SAID]
            wait_until(lambda: SAID in desk.homelab("status", run, "--once").stdout, 30.0)
            game.ends()
            wait_until(lambda: nodes_of(3) == ["node1", "node2"], 90.0, lambda: str(event_log.lines(paths)))
            assert told("came-back") == ["node2 came back from its owner"]
            assert store.read_object(paths.supervisor_json)["restarts"] == []
            (Path(desk.lab.state.node("node2").workdir) / "yield").touch()
            wait_until(lambda: nodes_of(4) == ["node1"], 60.0, lambda: str(event_log.lines(paths)))
            assert told("given-back")[1] == "node2 was given back to its owner: somebody at the machine asked for it"
        finally:
            (Path(desk.lab.state.node("node2").workdir) / "yield").unlink(missing_ok=True)
            desk.homelab("stop", run)
            assert future.result(timeout=60) == "stopped"
