"""`homelab why`: of a run that failed, one that went on, one that did not fail, and with nodes that do not answer any more."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.controller.attempt import diagnosis_store
from homelab.controller.base.hint import Hint
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.features.status.failure import since
from homelab.controller.run import events
from homelab.controller.run.paths import RunPaths
from homelab.lab import Lab
from scripts.practice.desk import Desk, Run, wait_until
from tests.cli.conftest import complaint
from tests.cli.test_nodes import edit
from tests.controller.diagnose.test_recorded import of

pytestmark = pytest.mark.timeout(300)

# Rank 1 fails in the first attempt; rank 0 has nothing to do with it. In the second both wait to be stopped.
SCRIPT = """import os, time
if os.environ["HOMELAB_ATTEMPT"] == "1" and os.environ["RANK"] == "1":
    raise KeyError("completion")
print("here", flush=True)
time.sleep(120)
"""


@pytest.fixture
def failed(desk: Desk) -> Iterator[tuple[Desk, str]]:
    desk.write("train.py", SCRIPT)
    launched = desk.launch("script.toml")
    run = launched.name
    wait_until(lambda: "node2" in launched.exits(1), 60)
    wait_until(lambda: desk.json("status", run, code=None)["state"] == "failed", 60)
    yield desk, run
    desk.homelab("stop", run, code=None)


@pytest.mark.slow
def test_from_the_failure_to_the_next_attempt(failed: tuple[Desk, str]) -> None:
    desk, run = failed
    kept = desk.folder / "runs" / run / "attempts" / "1" / "diagnosis.json"
    assert json.loads(kept.read_text())["diagnosis"]["cause"] == "python-error", "written down when it was seen"

    said = desk.homelab("why").stdout
    assert f"attempt 1 of {run} failed; first: rank 1 on node2" in said
    for wanted in ("KeyError: 'completion'", "│ fix", "homelab explain python-error", f"homelab logs {run}"):
        assert wanted in said, wanted
    assert said.rstrip().endswith("Next: homelab launch script.toml"), "as the fix says: a changed script is a new training"
    found = desk.json("why", run)
    assert (found["attempt"], found["state"], found["run_state"], found["source"]) == (1, "failed", "failed", "nodes")
    assert (found["diagnosis"]["first_node"], found["diagnosis"]["first_rank"], found["diagnosis"]["topic"]) == ("node2", 1, "python-error")
    assert found["diagnosis"]["where"].endswith("train.py:3")
    assert found["since"] == [] and found["unreachable"] == {} and found["next"] == "homelab launch script.toml"

    own = desk.folder / "train.py"
    assert found["diagnosis"]["hint"].startswith(f"correct {own}:3, then: homelab launch script.toml")
    # Whoever mends his own file all the same, or the copy on a node, and recovers, is told that the run stays what it was.
    own.write_text("print('mended')\n")
    (copy,) = Path(desk.lab.state.node("node2").workdir).glob(f"data/{hashlib.sha256(SCRIPT.encode()).hexdigest()[:16]}/train.py")
    copy.write_text("print('mended')\n")
    recovered = desk.homelab("recover", run, "--from-scratch", "--skip", "collective").stdout
    assert f"{own} was changed since the launch: " in recovered and "to train with the new one: homelab launch script.toml" in recovered
    assert "train.py had been changed on node2: the original was sent again" in recovered and copy.read_text() == SCRIPT
    wait_until(lambda: desk.json("status", run)["state"] in ("starting", "running"), 30)
    on = desk.homelab("why", run).stdout
    assert f"attempt 1 of {run} failed; first: rank 1 on node2" in on and "in attempt 2" in on
    assert f"What its ranks printed: homelab logs {run} --attempt 1\n" in on
    assert re.search(
        r"since then\n  \d\d:\d\d:\d\d  attempt 2: the program was started again; it had no checkpoint: .*nodes node1, node2", on
    ), on
    assert on.rstrip().endswith(f"Next: homelab status {run}")

    # The nodes alone know it, too: nothing is kept, and the newest attempt of their answers is another one.
    kept.unlink()
    asked = desk.json("why", run, "--attempt", "1")
    assert (asked["attempt"], asked["newest_attempt"], asked["source"]) == (1, 2, "nodes")
    assert {**asked["diagnosis"], "because": 0} == {**found["diagnosis"], "because": 0}
    assert "attempt 2: the program was started again" in asked["since"][0]["text"]

    well = desk.homelab("why", run, "--attempt", "2").stdout
    assert f"{run} did not fail: it is " in well and well.rstrip().endswith(f"Next: homelab status {run}")
    error = complaint(desk, "why", run, "--attempt", "3", code=2)
    assert "there is no attempt 3" in error["message"] and "attempts 1 to 2" in error["where"]

    # What the ranks printed is there of both attempts, and it is said of which.
    Run(desk.lab, run).wait_for_output(2, "node2", "here")
    newest = desk.homelab("logs", run).stdout
    assert newest.startswith(f"attempt 2 of {run}, the newest; the one before: homelab logs {run} --attempt 1\n")
    assert "KeyError" not in newest
    first = desk.homelab("logs", run, "--attempt", "1", "--follow").stdout
    assert first.startswith(f"attempt 1 of {run}; the newest is attempt 2: homelab logs {run}\n")
    assert "--- rank 1 on node2, stderr\n" in first and "KeyError: 'completion'" in first
    told = desk.json("logs", run, "--attempt", "1", "--rank", "1")
    assert (told["attempt"], told["newest_attempt"], list(told["ranks"])) == (1, 2, ["1"])
    error = complaint(desk, "logs", run, "--attempt", "3", code=2)
    assert "there is no attempt 3" in error["message"] and "attempts 1 to 2" in error["where"]
    assert f"homelab logs {run} --rank 0 --attempt 1" in complaint(desk, "logs", run, "--attempt", "1", "--rank", "7", code=2)["hint"]
    assert desk.json("stop", run)["clean"]
    assert desk.json("why", run, "--attempt", "2")["diagnosis"] is None, "it was stopped, it did not fail"


@pytest.mark.thorough
def test_what_was_kept_when_the_nodes_do_not_answer(failed: tuple[Desk, str]) -> None:
    desk, run = failed
    true_cluster = desk.cluster
    edit(desk, "node2", port=1)
    found = desk.json("why", run)
    assert found["source"] == "kept" and found["diagnosis"]["first_node"] == "node2" and set(found["unreachable"]) == {"node2"}
    said = desk.homelab("why", run).stdout
    assert "KeyError: 'completion'" in said and re.search(r"as it was found on \d{4}-\d\d-\d\d .*: node2 cannot be asked", said), said
    kept = desk.folder / "runs" / run / "attempts" / "1" / "diagnosis.json"
    kept.write_text('{"attempt": 1')
    desk.homelab("why", run, code=None)
    desk.cluster = true_cluster
    assert desk.json("why", run)["source"] == "nodes"
    assert json.loads(kept.read_text())["diagnosis"]["cause"] == "python-error", "a damaged one is written anew"


@pytest.mark.thorough
def test_a_run_that_did_not_fail_and_one_that_nobody_knows(desk: Desk, cli_lab: Lab) -> None:
    desk.write("train.py", "print('done')\n")
    desk.homelab("launch", "script.toml", "--nodes", "node1", "--wait")
    found = desk.json("why")
    assert (found["state"], found["diagnosis"], found["since"]) == ("done", None, [])
    assert "did not fail: it is done, attempt 1" in desk.homelab("why").stdout
    assert "no run is called" in complaint(desk, "why", "nothing", code=2)["message"]
    complaint(desk, "why", "--attempt", "0", code=2)
    edit(desk, "node1", port=1)
    events = (desk.folder / "runs" / found["run"] / "events.jsonl").read_text()
    assert desk.json("why", found["run"])["state"] == "done", "its node is off now, and it was seen to be done"
    assert [row["state"] for row in desk.json("runs")["runs"] if row["name"] == found["run"]] == ["done"]
    assert (desk.folder / "runs" / found["run"] / "events.jsonl").read_text() == events


def lines(*told: events.Event) -> list[dict[str, object]]:
    return [{"time": float(number), **entry.line()} for number, entry in enumerate(told)]


def test_what_was_done_since() -> None:
    failed, lost = events.state("failed", 1, "the disk is full"), events.state("lost", 2)
    again, running = (events.resumed(number, 5, is_program=False) for number in (2, 3)), events.state("running", 1)
    second, third = again
    story = lines(
        events.event("launched"), events.event("attempt-started", 1), running, failed, second, running, lost,
        events.event("attempt-not-started", 3, because="x"), third, running,
    )  # fmt: skip
    assert [row.time for row in since(story, 1)] == [4, 5, 6, 7, 8, 9]
    assert [row.time for row in since(story, 2)] == [7, 8, 9]
    assert since(story, 3) == () and since([], 1) == () and since(story, 9) == ()
    unseen = lines(events.event("launched"), events.event("attempt-started", 1), events.resumed(2, 5, is_program=False))
    assert [row.text for row in since(unseen, 1)] == ["attempt 2 continues after step 5"]
    assert since([{"time": 1.0}, {"what": 5}], 1) == ()


def test_the_one_that_knows_more_is_kept(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    reason, other = of("disk_full"), of("python_error")
    guess = Diagnosis(cause="connection-lost", title="x", first_node="a", hint=Hint("y"), retryable=True)
    assert reason.names_a_reason and not guess.names_a_reason and not of("timeout").names_a_reason
    assert diagnosis_store.read(paths, 1) is None
    assert diagnosis_store.keep(paths, 1, guess, {}).diagnosis == guess
    first = diagnosis_store.keep(paths, 1, reason, {"b": "timed out"})
    assert diagnosis_store.read(paths, 1) == first and first.diagnosis == reason, "a reason is better than a guess"
    assert diagnosis_store.keep(paths, 1, guess, {}) == first
    assert diagnosis_store.keep(paths, 1, reason, {"b": "timed out"}).made_at == first.made_at, "nothing new: the time stays"
    came_after = guess.model_copy(update={"cause": "alone"})
    assert diagnosis_store.keep(paths, 1, came_after, {}) == first, "a node that let go because it heard nobody is no cause"
    assert diagnosis_store.keep(paths, 1, other, {}).diagnosis == other, "nobody was missing"
    assert diagnosis_store.keep(paths, 1, reason, {"b": "timed out"}).diagnosis == other
    assert diagnosis_store.read(paths, 2) is None
