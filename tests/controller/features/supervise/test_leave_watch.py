"""Who is with an owner: typed, or said by a node in its status lines or when it is asked; and what the events tell of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.controller.attempt.watchdog import NodeStatus
from homelab.controller.features.supervise import house_judge, house_monitor
from homelab.controller.features.supervise.leave_watch import LeaveWatch
from homelab.controller.run import event_log, leave_folder
from homelab.controller.run.leave import HOURS, Away, Leave
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.house_messages import House, HouseSign
from tests import builders
from tests.fakes import FakeFleet

pytestmark = pytest.mark.timeout(30)
NAMES = ("tower", "laptop")
STEAM = HouseSign(kind="program", name="steam", pid=7)


class Nodes:
    """A run's watch, and what its nodes say each second of a time that passes at once."""

    def __init__(self, paths: RunPaths, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths, self.fleet, self.said = paths, fleet, dict[str, House]()
        self.silent_s = 0.0
        self.now_s = float(int(time.monotonic()))  # whole seconds: their sums and differences are exact
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        self.free: tuple[str, ...] = ()
        self.watch = self.begins()

    def begins(self) -> LeaveWatch:
        """A supervisor that is started, perhaps again."""
        self.watch = LeaveWatch(
            self.paths,
            self.fleet.cluster,
            lambda: {name: NodeStatus(attempt=1, house=one, heard_s=self.silent_s) for name, one in self.said.items()},
        )
        return self.watch

    def passes(self, seconds: float) -> dict[str, Away]:
        for _ in range(round(seconds)):
            self.now_s += 1.0
            self.watch.look(1, self.free)
        return dict(self.watch.away)

    def events(self) -> list[str]:
        return [line["what"] for line in event_log.lines(self.paths) if line["event"] in ("given-back", "came-back")]


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setattr(house_monitor.HouseMonitor, "_ask", lambda *_: None)
    cluster = builders.cluster(NAMES, nodes={"laptop": {"hours": "23:00-07:00"}})
    fleet = FakeFleet(tmp_path / "nodes", NAMES, cluster)
    found = Nodes(builders.run_folder(tmp_path / "runs"), fleet, monkeypatch)
    yield found
    found.watch.close()


def test_a_node_that_says_so_goes_and_comes(nodes: Nodes) -> None:
    nodes.said = {"tower": House(minute=0, signs=(STEAM,)), "laptop": House(minute=0)}
    assert nodes.passes(4) == {"tower": Away("", "steam runs there")}
    assert nodes.events() == [], "it is not free yet: the run saves"
    nodes.free = ("tower",)
    nodes.passes(1)
    assert nodes.watch.lent == {"tower"}
    nodes.said["tower"] = House(minute=0)
    assert nodes.passes(house_judge.QUIET_S) != {} and nodes.passes(1) == {}
    assert nodes.events() == ["tower was given back to its owner: steam runs there", "tower came back from its owner"]


def test_a_node_that_is_outside_its_hours(nodes: Nodes) -> None:
    nodes.said, nodes.free = {"laptop": House(minute=7 * 60)}, ("laptop",)
    assert nodes.passes(1) == {"laptop": Away("23:00", HOURS)}
    nodes.said["laptop"] = House(minute=23 * 60)
    assert nodes.passes(1) == {}
    assert nodes.events()[0] == "laptop was given back to its owner until 23:00: it is outside its hours"


def test_whoever_takes_it_back_by_hand_has_it_until_the_sign_has_gone_once(nodes: Nodes) -> None:
    runs_dir = nodes.paths.root.parent
    nodes.said, nodes.free = {"tower": House(minute=0, signs=(STEAM,))}, ("tower",)
    nodes.passes(4)
    leave_folder.write(runs_dir, Leave(node="tower", since=time.time(), is_back=True, against=("program:steam",)))
    assert nodes.passes(1) == {} and nodes.passes(1000) == {}
    nodes.watch.close()
    nodes.begins()
    assert nodes.passes(1000) == {}, "nor does a supervisor that is started again leave it"
    nodes.said["tower"] = House(minute=0)
    nodes.passes(1)
    assert leave_folder.read(runs_dir)["tower"].against == ()
    nodes.said["tower"] = House(minute=0, signs=(STEAM,))
    assert nodes.passes(4) == {"tower": Away("", "steam runs there")}
    nodes.passes(100)
    assert nodes.passes(1) != {}, "the file of an earlier wish takes nothing back"


def test_what_another_supervisor_notes_in_the_file_takes_nothing_back(nodes: Nodes) -> None:
    """Two runs use the node, each with a supervisor, and both write down which signs have gone."""
    runs_dir, back = nodes.paths.root.parent, Leave(node="tower", since=5.0, is_back=True, against=("program:blender", "input:"))
    leave_folder.write(runs_dir, back)
    nodes.begins()
    nodes.said, nodes.free = {}, ("tower",)
    nodes.said = {"tower": House(minute=0, signs=(STEAM, HouseSign(kind="program", name="blender", pid=9), HouseSign(kind="input")))}
    assert nodes.passes(4) == {"tower": Away("", "steam runs there")}
    leave_folder.write(runs_dir, back.model_copy(update={"against": ("input:",)}))
    assert nodes.passes(1) == {"tower": Away("", "steam runs there")}
    leave_folder.write(runs_dir, back.model_copy(update={"since": 6.0}))
    assert nodes.passes(1) == {}, "a new wish does"


def test_what_was_said_before_it_was_lent_overrides_nothing(nodes: Nodes) -> None:
    """A node that a person has lent is not asked: its last word is older than the game for which it was lent."""
    nodes.said = {"tower": House(minute=0)}
    nodes.passes(1)
    runs_dir = nodes.paths.root.parent
    leave_folder.write(runs_dir, Leave(node="tower", since=time.time() - 60))
    nodes.said = {}
    nodes.passes(1)
    leave_folder.write(runs_dir, Leave(node="tower", since=time.time(), is_back=True, against=("program:steam",)))
    assert nodes.passes(2) == {}
    assert leave_folder.read(runs_dir)["tower"].against == ("program:steam",)
    nodes.said = {"tower": House(minute=0, signs=(STEAM,))}
    assert nodes.passes(10) == {}, "the person wants it although steam runs there"


def test_when_the_run_is_over_every_sign_counts_again(nodes: Nodes) -> None:
    runs_dir = nodes.paths.root.parent
    leave_folder.write(runs_dir, Leave(node="tower", since=time.time(), is_back=True, against=("program:steam",)))
    nodes.said = {"tower": House(minute=0, signs=(STEAM,))}
    assert nodes.passes(5) == {}
    nodes.watch.forget_overrides()
    assert leave_folder.read(runs_dir)["tower"].against == ()


def test_the_last_line_of_a_stream_that_has_ended_is_older_than_an_answer(nodes: Nodes) -> None:
    nodes.said = {"tower": House(minute=0, signs=(STEAM,))}
    nodes.passes(1)
    nodes.silent_s = 20.0
    nodes.watch._monitor._sights["tower"] = House(minute=0), nodes.now_s
    assert nodes.passes(10) == {} and nodes.watch._monitor.sights()["tower"][0].signs == ()


def test_a_supervisor_that_is_started_again_does_not_call_it_back(nodes: Nodes) -> None:
    leave_folder.write(nodes.paths.root.parent, Leave(node="tower", since=time.time() - 1e6, is_back=True))
    nodes.said, nodes.free = {"tower": House(minute=0, signs=(STEAM,))}, ("tower",)
    nodes.passes(4)
    nodes.watch.close()
    nodes.begins()
    nodes.said = {}
    assert nodes.passes(5) == {"tower": Away("", "steam runs there")}, "before it has heard anything"
    nodes.said = {"tower": House(minute=0)}
    assert nodes.passes(house_judge.QUIET_S) != {} and nodes.passes(1) == {}
    assert nodes.events() == ["tower was given back to its owner: steam runs there", "tower came back from its owner"]


def test_a_typed_leave_goes_before_and_the_game_after_it_counts(nodes: Nodes) -> None:
    nodes.said, nodes.free = {"tower": House(minute=0, signs=(STEAM,))}, ("tower",)
    leave_folder.write(nodes.paths.root.parent, Leave(node="tower", since=time.time()))
    assert nodes.passes(4) == {"tower": Away()}
    leave_folder.write(nodes.paths.root.parent, Leave(node="tower", since=time.time() - 1.0, until=time.time() - 0.5))
    assert nodes.passes(1) == {"tower": Away("", "steam runs there")}
    assert nodes.events() == ["tower was given back to its owner", "tower was given back to its owner: steam runs there"]


def test_nodes_that_nobody_follows_are_asked_and_those_that_were_given_away_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house_monitor, "ASK_S", 0.02)
    monkeypatch.setattr(house_judge, "STAYS_S", 0.1)
    cluster = builders.cluster((*NAMES, "oldtower"), nodes={"tower": {"yield_to": ("steam",), "yield_when": "gpu"}})
    fleet = FakeFleet(tmp_path / "nodes", cluster=cluster).replace_connections(monkeypatch).answer("house", House(minute=0, signs=(STEAM,)))
    fleet.answer("house", {"minute": 5000, "signs": []}, ["oldtower"])
    paths = builders.run_folder(tmp_path / "runs")
    leave_folder.write(paths.root.parent, Leave(node="laptop", since=time.time()))
    watch = LeaveWatch(paths, cluster, dict)
    watch.look(1, ())
    deadline = time.monotonic() + 20.0
    while set(watch.look(1, ())) != {"tower", "laptop"} and time.monotonic() < deadline:
        time.sleep(0.01)
    watch.close()
    assert watch.away == {"tower": Away("", "steam runs there"), "laptop": Away()}, "oldtower says what cannot be"
    asked = fleet.nodes["tower"].requests[0]
    assert (asked["run"], asked["yield_to"], asked["yield_when"]) == (paths.name, ["steam"], "gpu")
    assert fleet.verbs("house").count("laptop") <= 1
