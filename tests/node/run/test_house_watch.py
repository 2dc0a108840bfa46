"""A node looks for signs of its owner: real processes, a real file, and an `nvidia-smi` that prints what it is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.facts.reading import read
from homelab.node.run import house_watch
from homelab.node.run.house_watch import HouseWatch
from homelab.shared.protocol.house_messages import House, HouseRequest, HouseSign
from homelab.shared.protocol.message import as_json
from homelab.shared.protocol.rank_messages import RankStatus
from tests.fakes import ask_node

pytestmark = pytest.mark.timeout(60)
RUN, CARD, MIB = "2026-01-01-0000-house", "GPU-aaaa", 1 << 20
SMI = """#!/bin/sh
case "$1" in
--query-compute-apps=*) cat {0}/compute ;;
--query-gpu=*) cat {0}/memory ;;
pmon) cat {0}/draw 2>/dev/null || exit 3 ;;
*) exit 9 ;;
esac
"""
Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that is called so; its environment, too."""
    begun = []

    def started(name: str, **environment: str) -> subprocess.Popen[bytes]:
        program = tmp_path / name
        if not program.exists():
            shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
        begun.append(subprocess.Popen([program, "300"], env={**os.environ, **environment}))
        words, until_s = Path(f"/proc/{begun[-1].pid}/cmdline"), time.monotonic() + 10
        while name.encode() not in words.read_bytes():  # Popen returns a moment before a new program has its name
            assert time.monotonic() < until_s, name
            time.sleep(0.005)
        return begun[-1]

    yield started
    for process in begun:
        process.kill()
        process.wait()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run on this node, in its first attempt."""
    folder = tmp_path / "runs" / RUN
    here = folder / "attempts" / "1" / "nodes" / "tower"
    here.mkdir(parents=True)
    (here / "start.json").write_text(json.dumps({"command": [], "attempt": 1}))
    rank = {"rank": 0, "node": "tower", "local_rank": 0, "card": CARD}
    (folder / "attempts" / "1" / "plan.json").write_text(json.dumps({"run": RUN, "attempt": 1, "ranks": [rank], "nodes": []}))
    (folder / "attempts" / "1" / "ranks" / "0").mkdir(parents=True)
    return folder


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What `nvidia-smi` prints from now on."""
    folder = tmp_path / "smi"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(SMI.format(folder))
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")

    def says(used_mib: int | str = 100, **pids: Mapping[int, int | str]) -> None:
        rows = [f"{CARD}, {pid}, {mib}" for pid, mib in pids.get("compute", {}).items()]
        (folder / "compute").write_text("\n".join(rows) + "\n")
        (folder / "memory").write_text(f"0, {CARD}, {used_mib}\n")

    says()
    return says


def request(tmp_path: Path, **more: Any) -> HouseRequest:
    return HouseRequest(node="tower", workdir=str(tmp_path), **more)


def watch(run: Path, **more: Any) -> HouseWatch:
    """As the follower of the first attempt has it."""
    return HouseWatch(request(run.parents[1], **more), str(run), 1, str(run / "attempts" / "1" / "nodes" / "tower"))


def signs(house: House) -> list[str]:
    return [f"{sign.kind}:{sign.name}" for sign in house.signs]


def test_a_program_of_the_owner_and_none_of_ours(tmp_path: Path, start: Start) -> None:
    asked = {"yield_to": ("owners-game", "verylongprogramname")}
    assert house_watch.look(request(tmp_path, **asked)).signs == ()
    ours, theirs, long = start("owners-game", HOMELAB_RUN=RUN), start("owners-game"), start("verylongprogramname")
    found = house_watch.look(request(tmp_path, **asked)).signs
    assert found == (
        HouseSign(kind="program", name="owners-game", pid=theirs.pid),
        HouseSign(kind="program", name="verylongprogramname", pid=long.pid),
    )
    theirs.kill()
    theirs.wait()
    assert ours.poll() is None and signs(house_watch.look(request(tmp_path, **asked))) == ["program:verylongprogramname"]


def test_what_the_node_program_has_started_is_ours(tmp_path: Path, start: Start) -> None:
    """A check of a card computes there for seconds, and has no run."""
    script = tmp_path / "homelab-node"
    start("owners-game").kill()
    script.write_text(f"#!/bin/sh\n{tmp_path}/owners-game 300 &\necho\nwait\n")
    agent = subprocess.Popen(["sh", script, "-m", "homelab.node", "facts"], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert agent.stdout is not None and agent.stdout.readline() == b"\n"
        assert house_watch.look(request(tmp_path, yield_to=("owners-game",))).signs == ()
    finally:
        os.killpg(agent.pid, 9)
        agent.wait()
        assert agent.stdout is not None
        agent.stdout.close()


def test_the_file_of_a_person_and_the_clock_of_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "yield").touch()
    answer = as_json(ask_node("house", {"node": "tower", "workdir": str(tmp_path)}))
    assert signs(read(House, answer)) == ["asked:"]
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        here, utc = house_watch.look(request(tmp_path)).minute, time.gmtime()
        assert (here - utc.tm_hour * 60 - utc.tm_min) % 1440 in (330, 329)
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()


def test_a_stranger_on_the_card_that_was_not_there_before(run: Path, smi: Any, start: Start) -> None:
    before, rank = start("desktop-program"), start("our-rank", HOMELAB_RUN=RUN)
    smi(compute={before.pid: 300})
    house = watch(run, yield_when="gpu")
    assert house.look(asks_programs=True).signs == ()
    stranger = start("other-training")
    smi(compute={before.pid: 300, rank.pid: 6000, stranger.pid: 10, 4_000_000: 900})
    assert house.look(asks_programs=False).signs == (), "the driver is asked every other time"
    found = (HouseSign(kind="card", name="other-training", pid=stranger.pid),)
    assert house.look(asks_programs=True).signs == found
    assert watch(run, yield_when="gpu").look(asks_programs=True).signs == found, "another follower knows what was there before"
    left = request(run.parents[1], run=RUN, yield_when="gpu")
    assert house_watch.look(left).signs == found, "and so does a question after the attempt"
    assert house_watch.look(request(run.parents[1], yield_when="gpu")).signs == (), "without a run nothing is known of the card"
    assert watch(run).look(asks_programs=True).signs == (), "never, if cluster.toml does not say so"


def test_memory_that_nobody_is_told_to_have(run: Path, smi: Any, start: Start) -> None:
    """WSL: what is used more than our own ranks say of themselves, since they have trained."""
    rank = start("our-rank", HOMELAB_RUN=RUN)
    metrics = run / "attempts" / "1" / "ranks" / "0" / "metrics.jsonl"
    house = watch(run, yield_when="gpu")

    def looked(used_mib: int, own_mib: int, phase: str = "training", state: str = "R") -> list[str]:
        metrics.write_text(json.dumps({"kind": "train", "memory_bytes": own_mib * MIB}) + "\n" + json.dumps({"kind": "note"}) + "\n")
        smi(used_mib, compute={rank.pid: "[N/A]"})
        house.hear({0: RankStatus(pid=rank.pid, state=state, phase=phase)})
        return signs(house.look(asks_programs=True))

    assert looked(900, 0, "loading") == [] and looked(5000, 0) == [], "before the first step it is not known what is ours"
    assert looked(6800, 6000) == [] and looked(9000, 8200) == [], "ours may grow"
    assert looked(9000 + 1025, 8200) == ["memory:"] and looked(9000 + 1023, 8200) == []
    assert looked(15000, 8200, "loading") == []
    assert looked(700, 8200, state="Z") == [] and looked(2000, 8200, state="Z") == ["memory:"], "our ranks have left: all is others'"


def test_a_driver_that_hangs_is_asked_once_and_holds_up_no_line(
    run: Path, smi: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(house_watch, "_ANSWER_S", 0.2)
    monkeypatch.setattr(house_watch, "LOOK_S", 0.05)
    asked = tmp_path / "asked"
    (tmp_path / "smi" / "nvidia-smi").write_text(f"#!/bin/sh\necho >> {asked}\nexec sleep 2\n")
    with watch(run, yield_when="gpu") as house:
        assert house.seen is None
        deadline = time.monotonic() + 20.0
        (tmp_path / "yield").touch()
        while (house.seen is None or house.seen.signs == ()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert house.seen is not None and signs(house.seen) == ["asked:"]
    assert asked.read_text() == "\n"


def test_somebody_at_the_keyboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "seats").mkdir()
    (tmp_path / "seats" / "2").touch()
    (tmp_path / "seats" / "2.ref").touch()
    (tmp_path / "loginctl").write_text(
        '#!/bin/sh\n[ "$*" = "show-session 2 -p Remote,Class,Type,Active,IdleHint,IdleSinceHint,LockedHint" ] || exit 9\n'
        "printf 'Remote=no\\nClass=user\\nType=wayland\\nActive=yes\\nIdleHint=no\\nIdleSinceHint=0\\nLockedHint=no\\n'\n"
    )
    (tmp_path / "loginctl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(house_watch, "_SEATS", str(tmp_path / "seats"))
    assert house_watch.look(request(tmp_path, yield_when="input")).signs == (HouseSign(kind="input"),)
    assert house_watch.look(request(tmp_path)).signs == ()
