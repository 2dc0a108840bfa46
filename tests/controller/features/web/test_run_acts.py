"""What a page may do with a run, without a node: who may, in which form, one at a time; and the command's words are text. The command is played."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.dashboard.snapshot_builder import next_commands
from homelab.controller.features.web import act_words
from scripts.practice.desk import wait_until
from tests.controller.dashboard import sample
from tests.controller.features.web.test_web_server import DONE, FAILED, Site

pytest.importorskip("starlette", reason="homelab web needs it: pip install '.[web]'")
pytest.importorskip("uvicorn", reason="homelab web needs it: pip install '.[web]'")
from homelab.controller.features.web import run_acts
from tests.controller.features.web.test_page_chats import EVIL, OWN, Request, Talk, played, until

pytestmark = pytest.mark.timeout(60)
STOP = {"run": DONE, "act": "stop"}
# In place of our own command: it says its words, and ends when its test wants it.
_PLAYED = """
import os, sys, time
os.chdir(%r)
print(sys.stdin.read() == "", sys.argv[1:], file=open("began", "a"))
sys.stdout.buffer.write(open("words", "rb").read())
sys.stdout.flush()
while os.path.exists("stay"):
    time.sleep(0.02)
print("ended", file=open("ended", "a"))
sys.exit(int(open("code").read()))
"""


class Player:
    """The played command: it `says` these words, ends with this code, and not before `let_go` if it stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "path" / "homelab").mkdir(parents=True)
        (folder / "path" / "homelab" / "__init__.py").touch()
        (folder / "path" / "homelab" / "__main__.py").write_text(_PLAYED % str(folder))
        self.says(b"node1: 2 processes ended; verified, nothing is left\n")

    def says(self, words: bytes, code: int = 0, *, stays: bool = False) -> None:
        (self.folder / "words").write_bytes(words)
        (self.folder / "code").write_text(str(code))
        if stays:
            (self.folder / "stay").touch()

    def let_go(self) -> None:
        (self.folder / "stay").unlink()

    def noted(self, name: str) -> list[str]:
        """A line for each one that has `began` or `ended`."""
        file = self.folder / name
        return file.read_text().splitlines() if file.exists() else []


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch).with_runs()


@pytest.fixture
def player(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Player:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "player" / "path"))
    monkeypatch.setenv("HOMELAB_CLUSTER", str(tmp_path / "no-cluster.toml"))  # for the real command, which must not run here
    monkeypatch.setattr(run_acts, "_LOOK_S", 0.02)
    return Player(tmp_path / "player")


@pytest.fixture
def typed() -> Iterator[None]:
    """A "yes" waits on the standard input of this process."""
    kept = os.dup(0)
    with tempfile.TemporaryFile() as file:
        file.write(b"y\n")
        file.seek(0)
        os.dup2(file.fileno(), 0)
        yield
        os.dup2(kept, 0)
    os.close(kept)


async def ended(page: Request) -> dict[str, Any]:
    found: dict[str, Any] = await page.event("ended")
    await asyncio.wait_for(page.task, 20)
    return found


@pytest.mark.usefixtures("typed")
def test_the_command_runs_as_shown_without_a_terminal_and_its_end_is_told(site: Site, player: Player) -> None:
    async def work(talk: Talk) -> None:
        page = talk.post("/act", STOP)
        assert await page.event("began") == f"homelab stop {DONE}"
        line = "node1: 2 processes ended; verified, nothing is left"
        assert await ended(page) == {"code": 0, "words": "it is done (exit code 0)", "answer": line, "error": None}
        assert [event["line"] for event in page.told if "line" in event] == [line] and page.status == 200
        player.says(b". halting\nerror: this run trains\nwhere: a run\nfix:   homelab status\n", 2)
        second = await ended(talk.post("/act", {**STOP, "act": "recover"}))
        assert second["words"] == "it was refused (exit code 2)"
        assert second["error"] == {"message": "this run trains", "where": "a run", "hint": "homelab status"}

    played(site, work)
    assert player.noted("began") == [f"True ['stop', '{DONE}']", f"True ['recover', '{DONE}']"], "nothing answers a question"


def test_a_hostile_line_is_text_and_has_an_end(site: Site, player: Player) -> None:
    long = b"x" * 3_000_000
    player.says(EVIL.encode() + b"\n" + long + b"\n\xff\xfe\n" + b"line\n" * 2000 + b"the last, without an end")

    async def work(talk: Talk) -> None:
        page = talk.post("/act", STOP)
        assert (await ended(page))["answer"] == "<img src=x onerror=window.hit=1>"
        lines = [event["line"] for event in page.told if "line" in event]
        assert lines[0] == "<img src=x onerror=window.hit=1>" and max(map(len, lines)) == run_acts.MOST_LINE + 1
        assert len(lines) == run_acts.MOST_LINES + 1 and lines[-1] == f"… {2004 - run_acts.MOST_LINES} more lines"

    played(site, work)


def test_what_is_not_of_this_form_begins_nothing(site: Site, player: Player) -> None:
    bodies: list[Any] = [
        None, [], {}, {"run": DONE}, {"act": "stop"}, {**STOP, "act": "launch"}, {**STOP, "act": "stop --orphans"}, {**STOP, "act": ["stop"]}, {**STOP, "run": ""},
        {**STOP, "run": 5}, {**STOP, "run": "x" * 201}, {**STOP, "yes": True},
    ]  # fmt: skip

    async def work(talk: Talk) -> None:
        for body in bodies:
            assert (await talk.done("/act", body))[0] == 400, body
        for kind in ("", "text/plain", "application/x-www-form-urlencoded"):
            assert (await talk.done("/act", STOP, **{"content-type": kind}))[0] == 415, kind
        request = Request(talk.made, "/act", [b'{"run": "'] + [b"x" * 4096] * 1000, **OWN)
        await request.task
        assert request.status == 413 and request.blocks_read < 5
        for run in (
            "nobody",
            DONE[:-1],
            DONE[5:],
            "--orphans",
            "-h",
            "../" + DONE,
            f"{DONE} --orphans",
            f"{DONE}; touch pwned",
            "\u202e" + DONE,
        ):
            status, said = await talk.done("/act", {**STOP, "run": run})
            error = json.loads(said)["error"]
            assert (
                status == 404 and error["message"].startswith("no run is called") and error["where"] and error["hint"] == "homelab runs"
            ), run

    played(site, work)
    assert player.noted("began") == []


def test_a_page_that_is_open_to_the_network_does_not_act(site: Site, player: Player) -> None:
    async def work(talk: Talk) -> None:
        request = talk.post("/act", STOP)
        await request.task
        error = json.loads(request.text)["error"]
        assert request.status == 403 and request.blocks_read == 0 and all(error.values()) and "homelab web" in error["hint"]
        page = Request(talk.made, f"/live?run={DONE}", b"", "GET", **OWN)
        await until(lambda: "event: run" in page.text, "the run was not told")
        may = json.loads(page.text.partition("event: may\ndata: ")[2].partition("\n")[0])
        assert may["does_act"] is False and "so its buttons do not act" in may["why_not"]
        await page.leave()

    played(site, work, does_act=False)
    assert player.noted("began") == []


def test_one_at_a_time_for_a_run(site: Site, player: Player) -> None:
    player.says(b". at work\n", stays=True)

    async def work(talk: Talk) -> None:
        both = [talk.post("/act", STOP), talk.post("/act", {**STOP, "act": "recover"})]
        (refused,) = await until(lambda: [page for page in both if page.status == 409], "none was refused")
        (first,) = [page for page in both if page is not refused]
        error = json.loads(refused.text)["error"]
        assert error["message"].startswith(f"a page has begun homelab stop {DONE}") and DONE in error["where"] and error["hint"]
        other = talk.post("/act", {**STOP, "run": FAILED})
        assert await other.event("line") == ". at work", "another run"
        player.let_go()
        await asyncio.gather(ended(first), ended(other))
        assert (await ended(talk.post("/act", STOP)))["code"] == 0, "then again"

    played(site, work)
    assert len(player.noted("began")) == 3


def test_it_goes_on_if_the_page_is_closed(site: Site, player: Player) -> None:
    player.says(b". at work\n", stays=True)

    async def work(talk: Talk) -> None:
        page = talk.post("/act", STOP)
        await page.event("line")
        await page.leave()
        assert (await talk.done("/act", STOP))[0] == 409, "it is still there"
        player.let_go()
        await until(lambda: player.noted("ended"), "it does not come to its end")
        await until(lambda: not talk.acts._under_way, "the server still waits for it")

    played(site, work)


def test_it_ends_with_the_server_by_sigterm_and_then_none_begins(site: Site, player: Player) -> None:
    player.says(b". at work\n", stays=True)

    async def work(talk: Talk) -> None:
        page = talk.post("/act", STOP)
        await page.event("line")
        await talk.acts.close()
        assert await ended(page) == {
            "code": -signal.SIGTERM, "words": f"it was ended by signal {signal.SIGTERM} (exit code {-signal.SIGTERM})", "answer": "", "error": None,
        }  # fmt: skip
        assert talk.acts.cut == [f"homelab stop {DONE}"]
        status, said = await talk.done("/act", STOP)
        assert status == 409 and "homelab web is ending" in said and f"homelab stop {DONE}" in said

    played(site, work)
    assert len(player.noted("began")) == 1


def test_what_does_not_start_is_told(site: Site, player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")

    async def work(talk: Talk) -> None:
        status, said = await talk.done("/act", STOP)
        error = json.loads(said)["error"]
        assert status == 503 and "the command does not start" in error["message"] and error["hint"] == f"in a terminal: homelab stop {DONE}"

    played(site, work)


def test_a_server_that_is_killed_cuts_nothing(tmp_path: Path, player: Player) -> None:
    """What the command says goes to a file: nobody has to read it."""
    player.says(b"x" * 1_000_000, stays=True)
    program = (
        "import asyncio, os, signal, sys\nsys.path.insert(0, sys.argv[1])\nfrom homelab.controller.base.hint import homelab\n"
        "from homelab.controller.features.web.run_acts import RunAct\nasync def main():\n    RunAct(homelab('stop', 'run'))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\nasyncio.run(main())\n"
    )
    server = subprocess.run([sys.executable, "-c", program, str(Path(__file__).parents[4])], check=False)
    assert server.returncode == -signal.SIGKILL
    player.let_go()
    wait_until(lambda: bool(player.noted("ended")), 20, lambda: "it does not come to its end")


@pytest.mark.parametrize(
    ("state", "checkpoints", "said"),
    [
        ("running", (400,), {"stop": "The training ends on all its nodes; a later recovery goes on from the checkpoint of step 400 and does 12 steps again."}),
        ("running", (412,), {"stop": "The training ends on all its nodes; a later recovery goes on from the checkpoint of step 412 and repeats no step."}),
        ("starting", (), {"stop": "The training ends on all its nodes; its checkpoints stay."}),
        ("failed", (400, 411), {"recover": "The run goes on from the checkpoint of step 411, on the nodes that are well, and does 1 step again."}),
        ("stopped", (), {"recover": "The run goes on from its newest checkpoint, on the nodes that are well."}),
        ("done", (400,), {}), ("planned", (), {}), ("shipping", (), {}),
    ],
)  # fmt: skip
def test_a_button_says_what_comes_of_it(state: Any, checkpoints: tuple[int, ...], said: dict[str, str]) -> None:
    snapshot = sample.snapshot()
    snapshot = snapshot.model_copy(
        update={"state": state, "checkpoint_steps": checkpoints, "next_commands": next_commands(state, snapshot.run)}
    )
    offered = act_words.offered(snapshot)
    assert {one["act"]: one["will"] for one in offered} == said
    assert all(one["command"] == f"homelab {one['act']} {snapshot.run}" for one in offered)


def test_an_error_is_read_whole() -> None:
    lines = [
        ". at work",
        "╭─ why ─╮",
        "│ it was killed │",
        "╰──╯",
        "",
        "answer",
        "error: an old one",
        "fix:   that",
        ". more",
        "error: two",
        "  error: quoted",
        "where: there",
        "fix:   this: or",
        "that",
        "warning: x",
        "where:   y",
    ]
    found = act_words.ended(1, lines)
    assert found["error"] == {"message": "two\nerror: quoted", "where": "there", "hint": "this: or\nthat"} and found["answer"] == "answer"
    assert (
        act_words.ended(0, lines)["error"] is None
        and act_words.ended(3, ["node2: could not be asked"])["words"] == "a node could not be asked (exit code 3)"
    )
