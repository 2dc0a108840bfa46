"""status, logs, stop, recover and chat: runs that are not there, not clear, damaged, or invented by a hostile node; and secrets."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.lab import Lab, procfs
from scripts.practice.desk import Desk, Run, wait_until
from tests.cli.conftest import complaint
from tests.cli.test_nodes import edit

pytestmark = pytest.mark.timeout(300)
VERBS = [["status"], ["logs"], ["stop"], ["recover"], ["chat", "--prompt", "x"]]
ODD = "$(touch pwned) '\"; ../..\n\x1b[31m"


@pytest.fixture
def fresh(desk: Desk, cli_lab: Lab) -> Iterator[Desk]:
    """A desk whose nodes know no run."""
    for node in cli_lab.nodes:
        shutil.rmtree(Path(node.workdir) / "runs", ignore_errors=True)
    yield desk
    desk.homelab("stop", code=None)


def with_run(verb: list[str], run: str) -> list[str]:
    return [verb[0], run, *verb[1:]]


@pytest.mark.parametrize(
    "verb", [pytest.param(verb, id=verb[0], marks=pytest.mark.thorough if verb[0] != "status" else ()) for verb in VERBS]
)
def test_no_run_at_all_and_a_run_that_nobody_knows(fresh: Desk, verb: list[str]) -> None:
    error = complaint(fresh, *verb, code=2, as_json=verb == VERBS[0])
    assert "there is no run yet" in error["message"] and "homelab launch" in error["hint"]
    for name in ("nothing", ODD, "../../x", "") if verb == VERBS[0] else (ODD,):
        error = complaint(fresh, *with_run(verb, name), code=2, as_json=name == ODD)
        assert error["message"].startswith("no run is called")
    assert not (fresh.folder / "runs").exists()


@pytest.fixture
def launched(fresh: Desk) -> tuple[Desk, str]:
    """A run that goes on: its script only waits."""
    return fresh, str(fresh.json("launch", "script.toml", "--nodes", "node1")["run"])


# `homelab launch`, killed when the ranks run and nobody looks after them yet.
KILLED = """
import os, signal
from homelab.controller.attempt import placement
placement.SupervisorPlacement.start = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
from homelab.cli.main import main
main()
"""


@pytest.mark.thorough
def test_a_launch_that_is_killed_before_it_leaves_a_supervisor(fresh: Desk) -> None:
    """That one is wanted is written down before the first rank is started: whoever looks is told, and can start it."""
    environment = fresh._environment() | {"HOMELAB_SUPERVISE": "true"}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, "launch", "script.toml", "--nodes", "node1", "--skip", "collective"],
        cwd=fresh.folder, env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    seen = fresh.json("status")
    assert seen["state"] in ("starting", "running") and not seen["supervisor"]
    (note,) = [note for note in seen["notes"] if "this run has no supervisor" in note]
    assert "ended before it started one" in note and note.endswith(f"homelab supervise {seen['run']}")
    supervisor = fresh.spawn("supervise", seen["run"])
    try:
        wait_until(lambda: bool(fresh.json("status", seen["run"])["supervisor"]), 60.0)
        assert not [note for note in fresh.json("status", seen["run"])["notes"] if "has no supervisor" in note]
        assert fresh.json("stop", seen["run"])["clean"]
    finally:
        supervisor.kill()
        supervisor.communicate()


def test_a_run_that_is_not_clear(launched: tuple[Desk, str]) -> None:
    desk, run = launched
    other = desk.folder / "runs" / f"{run}-2"
    shutil.copytree(desk.folder / "runs" / run, other)
    for verb in VERBS[:2]:
        error = complaint(desk, *with_run(verb, run[:10]), code=2, as_json=False)
        assert "matches 2 runs" in error["message"] and run in error["where"] and "homelab runs" in error["hint"]
    shutil.rmtree(other)
    shutil.copytree(desk.folder / "runs" / run, desk.folder / "runs" / f"{run} (copy)")
    assert desk.json("status")["run"] == run, "a copy under a name of its own is no run"


DAMAGE = (None, b'{"schema": 1, "na', b'{"recipe": 5, "data": []}')


@pytest.mark.parametrize(
    "contents", [DAMAGE[:1], pytest.param((*DAMAGE, b"", b"[]", b"\xff\xfe"), marks=pytest.mark.thorough)], ids=["one", "all"]
)
def test_a_damaged_folder_is_mended_from_the_nodes(launched: tuple[Desk, str], contents: tuple[bytes | None, ...]) -> None:
    desk, run = launched
    for file in ("run.json", "attempts/1/plan.json"):
        path = desk.folder / "runs" / run / file
        before = json.loads(path.read_text())
        for content in contents:
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)
            assert desk.json("status", run)["state"] in ("starting", "running"), (file, content)
            after = json.loads(path.read_text())
            assert after.get("recipe") == before.get("recipe") and after.get("ranks") == before.get("ranks"), (file, content)
    assert desk.json("stop", run)["clean"]


@pytest.mark.thorough
def test_a_damaged_folder_that_nobody_can_mend(launched: tuple[Desk, str]) -> None:
    desk, run = launched
    assert desk.json("stop", run)["clean"]
    shutil.rmtree(Path(desk.lab.state.node("node1").workdir) / "runs")
    (desk.folder / "runs" / run / "attempts" / "1" / "plan.json").write_text("{")
    for verb in VERBS:
        error = complaint(desk, *with_run(verb, run), code=1, as_json=verb == VERBS[0])
        assert (
            "this run's folder is damaged" in error["message"] and run in error["where"] and error["hint"].startswith("move it away: mv ")
        )
    desk.homelab("runs")


@pytest.mark.thorough
def test_other_damaged_files_of_a_run_do_no_harm(launched: tuple[Desk, str]) -> None:
    desk, run = launched
    folder = desk.folder / "runs" / run
    (folder / "state.json").write_text("[1, 2]")
    (folder / "events.jsonl").write_bytes(b'{"time": 1\n5\n"x"\n\xff\n')
    (folder / "metrics.jsonl").write_bytes(b'{"kind": 5, "step": "x"}\n[]\nnull\n{"kind": "train"')
    assert desk.json("status", run)["state"] in ("starting", "running")
    desk.homelab("status", run, "--once")
    desk.homelab("runs")
    assert desk.json("stop", run)["clean"]


def test_questions_that_the_run_cannot_answer(launched: tuple[Desk, str]) -> None:
    desk, run = launched
    assert "there is no rank 7" in complaint(desk, "logs", "--rank", "7", code=2)["message"]
    assert "nothing to recover" in complaint(desk, "recover", code=2, as_json=False)["message"]
    error = complaint(desk, "chat", "--prompt", ODD, code=2, as_json=False)
    assert "this run used a [script]" in error["message"] and error["where"] == run
    assert desk.json("stop")["clean"] and desk.json("stop")["clean"], "stopping twice is fine"
    error = complaint(desk, "recover", code=1, as_json=False)
    assert "no complete checkpoint" in error["message"] and f"homelab recover {run} --from-scratch" in error["hint"]


@pytest.mark.parametrize("name", ["../../x", ODD, *(pytest.param(name, marks=pytest.mark.thorough) for name in ("/tmp/x", "..", "x\ny"))])
def test_a_run_that_a_hostile_node_invents(desk: Desk, cli_lab: Lab, name: str) -> None:
    answer = json.dumps({"runs": [{"name": name, "created_at": 9e9, "attempt": 1, "alive": True, "exit": None, "final": False}]})
    fake = Path(cli_lab.state.node("node2").home) / "hostile"
    fake.write_text(f'#!/bin/sh\ncase "$1" in -c) exec {shlex.quote(sys.executable)} "$@";; esac\nprintf "%s\\n" {shlex.quote(answer)}\n')
    fake.chmod(0o755)
    edit(desk, "node2", python=str(fake))
    listed = desk.json("runs")
    assert name not in [row["name"] for row in listed["runs"]]
    assert "never sends" in listed["unreachable"]["node2"]["message"]
    shown = desk.homelab("runs").stdout
    assert "\x1b" not in shown
    complaint(desk, "status", name, code=2, as_json=False)
    before = set(desk.folder.parent.rglob("*"))
    desk.homelab("status", code=None)
    assert not {path.name for path in set(desk.folder.parent.rglob("*")) - before} & {"x", "pwned"}


def test_a_token_is_seen_nowhere_and_gone_after_the_run(fresh: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_ThisMustNeverBeSeen0123456789"
    monkeypatch.setenv("HF_TOKEN", token)
    desk, node = fresh, fresh.lab.state.node("node1")
    desk.write(
        "train.py",
        "import os, time\nprint('length', len(open(os.environ['HF_TOKEN_PATH']).read()), os.environ['HF_TOKEN_PATH'], flush=True)\ntime.sleep(120)\n",
    )
    said = desk.homelab("launch", "script.toml", "--nodes", "node1", "--json")
    run = json.loads(said.stdout)["run"]
    Run(desk.lab, run).wait_for_output(1, "node1", f"length {len(token)}")
    on_node = Path(node.workdir) / "runs" / run
    place = re.search(rf"length {len(token)} (/\S+)", desk.homelab("logs", run).stdout)
    assert place is not None
    (living, *_) = desk.lab.processes_of_run(run)["node1"]
    root = os.open(f"/proc/{living}/root", os.O_PATH)  # the node may have its own memory
    secrets = Path(f"/proc/self/fd/{root}{place[1]}")
    assert secrets.read_text() == token and str(node.workdir) not in str(secrets)
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    texts = [said.stdout, said.stderr]
    texts += [
        desk.homelab(*words).stdout
        for words in (["status", run, "--once"], ["logs", run], ["plan", "script.toml", "--why", "--nodes", "node1"])
    ]
    texts += [" ".join(procfs.command_line(pid)) for pid in desk.lab.processes_of("node1")]
    assert len(texts) > 8
    files = [path for folder in (desk.folder, on_node) for path in folder.rglob("*") if path.is_file()]
    assert {"commands.sh", "plan.txt", "run.json", "events.jsonl", "start.json"} <= {path.name for path in files}
    assert not [path for path in files if token.encode() in path.read_bytes()]
    assert not [text for text in texts if token in text]
    desk.homelab("stop", run)
    assert not secrets.exists()
    desk.write("train.py", "print('done')\n")
    run = desk.json("launch", "script.toml", "--nodes", "node1")["run"]
    Run(desk.lab, run).wait_for_end(1, nodes=1)
    wait_until(lambda: desk.json("status", run)["state"] == "done", 30)
    assert not list(secrets.parent.parent.glob(f"{run}*")), "a run that has ended needs no token"
    os.close(root)


def test_a_script_that_fails_is_one_clear_message(fresh: Desk) -> None:
    fresh.write("train.py", "raise ValueError('the data has no column text')\n")
    fresh.homelab("launch", "script.toml", "--nodes", "node1", "--wait", code=1)
    seen = fresh.json("status", code=1)
    assert seen["state"] == "failed" and "the data has no column text" in json.dumps(seen["diagnosis"])
    assert "Traceback" not in fresh.homelab("status", "--once", code=1).stderr
    assert os.listdir(fresh.folder / "runs")


@pytest.mark.thorough
def test_a_run_whose_node_cannot_be_asked(launched: tuple[Desk, str]) -> None:
    desk, run = launched
    true_cluster = desk.cluster
    edit(desk, "node1", port=1)
    assert desk.json("status", run, code=3)["state"] == "lost"
    assert "nothing answers on port 1: Connection refused" in desk.homelab("status", run, "--once", code=3).stdout
    stopped = desk.json("stop", run, code=3)
    assert not stopped["clean"] and stopped["unreachable"]["node1"]["hint"]
    assert "may still be running" in desk.homelab("stop", run, code=3).stdout
    error = desk.json("recover", run, code=1)["error"]
    assert "no complete checkpoint is left on the nodes that answer (node1 did not: " in error["message"]
    desk.cluster = true_cluster
    assert desk.json("stop", run)["clean"]


def test_orphans_are_what_is_left_of_a_run_that_is_over(desk: Desk, cli_lab: Lab) -> None:
    """One node's part has failed, the other's sleeps on: nobody will ever end it."""
    run = desk.launch("script.toml")
    run.wait_for_output(1, "node1", "here")
    run.wait_for_output(1, "node2", "here")
    spared = desk.json("stop", "--orphans")
    assert (spared["ended"], spared["kept"]) == ([], [run.name])
    procfs.send(list(cli_lab.processes_of_run(run.name)["node1"]), signal.SIGKILL)
    wait_until(lambda: not cli_lab.processes_of_run(run.name)["node1"], 10.0)
    ended = desk.json("stop", "--orphans")
    assert [entry["run"] for entry in ended["ended"]] == [run.name] and ended["ended"][0]["clean"]
    assert not any(cli_lab.processes_of_run(run.name).values())
    assert "nothing is left" in desk.homelab("stop", "--orphans").stdout


def test_orphans_and_a_name_contradict_each_other(quiet_desk: Desk) -> None:
    complaint(quiet_desk, "stop", "some-run", "--orphans", code=2)
