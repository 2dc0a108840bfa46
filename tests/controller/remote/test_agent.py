"""The shipped agent over real sshd: odd shells, greetings, paths and Pythons; and nodes that answer what they must not."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shlex
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.config.cluster import Cluster, Node
from homelab.controller.remote.agent import Agent, connect
from homelab.controller.remote.bootstrap import ANSWER_MARK
from homelab.lab import Lab
from homelab.shared.protocol import manifest
from homelab.shared.protocol.layout import USABLE_NAME
from homelab.shared.protocol.network_messages import MeetRequest

pytestmark = pytest.mark.timeout(90)
ShellOf = Callable[[str, str], AbstractContextManager[None]]


@contextlib.contextmanager
def agent_of(cluster: Cluster, name: str = "node1", **changes: Any) -> Iterator[Agent]:
    node = Node.model_validate({**cluster.node(name).model_dump(), **changes})
    agent = connect(cluster, node)
    try:
        yield agent
    finally:
        agent.close()


def home(lab: Lab, name: str) -> Path:
    return Path(lab.state.node(name).home)


def ask_everything(agent: Agent) -> None:
    """The three ways to talk with an agent: a question, raw bytes, and a verb that stays."""
    assert agent.ask("facts", {"peers": []})["node"] == agent.node.name
    stream = agent.open("meet", {"address": "127.0.0.1", "seconds": 5})
    assert len(json.loads(stream.readline(10))["ports"]) == 8
    stream.close()
    run = "2026-01-01-0000-raw"
    content = b"\0\xff\n" * 1000
    folder = Path(manifest.folder_of(Path(agent.ask("facts", {"peers": []})["resources"]["workdir"]) / "runs" / run, 20))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "weights").write_bytes(content)
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / manifest.MANIFEST).write_text(json.dumps({"schema": manifest.SCHEMA, "step": 20, "files": {"weights": entry}}))
    into = io.BytesIO()
    agent.fetch("send-checkpoint", {"run": run, "step": 20}, into)
    with tarfile.open(fileobj=io.BytesIO(into.getvalue())) as archive:
        member = archive.extractfile("weights")
        assert member is not None and member.read() == content


@pytest.mark.parametrize("shell", ["bash", "sh", "fish", "tcsh", "csh"])
def test_any_login_shell(cluster: Cluster, shell_of: ShellOf, remote_lab: Lab, shell: str) -> None:
    workdir = home(remote_lab, "node1") / f'{shell}! it\'s \\ "$(touch pwned)" `x` ä #~ *'
    with shell_of("node1", shell), agent_of(cluster, workdir=str(workdir)) as agent:
        ask_everything(agent)
    assert (workdir / "code").is_dir()
    assert not list(home(remote_lab, "node1").rglob("pwned"))


@pytest.mark.parametrize("greeting", ["echo Welcome to my shell", "printf 'no end of line'", f"echo '{{}}'; echo not-{ANSWER_MARK}-yet"])
def test_a_shell_that_prints_on_start(cluster: Cluster, remote_lab: Lab, greeting: str) -> None:
    file = home(remote_lab, "node1") / ".bashrc"
    file.write_text(greeting + "\n")
    try:
        with agent_of(cluster) as agent:
            assert agent.session.run("true", timeout_s=10).stdout, "the greeting is really there"
            ask_everything(agent)
    finally:
        file.unlink()


def test_a_python_that_prints_on_start(cluster: Cluster, remote_lab: Lab) -> None:
    """A company's sitecustomize, a line of a .pth file: before every answer, also before raw bytes and before streams."""
    site = home(remote_lab, "node1") / "greets"
    site.mkdir()
    (site / "sitecustomize.py").write_text('print("Welcome to", __name__)\nprint("no end of line", end="")\n')
    python = python_at(home(remote_lab, "node1"), f'#!/bin/sh\nPYTHONPATH={site}:$PYTHONPATH exec {shlex.quote(sys.executable)} "$@"\n')
    with agent_of(cluster, python=python) as agent:
        assert b"Welcome" in agent.session.run(f"{shlex.quote(python)} -c ''", timeout_s=10).stdout, "the greeting is really there"
        ask_everything(agent)


def test_a_python_that_prints_and_says_nothing_else(cluster: Cluster, remote_lab: Lab) -> None:
    error = error_of(cluster, python=python_at(home(remote_lab, "node1"), answering("Welcome")))
    assert "gave no answer" in error.message and error.message.endswith(": Welcome")
    assert "-c pass" in error.hint and "sitecustomize" in error.hint


def test_the_agent_reads_and_writes_utf8_in_every_locale(cluster: Cluster, remote_lab: Lab) -> None:
    file = home(remote_lab, "node1") / ".bashrc"
    file.write_text("export LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0\n")
    try:
        with agent_of(cluster, workdir=str(home(remote_lab, "node1") / "Küche")) as agent:
            assert agent.ask("facts", {"peers": []})["resources"]["workdir"].endswith("Küche")
        assert (home(remote_lab, "node1") / "Küche" / "code").is_dir()
    finally:
        file.unlink()


def python_at(folder: Path, text: str) -> str:
    """An executable of the node that stands where its Python should be."""
    file = folder / "fake python"
    file.write_text(text)
    file.chmod(0o755)
    return str(file)


def old_python(version: tuple[int, int]) -> str:
    """A Python that takes itself for an older one."""
    return f"""#!{sys.executable}
import platform, runpy, sys
sys.version_info = ({version[0]}, {version[1]}, 0, "final", 0)
sys.version = platform_version = "{version[0]}.{version[1]}.0 (fake)"
platform.python_version = lambda: "{version[0]}.{version[1]}.0"
option, what, *rest = sys.argv[1:]
sys.argv = [option, *rest]
if option == "-c":
    exec(what, {{"__name__": "__main__"}})
else:
    runpy.run_module(what, run_name="__main__", alter_sys=True)
"""


def error_of(cluster: Cluster, **changes: Any) -> HomelabError:
    """The error of asking node1 for facts: one message in three parts."""
    with agent_of(cluster, **changes) as agent, pytest.raises(HomelabError) as caught:
        agent.ask("facts", {"peers": []})
    error = caught.value
    assert "node node1" in error.where and error.hint and "Traceback" not in str(error)
    return error


@pytest.mark.parametrize("code_is_there", [False, True])
def test_a_python_that_is_too_old_for_the_agent(cluster: Cluster, remote_lab: Lab, code_is_there: bool) -> None:
    python = python_at(home(remote_lab, "node1"), old_python((3, 6)))
    workdir = str(home(remote_lab, "node1") / f"old-{code_is_there}")
    if code_is_there:
        with agent_of(cluster, workdir=workdir) as agent:
            agent.ask("runs")
    error = error_of(cluster, python=python, workdir=workdir)
    assert "is Python 3.6" in error.message and "needs 3.9 or newer" in error.message
    assert "cluster.toml" in error.hint and "python = ..." in error.hint


def test_a_python_that_is_old_but_can_run_the_agent_speaks(cluster: Cluster, remote_lab: Lab) -> None:
    with agent_of(cluster, python=python_at(home(remote_lab, "node1"), old_python((3, 9)))) as agent:
        assert agent.ask("facts", {"peers": []})["python"]["version"] == "3.9.0"


def test_where_python_is_missing_another_one_answers(cluster: Cluster) -> None:
    with agent_of(cluster, python="/nowhere/bin/python") as agent:
        python = agent.ask("facts", {"peers": []})["python"]
        assert python["executable"] != "/nowhere/bin/python" and python["is_another"] is True
    with agent_of(cluster, python="/usr") as agent:
        assert agent.ask("facts", {"peers": []})["python"]["is_another"] is True, "a folder is no Python either"


def test_a_wrapper_at_the_configured_path_is_the_configured_python(cluster: Cluster, remote_lab: Lab) -> None:
    shim = python_at(home(remote_lab, "node1"), f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    with agent_of(cluster, python=shim) as agent:
        assert agent.ask("facts", {"peers": []})["python"]["is_another"] is False


@pytest.mark.parametrize(
    "text", ["#!/nowhere/interpreter\n", "#!/bin/sh\necho 'Segmentation fault' >&2; exit 139\n", "#!/bin/sh\nkill -9 $$\n"]
)
def test_a_python_that_does_not_start(cluster: Cluster, remote_lab: Lab, text: str) -> None:
    error = error_of(cluster, python=python_at(home(remote_lab, "node1"), text), workdir=str(home(remote_lab, "node1") / "unstarted"))
    assert error.message


def test_no_python_at_all(cluster: Cluster, remote_lab: Lab) -> None:
    file = home(remote_lab, "node1") / ".bashrc"
    file.write_text("PATH=/nowhere\n")
    try:
        error = error_of(cluster, python="~/no/python", workdir=str(home(remote_lab, "node1") / "nothing"))
    finally:
        file.unlink()
    assert "there is no Python at ~/no/python, and no python3 either" in error.message and "python3 -m venv" in error.hint


def test_a_workdir_that_cannot_be(cluster: Cluster, remote_lab: Lab) -> None:
    taken = home(remote_lab, "node1") / "a file"
    taken.write_text("")
    error = error_of(cluster, workdir=str(taken))
    assert "the workdir cannot be written" in error.message and "workdir = ..." in error.hint
    error = error_of(cluster, workdir="/proc/homelab")
    assert "/proc" in error.message + error.where and error.hint


def answering(answer: str, mark: str = ANSWER_MARK) -> str:
    """A fake Python that unpacks like a real one, and answers every verb alike."""
    return f"""#!/bin/sh
case "$1" in -c) exec {shlex.quote(sys.executable)} "$@";; esac
cat >/dev/null &
printf '%s\\n' {shlex.quote(answer)}
"""


@pytest.mark.parametrize(
    "answer",
    ["", "garbage", "[1, 2]", "null", '"text"', "{}", '{"error": 5}', '{"node": 1}', "[" * 100000, '{"time": NaN}', "{'a': 1}", "\x1b[31mred"],
)  # fmt: skip
def test_a_node_that_answers_garbage(cluster: Cluster, remote_lab: Lab, answer: str) -> None:
    error = error_of(cluster, python=python_at(home(remote_lab, "node1"), answering(answer)))
    assert "\x1b" not in str(error)
    assert "gave no answer" in error.message or "never sends" in error.message


@pytest.mark.parametrize("name", ["../../x", "/etc/x", "a/b", "..", "", "a\n", "a b", "$(touch pwned)", "x" * 300, 5, None])
def test_a_run_name_from_a_hostile_node_is_refused(cluster: Cluster, remote_lab: Lab, name: Any) -> None:
    answer = json.dumps({"runs": [{"name": name, "created_at": 1.0, "attempt": 1, "alive": True, "exit": None, "final": False}]})
    with (
        agent_of(cluster, python=python_at(home(remote_lab, "node1"), answering(answer))) as agent,
        pytest.raises(HomelabError, match="never sends") as caught,
    ):
        agent.ask("runs")
    assert "runs.0.name" in caught.value.message


def test_names_of_runs_that_are_fine() -> None:
    assert all(re.fullmatch(USABLE_NAME, name) for name in ("2026-11-21-1405-llama7b-lora", "küche", "a.b_c-2"))


@pytest.mark.parametrize("plans", [{"../x": {}}, {"0": {}}, {"1": []}, []])
def test_a_plan_under_a_number_that_is_none(cluster: Cluster, remote_lab: Lab, plans: Any) -> None:
    answer = json.dumps({"run_json": {}, "plans": plans})
    with (
        agent_of(cluster, python=python_at(home(remote_lab, "node1"), answering(answer))) as agent,
        pytest.raises(HomelabError, match="never sends"),
    ):
        agent.ask("describe", {"run": "x"})


def test_the_words_of_a_refusal_are_made_harmless(cluster: Cluster, remote_lab: Lab) -> None:
    answer = json.dumps({"error": {"kind": "refused", "message": "bad \x1b[2J\x07 thing"}})
    with (
        agent_of(cluster, python=python_at(home(remote_lab, "node1"), answering(answer))) as agent,
        pytest.raises(HomelabError, match="bad  thing"),
    ):
        agent.ask("runs")


def test_a_stream_that_never_begins(cluster: Cluster) -> None:
    with agent_of(cluster, workdir="/nowhere") as agent, pytest.raises(HomelabError, match="did not start"):
        agent.open("meet", MeetRequest(address="127.0.0.1"))
