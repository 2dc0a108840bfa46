"""Nodes that are not as they should be: what preflight, launch and trust say of them, with which exit code, and what they leave."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from homelab.lab import Lab
from scripts.practice.desk import Desk, copy_of_cluster, wait_until
from tests.cli.conftest import LAW, complaint

pytestmark = pytest.mark.timeout(300)


def edit(desk: Desk, node: str, **keys: Any) -> None:
    """From now on the desk uses a cluster.toml of its own, in which this node has other keys."""
    if desk.cluster.parent != desk.folder:
        desk.cluster = copy_of_cluster(desk.lab, desk.folder)
    head, *nodes = desk.cluster.read_text(encoding="utf-8").split("[[nodes]]\n")
    for index, text in enumerate(nodes):
        if f'name = "{node}"' in text:
            lines = [line for line in text.strip().splitlines() if line.split(" = ")[0] not in keys]
            nodes[index] = "\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]) + "\n\n"
    desk.cluster.write_text("[[nodes]]\n".join([head, *nodes]), encoding="utf-8")


def findings(desk: Desk, *arguments: str, code: int) -> list[dict[str, str]]:
    """What `preflight` finds fault with."""
    found = [entry for entry in desk.json("preflight", *arguments, code=code)["findings"] if entry["level"] == "fail"]
    for entry in found:
        assert entry["hint"], entry
    return found


def home(desk: Desk, node: str) -> Path:
    return Path(desk.lab.state.node(node).home)


def ssh(desk: Desk, node: str, command: str) -> str:
    done = subprocess.run([*desk.lab.ssh_command(node), command], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_node_that_does_not_answer(desk: Desk) -> None:
    edit(desk, "node2", port=1)
    (found,) = findings(desk, code=3)
    assert (found["check"], found["node"]) == ("ssh.login", "node2") and "port 1" in found["message"]
    shown = desk.homelab("preflight", code=3).stdout
    assert f"FAIL node2, ssh.login: {found['message']}" in shown and f"fix: {found['hint']}" in shown
    error = complaint(desk, "launch", "script.toml", code=3)
    assert "node2" in error["where"] and "port 1" in error["message"]
    assert "node2 did not answer" in desk.homelab("plan", "script.toml", code=0).stdout
    assert not (desk.folder / "runs").exists()
    edit(desk, "node1", port=1)
    complaint(desk, "plan", "script.toml", code=3)
    complaint(desk, "recover", "some-run", code=3)
    complaint(desk, "status", code=3)
    unreachable = desk.json("runs")["unreachable"]
    assert set(unreachable) == {"node1", "node2"} and all(entry["hint"] for entry in unreachable.values())


def test_a_login_that_is_refused_and_a_key_that_is_not_there(desk: Desk) -> None:
    edit(desk, "node2", identity_file=str(desk.folder / "my key"))
    assert "does not exist" in findings(desk, "--nodes", "node2", code=3)[0]["message"]
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(desk.folder / "my key")], check=True, stdin=subprocess.DEVNULL)
    (found,) = findings(desk, "--nodes", "node2", code=3)
    assert "login was refused" in found["message"] and "ssh-copy-id" in found["hint"]


def test_an_unknown_host_key_needs_an_explicit_yes(desk: Desk) -> None:
    edit(desk, "node1")
    known = desk.folder / "own known_hosts"
    text = desk.cluster.read_text()
    line = next(line for line in text.splitlines() if line.startswith("known_hosts"))
    desk.cluster.write_text(text.replace(line, 'known_hosts = "own known_hosts"'))
    found = findings(desk, code=3)
    assert {entry["node"] for entry in found} == {"node1", "node2"}
    assert all("not known yet" in entry["message"] and entry["hint"].startswith("homelab trust node") for entry in found)

    error = complaint(desk, "trust", code=2, as_json=False)  # standard input is closed: nobody can say yes
    assert "no terminal to ask" in error["message"] and "--yes" in error["hint"]
    declined = subprocess.run(
        [sys.executable, "-m", "homelab", "trust", "node1"], input="n\n", capture_output=True, text=True, cwd=desk.folder, env=desk._environment()
    )  # fmt: skip
    assert declined.returncode == 1 and "not remembered" in declined.stdout and "homelab trust node1" in declined.stderr
    assert not known.exists()

    accepted = desk.homelab("trust", "--yes").stdout
    assert accepted.count("SHA256:") == 2 and str(known) in accepted
    assert "known already" in desk.homelab("trust").stdout
    findings(desk, code=0)

    changed = known.read_text().splitlines()[0].split()[0] + " " + _other_key(desk.folder) + "\n"
    known.write_text(changed)
    error = complaint(desk, "trust", "node1", "--yes", code=3, as_json=False)
    assert "host key CHANGED" in error["message"] and "ssh-keygen" in error["hint"]
    (found_changed,) = findings(desk, "--nodes", "node1", code=3)
    assert "CHANGED" in found_changed["message"]
    assert known.read_text() == changed, "nothing was accepted silently"


def _other_key(folder: Path) -> str:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "other")], check=True, stdin=subprocess.DEVNULL)
    return " ".join((folder / "other.pub").read_text().split()[:2])


def fake_python(desk: Desk, node: str, name: str, patch: str) -> str:
    """A Python on the node that runs everything as this one, after `patch`."""
    file = home(desk, node) / name
    file.write_text(f"""#!{sys.executable}
import platform, runpy, sys
{patch}
option, what, *rest = sys.argv[1:]
sys.argv = [option, *rest]
if option == "-c":
    exec(what, {{"__name__": "__main__"}})
else:
    runpy.run_module(what, run_name="__main__", alter_sys=True)
""")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize(
    ("patch", "code", "check", "words"),
    [
        pytest.param('sys.version_info = (3, 6, 0, "final", 0)', 1, "ssh.login", "needs 3.9 or newer", marks=pytest.mark.thorough),
        pytest.param('platform.python_version = lambda: "3.10.1"', 1, "python.version", "the worker needs 3.11", marks=pytest.mark.thorough),
        ("sys.path[:] = [folder for folder in sys.path if 'site-packages' not in folder]", 1, "python.packages", "torch, transformers, peft"),
        ("sys.path.insert(0, OTHER)", 1, "python.same", "transformers is 4.0.0 here"),
    ],
    ids=["too old", "old", "packages missing", "other versions"],
)  # fmt: skip
def test_a_python_that_will_not_do(desk: Desk, patch: str, code: int, check: str, words: str) -> None:
    other = home(desk, "node2") / "other"
    (other / "transformers-4.0.0.dist-info").mkdir(parents=True, exist_ok=True)
    (other / "transformers-4.0.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.0\n")
    edit(desk, "node2", python=fake_python(desk, "node2", "python with a space", patch.replace("OTHER", repr(str(other)))))
    (found,) = findings(desk, code=code)
    assert (found["node"], found["check"]) == ("node2", check) and words in found["message"], found
    assert "pip install" in found["hint"] or "cluster.toml" in found["hint"] or "-m venv" in found["hint"]
    error = complaint(desk, "launch", "law.toml", "--skip", "model", code=1, as_json=False)
    assert words in error["message"] and "node2" in error["where"]


def test_a_node_without_the_python_of_cluster_toml(desk: Desk) -> None:
    edit(desk, "node2", python="~/.homelab/env/bin/python")
    (found,) = findings(desk, code=1)
    assert found["check"] == "python.interpreter" and "there is no Python at ~/.homelab/env/bin/python" in found["message"]
    assert "homelab setup" in found["hint"] and "node2" in found["hint"]


@contextmanager
def listener(desk: Desk, node: str, port: int) -> Iterator[None]:
    """A stranger that holds a port of the node."""
    program = f"import socket, sys; s = socket.create_server(('', {port})); print('ready', flush=True); sys.stdin.read()"
    command = [*desk.lab.ssh_command(node), f'{sys.executable} -c "{program}"']
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdin
        assert process.stdout.readline() == "ready\n"
        try:
            yield
        finally:
            process.stdin.close()
            process.wait(10)


def test_a_stranger_on_the_rendezvous_port(desk: Desk) -> None:
    with listener(desk, "node1", 29500):
        (found,) = findings(desk, "--only", "network", code=1)
        assert found["node"] == "node1" and "the rendezvous port 29500 is in use by" in found["message"]
        assert "create_server" in found["message"], "the process is named"
        assert "port = 29501" in found["hint"] and "kill " in found["hint"]
        error = complaint(desk, "launch", "script.toml", code=1)
        assert "29500" in error["message"]
    assert not (desk.folder / "runs").exists()


def test_data_that_is_missing_on_a_node_or_another_there(desk: Desk) -> None:
    row = json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}) + "\n"
    name = "my data $(touch pwned) it's.jsonl"
    desk.write("on-node.toml", LAW.replace('"chats.jsonl"', json.dumps(f"~/{name}")))
    for node in ("node1", "node2"):
        (home(desk, node) / name).unlink(missing_ok=True)
    found = findings(desk, "on-node.toml", "--only", "data", "--skip", "data.enough", code=1)
    assert len(found) == 2 and all("No such file" in entry["message"] and name in entry["message"] for entry in found)
    (home(desk, "node1") / name).write_text(row)
    (found_one,) = findings(desk, "on-node.toml", "--only", "data", "--skip", "data.enough", code=1)
    assert found_one["node"] == "node2" and "scp" in found_one["hint"]
    (home(desk, "node2") / name).write_text(row + "\n")
    (found_other,) = findings(desk, "on-node.toml", "--only", "data", "--skip", "data.enough", code=1)
    assert "differs from that of node1" in found_other["message"]
    complaint(desk, "launch", "on-node.toml", "--skip", "model", "--skip", "collective", code=1, as_json=False)
    (home(desk, "node2") / name).write_text(row)
    findings(desk, "on-node.toml", "--only", "data", "--skip", "data.enough", code=0)


@pytest.mark.thorough
def test_a_model_folder_that_is_none(desk: Desk) -> None:
    folder = Path(desk.lab.folder) / "a model's folder"
    desk.write("model.toml", LAW.replace('"/nowhere/model"', json.dumps(str(folder))))
    shutil.rmtree(folder, ignore_errors=True)
    steps: list[tuple[str, str, str]] = [
        ("", "", "there is no such folder"),
        (".", "", "config.json is missing or broken"),
        ("config.json", "{", "config.json is missing or broken"),
        ("config.json", '{"model_type": "llama"}', "no weights"),
        ("model.safetensors", "x", "no tokenizer"),
    ]
    for name, content, words in steps:
        if name == ".":
            folder.mkdir()
        elif name:
            (folder / name).write_text(content)
        found = findings(desk, "model.toml", "--only", "model", code=1)
        assert len(found) == 2 and all(words in entry["message"] for entry in found), (words, found)
    error = complaint(desk, "launch", "model.toml", code=1, as_json=False)
    assert "no tokenizer" in error["message"] and "model" in error["where"]


@contextmanager
def small_disk(desk: Desk, node: str, options: str) -> Iterator[Path]:
    """A disk of its own as workdir, inside of the node's mount namespace."""
    if desk.lab.state.backend != "namespaces":
        pytest.skip("a disk of its own needs the node's own mount namespace")
    folder = home(desk, node) / "small disk"
    ssh(desk, node, f"mkdir -p '{folder}' && mount -t tmpfs -o {options} homelab-test '{folder}'")
    edit(desk, node, workdir=str(folder))
    try:
        yield folder
    finally:
        ssh(desk, node, f"umount '{folder}'")


def test_a_disk_too_small_for_the_agent(desk: Desk) -> None:
    with small_disk(desk, "node2", "size=64k"):
        (found,) = findings(desk, code=1)
        assert "the disk is full" in found["message"] and "df -h" in found["hint"] and "cluster.toml" in found["hint"]
        assert ssh(desk, "node2", f"ls -A '{home(desk, 'node2')}/small disk/code'").strip() == "", "no half of it stays"


def test_a_disk_that_cannot_be_written(desk: Desk) -> None:
    with small_disk(desk, "node2", "size=1m,ro"):
        (found,) = findings(desk, code=1)
        assert "cannot be written" in found["message"] and "workdir = ..." in found["hint"]
        complaint(desk, "launch", "script.toml", code=1)


@pytest.mark.thorough
def test_a_disk_that_is_full_at_facts_at_ship_and_at_start(desk: Desk) -> None:
    with small_disk(desk, "node2", "size=2500k"):  # room for the code, and not for 3 MB of a script
        (found,) = findings(desk, code=1)
        assert found["check"] == "disk.room" and "free" in found["message"]
        desk.write("train.py", "pass\n" + "#" * 3_000_000)
        error = complaint(desk, "launch", "script.toml", "--skip", "disk", "--skip", "collective", code=1, as_json=False)
        assert "the disk is full" in error["message"] and "node2" in error["where"]
        data = f"{home(desk, 'node2')}/small disk/data"
        assert ssh(desk, "node2", f"find '{data}' -type f 2>/dev/null; true").strip() == "", "no half of it stays"
        assert desk.json("status", code=None).get("state") in (None, "planned", "shipping", "failed")  # None: there is no run yet
        desk.write("train.py", "pass\n")
        desk.homelab("preflight", "script.toml", "--only", "ssh")
        ssh(desk, "node2", f"dd if=/dev/zero of='{home(desk, 'node2')}/small disk/filler' bs=1k 2>/dev/null; true")
        error = complaint(desk, "launch", "script.toml", "--skip", "disk", "--skip", "collective", code=1, as_json=False)
        assert "the disk is full" in error["message"], error
        # If node1 was started, it is ended again; a full disk does not keep `stop` from its work either.
        assert all(desk.json("stop", run.name)["clean"] for run in (desk.folder / "runs").glob("*"))
        desk.homelab("launch", "script.toml", "--nodes", "node1")
        desk.homelab("stop")


@pytest.mark.thorough
def test_a_full_disk_does_not_save_a_run_from_stop(desk: Desk) -> None:
    with small_disk(desk, "node2", "size=3m") as folder:  # room for the code and the run's first files
        started = desk.json("launch", "script.toml", "--skip", "disk", "--skip", "collective")
        # Both programs have begun: later a full disk does not end them.
        wait_until(lambda: desk.homelab("logs", started["run"]).stdout.count("here") == 2, 60)
        ssh(desk, "node2", f"dd if=/dev/zero of='{folder}/filler' bs=1k 2>/dev/null; true")
        stopped = desk.json("stop", started["run"])
        assert stopped["clean"] and stopped["nodes"]["node2"]["asked"] > 0, stopped


def test_a_controller_that_cannot_write_its_runs(desk: Desk) -> None:
    desk.write("runs", "a file")
    error = complaint(desk, "launch", "script.toml", code=1)
    assert "cannot be written" in error["message"] and "runs" in error["where"] and "--runs-dir" in error["hint"]


@pytest.mark.thorough
def test_odd_names_everywhere_and_a_run_that_ends_well(cli_lab: Lab, desk: Desk) -> None:
    """Spaces, quotes, a substitution, a line break, letters beyond ASCII: in every name a user can choose."""
    odd = 'it\'s "$(touch pwned)" `touch pwned` ä;\\n&'
    script = f"{odd}\nmore.py"
    (desk.folder / script).write_text("import os, sys\nprint('arguments', sys.argv[1:], os.environ['HOMELAB_NODE'])\n")
    recipe = desk.folder / f"{odd}.toml"
    recipe.write_text(f"[script]\npath = {json.dumps(script)}\nargs = [{json.dumps(odd)}, '--x=$(touch pwned)']\n", encoding="utf-8")
    for number, node in enumerate(cli_lab.nodes):
        edit(desk, node.name, workdir=f"{node.home}/{odd}")
        desk.cluster.write_text(desk.cluster.read_text().replace(f'name = "{node.name}"', f'name = "küche.{number}"'))
    odd_cluster = desk.folder / f"cluster {odd}\n.toml"
    shutil.copy(desk.cluster, odd_cluster)
    desk.cluster = odd_cluster
    runs = ["--runs-dir", f"{odd}\nruns"]
    desk.homelab("launch", recipe.name, *runs, "--wait", "--cluster", str(odd_cluster), "--nodes", "küche.0, küche.1", timeout_s=90)
    assert desk.json("status", *runs)["state"] == "done"
    said = desk.json("logs", *runs)["ranks"]
    for number in (0, 1):
        assert f"arguments {[odd, '--x=$(touch pwned)']} küche.{number}" in said[str(number)]["stdout"]
    commands = next((desk.folder / runs[1]).glob("*/commands.sh"))
    assert subprocess.run(["/bin/sh", "-n", str(commands)], capture_output=True).returncode == 0
    for node in cli_lab.nodes:
        assert not list(Path(node.home).rglob("pwned*"))
    assert not list(Path("/tmp").glob("pwned")) and not Path("pwned").exists()


@pytest.mark.thorough
@pytest.mark.slow
def test_a_port_where_something_else_answers_nothing(desk: Desk) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        edit(desk, "node2", host="127.0.0.1", port=server.getsockname()[1])
        started = time.monotonic()
        (found,) = findings(desk, "--nodes", "node2", "--only", "ssh", code=3)
    assert "SSH" in found["message"]
    assert time.monotonic() - started < 50, "a server that says nothing at all"


def test_many_lines_of_log_in_a_short_time(desk: Desk) -> None:
    desk.write("train.py", "for number in range(20000):\n    print('line', number, 'x' * 50)\n")
    desk.homelab("launch", "script.toml", "--wait", "--nodes", "node1", timeout_s=60)
    shown = desk.homelab("logs", "-n", "3").stdout
    assert "line 19999" in shown and "line 19996" not in shown
    wait_until(lambda: desk.json("status")["state"] == "done", 10)
