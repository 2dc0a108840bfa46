"""A page of `homelab web` stops and recovers a real run on practice nodes, its stream tells the new state, and nothing is left."""

from __future__ import annotations

import http.client
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.lab import Lab
from scripts.practice.desk import Desk, copy_of_cluster, left_on, wait_until
from tests.controller.features.web.test_chat_ends import Page, served

pytest.importorskip("starlette", reason="homelab web needs it: pip install '.[web]'")
pytest.importorskip("uvicorn", reason="homelab web needs it: pip install '.[web]'")

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a practice node needs Linux")]
# Each rank saves step 10 at once, and says where it began.
TRAIN = """
import os, time
saved = os.environ["HOMELAB_CHECKPOINT_DIR"]
print("begins with", sorted(os.listdir(saved)) if os.path.isdir(saved) else [], flush=True)
os.makedirs(saved, exist_ok=True)
if not os.path.exists(os.path.join(saved, "step-10.pt")):
    with open(os.path.join(saved, ".step-10.pt"), "w") as file:
        file.write("weights")
    os.rename(file.name, os.path.join(saved, "step-10.pt"))
print("saved", flush=True)
time.sleep(300)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab.up(tmp_path_factory.mktemp("acts") / "lab", nodes=1) as started:
        yield started


@pytest.fixture
def desk(lab: Lab, tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path, lab)
    desk.write("script.toml", '[script]\npath = "train.py"\n')
    desk.write("train.py", TRAIN)
    yield desk
    wait_until(lambda: not left_on(lab), 20.0, lambda: f"left on the nodes: {left_on(lab)}")


class Stream:
    """What a page is told of a run."""

    def __init__(self, page: Page, run: str) -> None:
        self._connection = http.client.HTTPConnection(page.host, timeout=60)
        self._connection.request("GET", f"/live?run={run}", headers={"Cookie": f"homelab-{page.host.partition(':')[2]}={page.token}"})
        self._lines = self._connection.getresponse()

    def until(self, state: str) -> dict[str, Any]:
        """The run in this state, as its nodes say it."""
        kind = ""
        while line := self._lines.readline().decode():
            if line.startswith("event: "):
                kind = line[7:].strip()
            elif line.startswith("data: ") and kind == "run":
                run: dict[str, Any] = json.loads(line[6:])
                if run["is_asked"] and run["state"] == state:
                    return run
        raise AssertionError(f"the stream ended before the run was {state}")

    def close(self) -> None:
        self._lines.close()
        self._connection.close()


def acted(page: Page, run: str, act: str) -> dict[str, Any]:
    """The end of a command that a page began; the lines before it in `lines`."""
    connection, answer = page.post("/act", {"run": run, "act": act})
    told = [json.loads(line) for line in answer.read().splitlines() if line.strip()]
    connection.close()
    assert answer.status == 200, told
    return {**told[-1]["ended"], "lines": [event["line"] for event in told if "line" in event]}


def trains(lab: Lab) -> bool:
    return any("train.py" in words for words in left_on(lab).values())


@pytest.mark.slow
def test_a_run_is_stopped_and_recovered_but_not_where_nobody_has_confirmed_it(desk: Desk, lab: Lab, tmp_path: Path) -> None:
    run = desk.launch("script.toml")
    run.wait_for_output(1, "node1", "saved")
    assert trains(lab), "the control"
    with served(desk._environment(), desk.folder) as page:
        stream = Stream(page, run.name)
        assert [one["act"] for one in stream.until("running")["acts"]] == ["stop"]
        stopped = acted(page, run.name, "stop")
        assert stopped["code"] == 0 and stopped["error"] is None and "verified, nothing is left" in stopped["answer"], stopped
        assert any(line.startswith(". stopping") for line in stopped["lines"]) and not trains(lab)
        shown = stream.until("stopped")
        assert [(one["act"], one["command"]) for one in shown["acts"]] == [("recover", f"homelab recover {run.name}")]
        recovered = acted(page, run.name, "recover")
        assert recovered["code"] == 0 and recovered["answer"].startswith(f"{run.name}: "), recovered
        assert stream.until("running")["attempt"] == 2
        run.wait_for_output(2, "node1", "begins with ['step-10.pt']")
        refused = acted(page, run.name, "recover")
        assert refused["code"] != 0 and all(refused["error"].values()), refused
        assert acted(page, run.name, "stop")["code"] == 0
        stream.until("stopped")
        stream.close()
    elsewhere = Desk(tmp_path / "second laptop", lab, copy_of_cluster(lab, tmp_path / "second laptop"))
    with served(elsewhere._environment(), elsewhere.folder) as page:
        end = acted(page, run.name, "recover")
    assert end["error"]["message"] == "there is no terminal to ask whether the nodes may run it", end
    assert f"homelab recover --yes {run.name}" in end["error"]["hint"] and any("its own program train.py" in line for line in end["lines"])
    assert run.attempts() == [1, 2]


def test_ctrl_c_ends_a_command_of_a_page_and_names_it(desk: Desk) -> None:
    run = desk.launch("script.toml")
    run.wait_for_output(1, "node1", "saved")
    with served(desk._environment(), desk.folder) as page:
        connection, answer = page.post("/act", {"run": run.name, "act": "stop"})
        assert b"began" in answer.readline()
        page.process.send_signal(signal.SIGINT)
        said, errors = page.process.communicate(timeout=30)
        connection.close()
    assert page.process.returncode == 0 and errors == ""
    assert f"homelab stop {run.name} was not over yet, and was ended with the page. Type it again to finish it." in said
    desk.homelab("stop", run.name)
