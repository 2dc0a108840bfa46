"""The agent's verbs, run here with temporary workdirs: start, watch, stop, poll, and the questions about a machine."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.diagnose.cause import diagnose
from homelab.controller.remote import answers
from homelab.controller.remote.poll_reply import parse_replies
from homelab.controller.run import node_matching
from homelab.controller.run.state import node_part
from homelab.node import facts, paths, worker_programs
from homelab.node.probes import data as data_probe
from homelab.node.probes import speed_profiles
from homelab.node.run import secret_files
from homelab.node.storage import digests
from homelab.node.system import ports, processes, utilisation
from homelab.shared.protocol import digest, files
from homelab.shared.protocol.digest import sha256_and_rows
from homelab.shared.protocol.message import Done, as_json
from tests.fakes import ask_node

pytestmark = pytest.mark.timeout(60)
RUN, NODE = "2026-01-01-0000-agent", f"node-{os.getpid()}"
REPOSITORY = Path(__file__).resolve().parents[2]


def wait_until(condition: Callable[[], Any], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout_s} s"
        time.sleep(0.01)


def ask(verb: str, request: dict[str, Any], *, python: str = sys.executable) -> dict[str, Any]:
    """One question as the controller asks it: a JSON line in, a JSON line out."""
    done = subprocess.run(
        [python, "-m", "homelab.node", verb], input=json.dumps(request) + "\n", capture_output=True, text=True, timeout=40, cwd=REPOSITORY
    )
    assert "Traceback" not in done.stderr, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (1 if "error" in answer else 0)
    return answer


def request(workdir: Path, script: str = "pass", attempt: int = 1, **more: Any) -> dict[str, Any]:
    """A start of a program in place of torchrun."""
    return {
        "run": RUN, "attempt": attempt, "node": NODE, "workdir": str(workdir), "run_json": {"name": RUN, "created_at": 1.0},
        "plan_json": {"ranks": [{"rank": 0, "node": NODE, "local_rank": 0}]}, "command": [sys.executable, "-c", script],
        "environment": {"HOMELAB_RUN": RUN, "HOMELAB_NODE": NODE, "ODD": "it's $(x)\nä"}, "secrets": {}, **more,
    }  # fmt: skip


@pytest.fixture
def workdir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "work dir"
    processes.signal_all(processes.of_run(RUN, str(tmp_path / "work dir"), NODE), signal.SIGKILL)


def here(workdir: Path, attempt: int = 1) -> str:
    return paths.node_dir(paths.run_dir(str(workdir), RUN), attempt, NODE)


def begun(workdir: Path) -> dict[str, Any]:
    """What the watcher has written down of itself and of torchrun."""
    return dict(files.read_json(here(workdir) + "/agent.json"))


def ended(workdir: Path, attempt: int = 1) -> dict[str, Any]:
    file = here(workdir, attempt) + "/exit.json"
    wait_until(lambda: os.path.exists(file))
    return dict(files.read_json(file))


def test_a_run_from_start_to_end(workdir: Path) -> None:
    script = "import os, sys; print(os.environ['ODD'], os.environ['HOMELAB_RUN_DIR']); print('bad', file=sys.stderr); sys.exit(3)"
    assert ask("start", request(workdir, script)) == {}
    end = ended(workdir)
    assert (end["returncode"], end["signal"], end["stopped"]) == (3, None, False)
    folder = Path(paths.run_dir(str(workdir), RUN))
    out = folder / "attempts/1/nodes" / NODE
    assert (out / "out.log").read_text() == f"it's $(x)\nä {folder}\n" and (out / "err.log").read_text() == "bad\n"
    assert not list(folder.rglob("*.partial*")), "nothing half written stays"
    reply = ask("poll", {"node": NODE, "workdir": str(workdir), "run": RUN, "torchrun_lines": 5})
    assert answers.fault("poll", reply) is None
    assert reply["run"]["exit"]["returncode"] == 3 and not reply["run"]["torchrun_alive"] and reply["run"]["torchrun_tail"] == ["bad"]


def test_the_same_attempt_is_not_started_twice(workdir: Path) -> None:
    ask("start", request(workdir))
    assert "was started on this node already" in ask("start", request(workdir))["error"]["message"]
    ended(workdir)


def test_a_start_that_the_disk_refuses_leaves_no_attempt_and_no_secret(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would look as if it were about to begin, for ever."""
    write, folder = files.write_json, paths.run_dir(str(workdir), RUN)

    def refuses(path: Any, value: Any, mode: int = 0o644) -> None:
        if str(path).endswith("start.json"):
            assert secret_files.has(folder)
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, value, mode)

    monkeypatch.setattr(files, "write_json", refuses)
    with pytest.raises(OSError, match="No space left"):
        ask_node("start", request(workdir, secrets={"HF_TOKEN": "hf_secret"}))
    assert not secret_files.has(folder) and paths.newest_attempt(folder) == 0
    monkeypatch.undo()
    assert ask("start", request(workdir)) == {}
    ended(workdir)


def test_a_program_that_cannot_start_is_said_at_once(workdir: Path) -> None:
    started = time.monotonic()
    answer = ask("start", request(workdir, command=["/nowhere/python"]))
    assert "torchrun did not start" in answer["error"]["message"] and "/nowhere/python" in answer["error"]["message"]
    assert time.monotonic() - started < 10
    assert ended(workdir)["returncode"] == 127
    answer = ask("start", request(workdir, attempt=2, command=["/bin/true", "a\0b"]))
    assert "torchrun did not start" in answer["error"]["message"]


def test_it_goes_on_when_everybody_has_left(workdir: Path) -> None:
    """The watcher is in a session of its own: neither the end of the question nor SIGHUP reaches it."""
    ask("start", request(workdir, "import time; time.sleep(30)"))
    watcher = begun(workdir)["pid"]
    assert os.getsid(watcher) == watcher != os.getsid(0)
    os.kill(watcher, signal.SIGHUP)
    reply = as_json(ask_node("poll", {"node": NODE, "workdir": str(workdir), "run": RUN}))
    assert reply["run"]["agent_alive"] and reply["run"]["torchrun_alive"]
    outcome = ask("stop", {"node": NODE, "workdir": str(workdir), "run": RUN, "grace_s": 5})
    assert outcome["asked"] >= 2 and outcome["left"] == []
    assert ended(workdir)["stopped"] is True
    assert ask("stop", {"node": NODE, "workdir": str(workdir), "run": RUN})["asked"] == 0


@pytest.mark.parametrize("is_stop", [True, False])
def test_a_watcher_that_was_killed_is_no_reboot(workdir: Path, is_stop: bool) -> None:
    """What is seen between its end by SIGKILL and the record of that end: by homelab's own stop, or by something else."""
    ask("start", request(workdir, "import time; time.sleep(30)"))
    said = begun(workdir)
    if is_stop:
        assert ask_node("mark-stop", {"node": NODE, "workdir": str(workdir), "run": RUN}) == Done()
    processes.signal_all([said["pid"], said["torchrun_pid"]], signal.SIGKILL)
    wait_until(lambda: not processes.of_run(RUN, str(workdir), NODE))
    raw = ask("poll", {"node": NODE, "workdir": str(workdir), "run": RUN})
    reply = parse_replies({NODE: raw})[NODE]
    assert reply.run and reply.run.exit is None and reply.run.rebooted is False
    found = diagnose(RUN, {NODE: reply}, {})
    assert node_part(reply.run, 1) == ("stopped" if is_stop else "vanished")
    assert found is None if is_stop else found is not None and found.cause == "vanished"
    agent = Path(here(workdir), "agent.json")
    for boot_id, rebooted in (("of another boot", True), ("", None), (5, None)):
        agent.write_text(json.dumps({**said, "boot_id": boot_id}))
        assert ask_node("poll", {"node": NODE, "workdir": str(workdir), "run": RUN}).run.rebooted is rebooted


def test_stop_finds_what_ignores_signals_and_what_lost_its_parent(workdir: Path) -> None:
    """A worker that ignores SIGTERM, a grandchild in a session of its own whose parent is gone, and a stopped process."""
    script = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
orphan = "import os, time, signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); open(%r, 'w').close(); time.sleep(60)"
subprocess.Popen([sys.executable, "-c", "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)", orphan % "orphan"]).wait()
frozen = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
os.kill(frozen.pid, signal.SIGSTOP)
open("ready", "w").close()
time.sleep(60)
"""
    ask("start", request(workdir, script))
    folder = Path(paths.run_dir(str(workdir), RUN))
    wait_until(lambda: (folder / "ready").exists() and (folder / "orphan").exists())
    running = processes.of_run(RUN, str(workdir), NODE)
    assert len(running) == 4, "watcher, program, orphan, frozen"
    outcome = ask("stop", {"node": NODE, "workdir": str(workdir), "run": RUN, "grace_s": 0.5})
    assert outcome["asked"] == 4 and outcome["killed"] >= 2 and outcome["left"] == []
    assert not [pid for pid in running if processes.is_alive(pid)]
    assert ended(workdir)["stopped"] is True


def test_what_outlives_a_killed_torchrun_is_ended(workdir: Path) -> None:
    script = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True); time.sleep(60)"
    ask("start", request(workdir, script))
    wait_until(lambda: len(processes.of_run(RUN, str(workdir), NODE)) == 3)
    os.kill(begun(workdir)["torchrun_pid"], signal.SIGKILL)
    end = ended(workdir)
    assert (end["returncode"], end["signal"], end["stopped"]) == (None, signal.SIGKILL, False)
    wait_until(lambda: not processes.of_run(RUN, str(workdir), NODE))


LETS_GO_SLOWLY = """
import ctypes, fcntl, json, os, signal, sys, threading, time
home = os.path.join(os.environ["HOMELAB_RUN_DIR"], "attempts", "1", "ranks", "0")
os.makedirs(home)
card = open(sys.argv[1], "w")
fcntl.flock(card, fcntl.LOCK_EX)
with open(os.path.join(home, "heartbeat.json"), "w") as beat:
    json.dump({"pid": os.getpid(), "phase": "training", "step": 1}, beat)
def end(*_):
    threading.Thread(target=lambda: (time.sleep(1.5), os._exit(0))).start()
    ctypes.CDLL(None).syscall(60 if os.uname().machine == "x86_64" else 93, 0)  # exit(2): of this thread alone
signal.signal(signal.SIGTERM, end)
time.sleep(60)
"""


@pytest.mark.parametrize("is_ending", [False, True])
def test_a_rank_that_is_ending_is_waited_for_until_it_has_let_go_of_its_card(workdir: Path, tmp_path: Path, is_ending: bool) -> None:
    """Its first thread is a zombie without an environment, as after a kill -9, and another one still holds the file. Who waits for it is killed."""
    ask("start", request(workdir, LETS_GO_SLOWLY, command=[sys.executable, "-c", LETS_GO_SLOWLY, str(tmp_path / "card")]))
    beat = Path(paths.run_dir(str(workdir), RUN)) / "attempts/1/ranks/0/heartbeat.json"
    wait_until(lambda: beat.exists() and beat.read_text().endswith("}"))
    pid = json.loads(beat.read_text())["pid"]
    if is_ending:
        os.kill(pid, signal.SIGTERM)
        wait_until(lambda: processes.is_ending(pid))
        assert not processes.is_alive(pid) and pid not in processes.of_run(RUN, str(workdir), NODE)
    outcome = ask("stop", {"node": NODE, "workdir": str(workdir), "run": RUN, "grace_s": 0.3})
    with open(tmp_path / "card", "w") as card:
        fcntl.flock(card, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert outcome["left"] == [] and processes.born(pid) is None and not processes.is_ending(pid)


def test_a_stop_waits_while_a_card_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    used = [(8000, 8000), (8000, 5000), (8000, 300), (8000, 300), (8000, 0)]
    looks = iter(used)
    monkeypatch.setattr(
        utilisation,
        "gpus",
        lambda timeout_s: ("ok", [{"index": index, "memory_used_bytes": byte} for index, byte in enumerate(next(looks))]),
    )
    utilisation.wait_for_cards(every_s=0.0)
    assert next(looks) == used[4], "it looked four times"
    for nothing in (("missing", []), ("ok", [{"index": 0, "memory_used_bytes": None}])):
        monkeypatch.setattr(utilisation, "gpus", lambda timeout_s, nothing=nothing: nothing)
        utilisation.wait_for_cards(every_s=60.0)


def test_the_processes_of_another_node_are_not_touched(workdir: Path) -> None:
    ask("start", request(workdir, "import time; time.sleep(30)"))
    elsewhere = {"node": NODE, "workdir": str(workdir.parent / "other")}  # practice nodes share one /proc
    assert ask("stop", elsewhere | {"run": RUN})["asked"] == 0 and ask("facts", elsewhere)["runs"]["alive"] == []
    assert ask("stop", {"node": NODE, "workdir": str(workdir), "run": f"{RUN}-2"})["asked"] == 0
    assert len(processes.of_run(RUN, str(workdir), NODE)) == 2
    assert RUN in ask("facts", {"node": NODE, "workdir": str(workdir)})["runs"]["alive"]


def test_a_run_is_found_where_its_workdir_was_at_the_launch(workdir: Path) -> None:
    ask("start", request(workdir, "import time; time.sleep(60)"))
    moved = {"node": NODE, "workdir": str(workdir.parent / "moved"), "run": RUN}
    assert ask("stop", moved)["as_nodes"] == []
    outcome = ask("stop", moved | {"made_in": str(workdir)})
    assert outcome["asked"] >= 2 and outcome["as_nodes"] == [NODE] and ended(workdir)["stopped"] is True
    other = workdir.parent / "moved/runs" / RUN / "attempts/1"
    (other / "nodes/node9").mkdir(parents=True)
    for name in ("plan.json", f"nodes/{NODE}/start.json"):
        (other / name.replace(NODE, "node9")).write_text((workdir / "runs" / RUN / "attempts/1" / name).read_text())
    assert ask("stop", moved | {"made_in": str(workdir)})["as_nodes"] == ["node9"], "where two nodes see one disk"


def test_a_run_is_found_under_whatever_name_its_machine_has_today(workdir: Path) -> None:
    ask("start", request(workdir, "import time; time.sleep(60)"))
    renamed = {"node": f"{NODE}-renamed", "workdir": str(workdir)}
    assert ask("facts", renamed)["runs"]["alive"] == [RUN]
    reply = ask("poll", renamed | {"run": RUN})
    assert answers.fault("poll", reply) is None
    assert reply["run"]["as_node"] == NODE, "the controller finds its part in the run by it (node_matching)"
    assert node_matching.sorted_out({renamed["node"]: reply}, {}, [NODE]) == ({NODE: reply}, {})
    assert reply["run"]["agent_alive"] and reply["run"]["torchrun_alive"] and list(reply["run"]["ranks"]) == ["0"]
    assert [run["alive"] for run in ask("runs", renamed)["runs"]] == [True]
    outcome = ask("stop", renamed | {"run": RUN})
    assert outcome["asked"] == 2 and outcome["left"] == [] and outcome["as_nodes"] == [NODE]
    assert ended(workdir)["stopped"] is True
    assert [run["exit"]["stopped"] for run in ask("runs", renamed)["runs"]] == [True]


def test_secrets_reach_the_program_and_leave_with_it(workdir: Path) -> None:
    script = "import os, time\nplace = os.environ['HF_TOKEN_PATH']\nsaid = open(place).read()\nprint(place, said, flush=True)\nos.write(2, said.encode())\ntime.sleep(30)"
    ask("start", request(workdir, script, secrets={"HF_TOKEN": "hf_123456"}))
    folder = Path(paths.run_dir(str(workdir), RUN))
    log = folder / "attempts/1/nodes" / NODE / "out.log"
    wait_until(lambda: log.read_text().endswith("\n"))
    place, said = log.read_text().split()
    assert said == "hf_123456" and not place.startswith(str(workdir))
    assert (os.stat(place).st_mode & 0o777, os.stat(os.path.dirname(place)).st_mode & 0o777) == (0o600, 0o700)
    assert os.statvfs(place).f_fsid == os.statvfs("/dev/shm").f_fsid or os.environ.get("XDG_RUNTIME_DIR")
    assert not [file for file in folder.rglob("*.json") if "hf_123456" in file.read_text()]
    wait_until(lambda: len(processes.of_run(RUN, str(workdir), NODE)) == 2)  # a child that the first one starts for a moment counts, too
    pids = processes.of_run(RUN, str(workdir), NODE)
    assert pids and not [pid for pid in pids if b"hf_123456" in Path(f"/proc/{pid}/environ").read_bytes()]
    wait_until(lambda: log.with_name("err.log").read_text() == "hf_123456")
    polled = ask("poll", {"node": NODE, "workdir": str(workdir), "run": RUN})
    assert polled["run"]["torchrun_tail"] == ["***"], "whoever asks does not get it"
    ask("stop", {"node": NODE, "workdir": str(workdir), "run": RUN})
    assert not os.path.exists(place)
    assert log.read_text() == f"{place} *********\n", "what the program printed is covered where it stands"
    ask("start", request(workdir, "pass", attempt=2, secrets={"HF_TOKEN": "hf_123456"}))
    ended(workdir, 2)
    assert not os.path.exists(place)


@pytest.mark.parametrize("name", ["../x", "a/b", "", "..", ".hidden", "a b", "a\n", "$(touch pwned)", 5, None, "/etc"])
def test_names_that_could_climb(workdir: Path, name: Any) -> None:
    for verb, body in (
        ("start", request(workdir, run=name)), ("start", request(workdir, node=name)), ("stop", {"node": NODE, "workdir": str(workdir), "run": name}),
        ("describe", {"workdir": str(workdir), "run": name}), ("checkpoints", {"workdir": str(workdir), "run": name}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"not a usable name|is no str"):
            ask_node(verb, body)
    assert not workdir.exists()


@pytest.mark.parametrize("line", ["", "garbage", "[]", '"x"', "{}", '{"workdir": 5}'])
@pytest.mark.parametrize("verb", ["start", "poll", "describe", "receive-file", "nothing"])
def test_a_question_that_cannot_be_is_refused_in_json(verb: str, line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "homelab.node", verb], input=line + "\n", capture_output=True, text=True, timeout=30, cwd=REPOSITORY
    )
    error = json.loads(done.stdout)["error"]
    assert done.returncode == 1 and error["message"] and error["kind"] in ("refused", "internal") and not done.stderr


def test_runs_are_listed_and_odd_folders_are_none(workdir: Path) -> None:
    assert ask("runs", {"node": NODE, "workdir": str(workdir)})["runs"] == []
    ask("start", request(workdir))
    ended(workdir)
    for name in (f"{RUN} (copy)", "no-run", "broken", "list"):
        (workdir / "runs" / name).mkdir()
    (workdir / "runs" / f"{RUN} (copy)" / "run.json").write_text("{}")
    (workdir / "runs" / "broken" / "run.json").write_text("{")
    (workdir / "runs" / "list" / "run.json").write_text("[]")
    (workdir / "runs" / RUN / "attempts" / "²").mkdir()
    answer = ask("runs", {"node": NODE, "workdir": str(workdir)})
    assert [entry["name"] for entry in answer["runs"]] == [RUN] and answers.fault("runs", answer) is None
    described = ask("describe", {"node": NODE, "workdir": str(workdir), "run": RUN})
    assert described["run_json"]["name"] == RUN and list(described["plans"]) == ["1"] and answers.fault("describe", described) is None


def test_poll_gives_only_new_lines_and_the_ends_of_logs(workdir: Path) -> None:
    ask("start", request(workdir))
    ended(workdir)
    folder = Path(paths.run_dir(str(workdir), RUN)) / "attempts" / "1"
    rank = folder / "ranks" / "0"
    rank.mkdir(parents=True)
    lines = [json.dumps({"kind": "train", "step": step, "rank": 0}) for step in range(1, 6)]
    (rank / "metrics.jsonl").write_text("\n".join([*lines[:3], "5", *lines[3:], '{"kind": "tra']))
    log = folder / "nodes" / NODE / "logs" / "x_1" / "attempt_0" / "0"
    log.mkdir(parents=True)
    (log / "stdout.log").write_bytes(b"".join(b"line %d \xff\n" % number for number in range(100_000)))

    def looked(**more: Any) -> dict[str, Any]:
        reply = as_json(ask_node("poll", {"node": NODE, "workdir": str(workdir), "run": RUN, **more}))
        assert answers.fault("poll", reply) is None
        return dict(reply["run"]["ranks"]["0"])

    assert [line["step"] for line in looked()["metrics"]] == [1, 2, 3, 4, 5], "neither what is no object nor what is being written"
    assert [line["step"] for line in looked(after_lines={"0": 5})["metrics"]] == [5]
    assert looked(after_lines={"0": 1 << 60})["metrics"] == []
    anew = looked(after_lines={"0": 900}, lines_of_attempt=1)["metrics"]
    assert len(anew) == 5, "its commands were typed once more: who has counted the lines of before gets all of them"
    (rank / "curves.jsonl").write_text(lines[0] + "\n")
    assert looked()["before"] == [] and [line["step"] for line in looked(before=True)["before"]] == [1]
    assert looked(tail_lines=2)["log_tail"]["stdout"] == ["line 99998 \ufffd", "line 99999 \ufffd"]
    assert looked(tail_lines=0)["log_tail"] == {"stdout": [], "stderr": []}
    (rank / "heartbeat.json").write_text(json.dumps({"time": 1.0, "phase": "training", "step": 5, "pid": 77}))
    (log / "stderr.log").write_text("its own last word\n")
    warning = "tower:77:90 [0] misc/shmutils.cc:87 NCCL WARN Error: failed to extend /dev/shm/nccl-x to size 9637892, error: No space left on device (28)"
    (folder / "nodes" / NODE / "nccl-tower-77.log").write_text(f"NCCL version 2.29.2+cuda13.0\n{warning}\n")
    (folder / "nodes" / NODE / "nccl-tower-78.log").write_text(warning.replace("77", "78") + "\n")
    assert looked()["log_tail"]["stderr"] == [warning, "its own last word"]
    assert looked(tail_lines=0)["log_tail"]["stderr"] == []
    assert len(json.dumps(looked(tail_lines=10**6))) < 200_000, "an answer stays small"


def test_facts_have_the_promised_shape(workdir: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("x")
    answer = ask("facts", {
        "node": NODE, "workdir": str(workdir), "peers": ["127.0.0.1", "no address"], "port": 29999, "model": "/nowhere",
        "data": {"train": str(tmp_path / "data"), "eval": "/nowhere"},
    })  # fmt: skip
    assert answers.fault("facts", answer) is None
    assert (
        answer["resources"]["workdir_writable"]
        and answer["python"]["executable"] == sys.executable
        and answer["python"]["packages"]["torch"]
    )
    assert answer["data"]["train"]["found"] and answer["data"]["eval"]["problem"] == "No such file or directory"
    assert not answer["model"]["found"] and answer["network"]["routes"]["127.0.0.1"]["interface"] == "lo"


def test_every_probe_of_the_facts_stands_alone(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda path: (_ for _ in ()).throw(OSError("no")))
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    monkeypatch.setenv("PATH", "/nowhere")
    answer = facts.collect({"node": NODE, "workdir": str(workdir)})
    assert (
        answer["resources"]["disk_free_bytes"] is None
        and answer["network"]["own_name_addresses"] == []
        and answer["gpu"]["nvidia_smi"] == "missing"
    )


def test_ports_and_who_holds_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        held = ports.state(number)
        assert not held["free"] and held["holder_pid"] == os.getpid()
        assert ports.free_port(number, number + 50) != number
    assert ports.state(number)["free"]


@pytest.mark.parametrize(("low", "lowest"), [(30_001, 30_001), (50_000, 50_000), (65_400, 65_400), (65_536, 29_501), (2**62, 29_501)])
def test_a_free_port_beside_any_that_a_recipe_may_name(low: int, lowest: int, tmp_path: Path) -> None:
    """The range ended at 29999, so a second launch with port = 30000 was refused."""
    port = ask("free-port", {"node": NODE, "workdir": str(tmp_path), "low": low})["port"]
    assert lowest <= port <= 65535 and port < lowest + 500


def test_the_last_ports_are_followed_by_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "state", lambda port, taken: {"free": port < 65_000})
    assert ports.free_port(65_100) == 29_501
    with pytest.raises(OSError, match="none of the 500 ports from 65001 on is free"):
        ports.free_port(65_001)


def test_a_kernel_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    true_socket = socket.socket

    def without(family: int = socket.AF_INET, *rest: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return true_socket(family, *rest)

    monkeypatch.setattr(socket, "socket", without)
    assert ports.state(ports.free_port())["free"]


def test_rows_and_speeds_are_in_the_facts(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a"}\n{"text": "b"}\n{"text": "c"}')
    asked = {"node": NODE, "workdir": str(tmp_path), "model": "org/My Model", "method": {"kind": "lora"}, "data": {"train": str(data)}}
    answer = ask("facts", asked)
    assert answers.fault("facts", answer) is None
    assert (answer["data"]["train"]["rows"], answer["data"]["train"]["size_bytes"]) == (3, data.stat().st_size)
    file = tmp_path / "speeds" / "my-model-lora.json"
    assert answer["speed_profiles"] == {"path": str(file), "found": False, "problem": None, "content": None}
    file.parent.mkdir()
    file.write_text('{"schema": 1, "token_s": NaN}')
    answer = ask("facts", asked)
    assert (
        answers.fault("facts", answer) is None and answer["speed_profiles"]["found"] and answer["speed_profiles"]["content"]["schema"] == 1
    )
    assert ask("facts", {"node": NODE, "workdir": str(tmp_path)})["speed_profiles"] is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[1]", "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (b" " * (1 << 20) + b"{}", "far too large"),
    ],
    ids=["empty", "half", "binary", "list", "deep", "large"],
)
def test_damaged_speeds_are_a_problem_and_no_crash(tmp_path: Path, content: bytes, problem: str) -> None:
    file = tmp_path / "speeds" / "m-full.json"
    file.parent.mkdir()
    file.write_bytes(content)
    found = speed_profiles._speeds(str(tmp_path), "m", {"kind": "full"})
    assert found["found"] and found["content"] is None and problem in found["problem"]
    file.unlink()
    file.mkdir()
    assert speed_profiles._speeds(str(tmp_path), "m", {"kind": "full"})["problem"]


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.jsonl", "x\ny\n", 2), ("a.jsonl", "x\ny", 2), ("a.csv", "head\nx\ny\n", 2), ("a.txt", "one\none\n\ntwo\n", 2), ("a.json", "[]\n", None),
        ("a.parquet", "PAR1", None), ("a.jsonl", "", None), ("a.csv", "head\n", None),
        ("a.txt", "\r\none\r\none\r\n\r\n\r\ntwo\r\n \t\r\nthree\r\n\r\n", 3), ("a.txt", "one\rone\r\rtwo", 2), ("a.txt", "\n \n", None),
        ("a.txt", "one\n \n\n\ntwo\nthree", 2),
    ],
)  # fmt: skip
def test_rows_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: str, rows: int | None) -> None:
    import hashlib

    (tmp_path / name).write_bytes(content.encode())
    for block in (1 << 20, 5, 4, 3, 2, 1):
        monkeypatch.setattr(digest, "_BLOCK_BYTES", block)
        assert sha256_and_rows(str(tmp_path / name)) == (hashlib.sha256(content.encode()).hexdigest(), rows), block


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """Whoever reads it waits for a writer; the whole preflight waited with it."""
    for name in ("collective.json", "digests.json", "speeds/m-lora.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / name)
    answer = ask("facts", {"node": NODE, "workdir": str(tmp_path), "model": "m", "method": {"kind": "lora"}})
    assert not answer["broken"] and answer["collective_check"] is None and answer["speed_profiles"]["problem"] == "it is not a file"


def test_kept_digests_that_are_none_are_reckoned_anew(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    state = file.stat()
    mark = [state.st_size, state.st_mtime_ns, state.st_ino]
    for damaged in (
        '{"x": 5}',
        json.dumps({str(file): {"mark": mark}}),
        json.dumps({str(file): {"mark": mark, "sha256": {}}}),
        "[" * 100_000,
    ):
        (tmp_path / "digests.json").write_text(damaged)
        assert digests.Kept(str(tmp_path)).of(str(file))["sha256"] == hashlib.sha256(b"{}").hexdigest()


def test_a_large_file_of_data_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each preflight read it whole: 18 GB on a hard disk took longer than the controller waited."""
    file, link = tmp_path / "rows.jsonl", tmp_path / "rows.txt"
    file.write_text("x\ny\nz\n")
    link.symlink_to(file)
    monkeypatch.setattr(digests, "SMALL_BYTES", 5)
    read = []
    monkeypatch.setattr(digests, "sha256_and_rows", lambda path: read.append(path) or sha256_and_rows(path))
    request = {"workdir": str(tmp_path), "data": {"train": str(file), "eval": str(link)}}
    first = data_probe.read(request)
    assert data_probe.read(request) == first and len(read) == 2
    assert (first["train"]["rows"], first["eval"]["rows"]) == (3, 1), "the name says what a row is"
    assert first["train"]["sha256"] == hashlib.sha256(b"x\ny\nz\n").hexdigest()
    file.write_text("x\ny\nz\nz\n")
    assert data_probe.read(request)["train"]["rows"] == 4 and len(read) == 4
    state = file.stat()
    for rows in ("4", -1, [], {}):
        entry = {"mark": [state.st_size, state.st_mtime_ns, state.st_ino], "sha256": "0" * 64, "rows": rows}
        (tmp_path / "digests.json").write_text(json.dumps({str(file): entry}))
        assert data_probe.read(request)["train"]["rows"] == 4, "what is kept is damaged"
    monkeypatch.setattr(digests, "SMALL_BYTES", 32 << 20)
    (tmp_path / "digests.json").unlink()
    data_probe.read(request)
    assert not (tmp_path / "digests.json").exists(), "a small file costs nothing"


@pytest.mark.parametrize("takes_pipes", [True, False])
def test_a_pipe_for_nccl_is_named_only_where_one_can_be_made(workdir: Path, takes_pipes: bool) -> None:
    """exFAT, NTFS and /mnt of WSL2 take none, and torch would end the process that was told to make one."""
    folder = paths.run_dir(str(workdir), RUN)
    here = paths.node_dir(folder, 1, NODE)
    script = "import os; print(sorted(name for name in os.environ if name.startswith('TORCH_')))"
    start = {key: value for key, value in request(workdir, script).items() if key in ("command", "environment", "run", "node")}
    files.write_json(f"{here}/start.json", {**start, "attempt": 1, "token": None})
    refuse = "" if takes_pipes else "def refuse(path):\n    raise PermissionError(1, 'Operation not permitted')\nos.mkfifo = refuse\n"
    program = f"import os\n{refuse}from homelab.node.run import torchrun\ntorchrun.watch({here!r})"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30, cwd=REPOSITORY, env={**os.environ, "HOMELAB_RUN_DIR": folder})
    pipe = ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"] if takes_pipes else []
    assert Path(here, "out.log").read_text() == f"{['TORCH_FR_DUMP_TEMP_FILE', *pipe]}\n"
    assert not list(Path(here).glob("*.probe"))


def test_a_node_s_own_environment_is_that_of_all_it_is_asked_for(workdir: Path) -> None:
    """cluster.toml's variables reach the run, and the run's own go before them."""
    script = "import os; print(os.environ['ONE'], os.environ['ODD'][:2], os.environ['TWO'])"
    of_recipe = {"ONE": "of the recipe", "TWO": "of the recipe"}  # where a recipe is looked at: its model and data are found by them
    ask("start", request(workdir, script, recipe_environment=of_recipe, node_environment={"ONE": "of the node", "ODD": "of the node"}))
    ended(workdir)
    here = Path(paths.node_dir(paths.run_dir(str(workdir), RUN), 1, NODE))
    assert (here / "out.log").read_text() == "of the node it of the recipe\n"
    assert "of the node" not in (here / "start.json").read_text()


def test_a_question_to_the_model_goes_to_the_cards_of_the_run(workdir: Path) -> None:
    folder = paths.run_dir(str(workdir), RUN)
    assert worker_programs.cards_of(folder, NODE) == {}
    for attempt, cards in (
        (1, {"CUDA_VISIBLE_DEVICES": "GPU-0a"}),
        (2, {"CUDA_VISIBLE_DEVICES": "GPU-0b,GPU-0a", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
    ):
        ask("start", request(workdir, attempt=attempt, environment={"NCCL_DEBUG": "WARN", **cards}))
        ended(workdir, attempt)
        assert worker_programs.cards_of(folder, NODE) == cards


@pytest.mark.parametrize(("code", "kind"), [(-9, "no-room"), (5, "no-room"), (2, "refused"), (1, "refused")])
def test_a_model_without_room_is_told_from_other_refusals(code: int, kind: str) -> None:
    said = "" if code == -9 else "error: the model needs about 14.00 GB\nwhere: /m\nfix: free RAM\n"
    refusal = worker_programs._refusal(subprocess.CompletedProcess([], code, "", said), "chat program")
    assert refusal.kind == kind and refusal.hint
