"""Nodes that answer oddly, over real sshd: whatever their shells, start files and programs do, it is a finding or harmless.

Greetings, garbage and odd Pythons are in test_agent.py; here are shells, start files, locales, lean nodes, slow and broken answers.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Evidence, Finding
from homelab.controller.config.cluster import Cluster
from homelab.controller.config.load import load_cluster
from homelab.controller.facts.node import Facts
from homelab.controller.remote import agent as agents
from homelab.controller.remote import ship
from homelab.controller.remote.bootstrap import ANSWER_MARK
from homelab.controller.remote.fanout import Fleet
from homelab.lab import Lab
from tests.controller.remote.test_agent import agent_of, ask_everything, home, python_at

pytestmark = pytest.mark.timeout(90)
ShellOf = Callable[[str, str], AbstractContextManager[None]]
# What is judged from one answer of each node; the rest needs dials between them. Not power: the nodes share what this machine
# says of its sleep and its upgrades.
SUBJECTS = ("ssh", "python", "disk", "memory", "runs")


@contextmanager
def start_file(lab: Lab, name: str, text: str) -> Iterator[None]:
    """A file that node1's shell reads on start."""
    file = home(lab, "node1") / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    try:
        yield
    finally:
        file.unlink()


def findings(cluster: Cluster, *, timeout_s: float = 20.0) -> dict[str, list[Finding]]:
    """What a preflight says of each node by one question to it; no check may break and no probe."""
    with Fleet(cluster) as fleet:
        answers, unreachable = fleet.ask("facts", {"peers": []}, timeout_s=timeout_s)
    facts = {name: Facts.model_validate(answer) for name, answer in answers.items()}
    assert not any(seen.broken for seen in facts.values()), facts
    evidence = Evidence(
        cluster=cluster, head="node1", master_port=29500, facts=facts, unreachable=unreachable, code_hash=ship.CODE.content_hash()
    )
    found = [
        finding
        for finding in registry.judge_all(evidence, skip=[s.id for s in registry.SUBJECTS if s.id not in SUBJECTS])
        if finding.level != "ok"
    ]
    assert not any(
        "broke" in finding.message or "Traceback" in finding.message + finding.hint or "\x1b" in finding.message for finding in found
    ), found
    return {node.name: [finding for finding in found if finding.node == node.name] for node in cluster.nodes}


def the_only_finding(cluster: Cluster, **options: float) -> Finding:
    """Of node1, which did not answer; the other node is well."""
    found = findings(cluster, **options)
    assert found["node2"] == []
    (finding,) = found["node1"]
    assert (finding.check, finding.level) == ("ssh.login", "fail") and finding.hint
    return finding


def test_nodes_as_they_are_have_no_finding(cluster: Cluster) -> None:
    assert findings(cluster) == {"node1": [], "node2": []}


HARMLESS = {
    "prints on stderr": "echo 'bash: warning: something' >&2",
    "prints on both without an end of line": "printf 'hello'; printf 'hello' >&2",
    "prints colours and a bell": "printf '\\033[1;31mWelcome\\033[0m\\a\\n'",
    "prints a megabyte": "head -c 1000000 /dev/zero | tr '\\0' 'x'",
    "prints JSON": "echo '{\"error\": {\"message\": \"no\", \"kind\": \"refused\"}}'",
    "fails at the first fault": "set -e; set -u; set -o pipefail",
    "traces every command": "set -x",
    "its last command fails": "false",
    "another language": "export LANG=de_DE.UTF-8 LC_ALL=de_DE.UTF-8 LANGUAGE=de",
    "a language whose i has no dot": "export LC_ALL=tr_TR.UTF-8",
    "the C locale": "export LC_ALL=C LANG=C",
    "no programs on PATH": "export PATH=/nowhere",
    "an empty PATH": "export PATH=",
    "no PATH at all": "unset PATH",
    "another HOME, which is not there": "export HOME=/proc/nowhere",
    "another Python's environment": "export PYTHONSTARTUP=/nowhere PYTHONWARNINGS=error PYTHONDONTWRITEBYTECODE=1 PYTHONIOENCODING=ascii PYTHONOPTIMIZE=2",
    "aliases and functions of the same names": "alias exec=false test=false; exec_() { false; }; echo() { :; }; printf() { :; }; export -f echo printf",
    "a mask that lets nobody read": "umask 0777; umask 0077",
    "no files over a megabyte, few open files": "ulimit -S -n 1024",
    "does not parse": "if then; exit 9\nfi",
    "slow": "sleep 1",
    "reads a line of stdin unless it is a terminal": "[ -t 0 ] && read -r line",
}  # fmt: skip


# Some write, some take away, some change the shell: one of each kind always, the others thoroughly.
USUAL = (
    "prints JSON",
    "prints a megabyte",
    "no PATH at all",
    "another language",
    "traces every command",
    "its last command fails",
    "another Python's environment",
)


@pytest.mark.parametrize(
    "text", [pytest.param(HARMLESS[name], id=name, marks=() if name in USUAL else pytest.mark.thorough) for name in HARMLESS]
)
def test_a_start_file_that_is_harmless(cluster: Cluster, remote_lab: Lab, text: str) -> None:
    with start_file(remote_lab, ".bashrc", text + "\n"):
        assert findings(cluster) == {"node1": [], "node2": []}


def test_start_files_that_greet_disturb_no_kind_of_question(cluster: Cluster, remote_lab: Lab) -> None:
    for text in ("printf 'hello'; printf 'hello' >&2", "export PATH=/nowhere LC_ALL=tr_TR.UTF-8", "set -eux"):
        with start_file(remote_lab, ".bashrc", text + "\n"), agent_of(cluster) as agent:
            ask_everything(agent)


# What the start file does, words of the message.
FATAL = {
    "ends": ("exit 3", "its shell ended before it started homelab's agent (exit code 3)"),
    "ends with success": ("echo go away; exit", "(exit code 0): go away"),
    "fails under set -e": ("set -e; cd /nowhere", "/nowhere"),
    "becomes another shell": ("exec cat /dev/null", "exit code 0"),
    "ends with the code of a missing program": ("exit 127", "exit code 127"),
    "prints without end": ("yes", "more than"),
}


@pytest.mark.parametrize(("text", "words"), FATAL.values(), ids=FATAL)
def test_a_start_file_that_keeps_the_agent_from_starting(
    cluster: Cluster, remote_lab: Lab, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    monkeypatch.setattr(agents, "_MOST_ANSWER_BYTES", 4 << 20)
    with start_file(remote_lab, ".bashrc", text + "\n"):
        found = the_only_finding(cluster)
    assert words in found.message and ("~/.bashrc" in found.hint or "prints at start" in found.hint)


def test_a_node_that_takes_longer_than_it_may(cluster: Cluster, remote_lab: Lab) -> None:
    with start_file(remote_lab, ".bashrc", "sleep 20\n"):
        assert "no answer within 1 s" in the_only_finding(cluster, timeout_s=1.0).message
    assert findings(cluster)["node1"] == [], "and it is healthy again"


RC_FILES = {"fish": ".config/fish/config.fish", "tcsh": ".tcshrc", "csh": ".cshrc", "bash": ".bashrc"}


@pytest.mark.parametrize("shell", ["bash", "fish", *(pytest.param(shell, marks=pytest.mark.thorough) for shell in ("dash", "tcsh", "csh"))])
def test_a_login_shell_of_another_language_that_greets_and_has_hardly_a_path(
    cluster: Cluster, shell_of: ShellOf, remote_lab: Lab, shell: str
) -> None:
    path = {"fish": "set -gx PATH /nowhere", "tcsh": "setenv PATH /nowhere", "csh": "setenv PATH /nowhere"}.get(
        shell, "export PATH=/nowhere"
    )
    with shell_of("node1", shell), start_file(remote_lab, RC_FILES.get(shell, ".dashrc"), f"echo Welcome\n{path}\n"):
        with agent_of(cluster) as agent:
            greeted = b"Welcome" in agent.session.run("true", timeout_s=10).stdout
        assert greeted or shell == "dash", "dash reads no file here"
        assert findings(cluster) == {"node1": [], "node2": []}


@pytest.mark.parametrize("shell", ["nologin", "false"])
def test_an_account_that_may_not_log_in(cluster: Cluster, shell_of: ShellOf, shell: str) -> None:
    with shell_of("node1", shell):
        found = the_only_finding(cluster)
    assert "exit code 1" in found.message and "login shell" in found.hint


def test_a_key_that_may_do_something_else_only(cluster: Cluster, remote_lab: Lab) -> None:
    """authorized_keys with command="...": a key that was made for backups, say."""
    file = remote_lab.state.node_folder(remote_lab.state.node("node1")) / "authorized_keys"
    before = file.read_text()
    file.write_text('command="echo only backups with this key; exit 4" ' + before)
    try:
        found = the_only_finding(cluster)
    finally:
        file.write_text(before)
    assert "only backups with this key" in found.message


def test_a_home_that_cannot_be_written(cluster: Cluster, remote_lab: Lab) -> None:
    node = cluster.node("node1").model_copy(update={"workdir": "~/homelab"})
    changed = cluster.model_copy(update={"nodes": (node, *cluster.nodes[1:])})
    with start_file(remote_lab, ".bashrc", "export HOME=/proc/nowhere\n"):
        found = the_only_finding(changed)
    assert "the workdir cannot be written" in found.message and "workdir = ..." in found.hint


def broken_after(text: str) -> str:
    """A Python of the node that unpacks as a real one and answers with this shell text."""
    return f'#!/bin/sh\ncase "$1" in -c) exec {shlex.quote(sys.executable)} "$@";; esac\n{text}\n'


HALVES = {
    "killed in the middle of its answer": ('printf \'{"node": "node1", "hostn\'; kill -9 $$', "killed while it answered"),
    "half an answer": ('printf \'{"node": "node1", "hostn\'', "gave no answer to 'facts'"),
    "an answer and then more": ('echo \'{"node": "node1"}\'; echo bye', "gave no answer to 'facts'"),
    "an answer without end": ("cat /dev/zero", "more than 4 MiB"),
    "no text at all": ("printf '\\377\\376\\000'", "gave no answer to 'facts'"),
    "nothing, and a crash": ("echo 'Illegal instruction' >&2; exit 132", "Illegal instruction"),
    "errors without end, then nothing": ("head -c 8000000 /dev/zero | tr '\\0' e >&2; exit 1", "gave no answer to 'facts'"),
    "values of other types": (
        'echo \'{"node": "node1", "system": {"cpu_count": "many"}, "python": {"packages": 5}, "gpu": {"cards": {}}}\'',
        "never sends",
    ),
    "a mark within the answer": (f'printf \'{{"node": "{ANSWER_MARK}\\n"\'', "gave no answer to 'facts'"),
}


@pytest.mark.parametrize(("text", "words"), HALVES.values(), ids=HALVES)
def test_half_an_answer(cluster: Cluster, remote_lab: Lab, monkeypatch: pytest.MonkeyPatch, text: str, words: str) -> None:
    monkeypatch.setattr(agents, "_MOST_ANSWER_BYTES", 4 << 20)
    node = cluster.node("node1").model_copy(update={"python": python_at(home(remote_lab, "node1"), broken_after(text))})
    found = the_only_finding(cluster.model_copy(update={"nodes": (node, *cluster.nodes[1:])}))
    assert words in found.message and len(found.message) < 1000


def test_words_that_a_terminal_would_obey_are_made_harmless(cluster: Cluster, remote_lab: Lab) -> None:
    said = {
        "node": "node1",
        "system": {"hostname": "\x1b]0;owned\x07x\ud800"},
        "resources": {"workdir_writable": False, "workdir_problem": "\x1b[2Jno"},
        "python": {"packages": {"\x1b[1mx": "1"}},
    }
    python = python_at(home(remote_lab, "node1"), broken_after(f"echo {shlex.quote(json.dumps(said))}"))
    with agent_of(cluster, python=python) as agent:
        answer = agent.ask("facts", {"peers": []})
    assert (answer["system"]["hostname"], answer["resources"]["workdir_problem"], answer["python"]["packages"]) == ("x?", "no", {"x": "1"})
    node = cluster.node("node1").model_copy(update={"python": python})
    found = findings(cluster.model_copy(update={"nodes": (node, *cluster.nodes[1:])}))
    assert "fail" in {finding.level for finding in found["node1"]} and found["node2"] == [], "who says next to nothing is not well"


def test_code_of_ours_that_was_changed_or_is_damaged(cluster: Cluster, remote_lab: Lab) -> None:
    """Where the agent still runs, the check finds it by its hash; where it does not, its error says so. The hint mends both."""
    workdir = home(remote_lab, "node1") / "changed"
    node = cluster.node("node1").model_copy(update={"workdir": str(workdir)})
    changed = cluster.model_copy(update={"nodes": (node, *cluster.nodes[1:])})
    assert findings(changed)["node1"] == []
    code = Path(ship.code_dir(str(workdir))) / "homelab"
    with (code / "worker" / "training" / "train.py").open("a") as stream:
        stream.write("# edited on the node\n")
    (found,) = findings(changed)["node1"]
    assert (found.check, found.level) == ("python.code", "fail") and f"rm -r {shlex.quote(str(code.parent))}" in found.fix
    for damage in (
        lambda: (code / "node" / "facts.py").write_text("import ("),
        lambda: (code / "node" / "facts.py").unlink(),
        lambda: (code / "node" / "__main__.py").unlink(),
    ):
        damage()
        found = the_only_finding(changed)
        assert "was changed or is damaged" in found.message and f"rm -r {shlex.quote(str(code.parent))}" in found.hint
    shutil.rmtree(code.parent)  # what the hint says
    assert findings(changed)["node1"] == []


def test_a_banner_before_the_login(tmp_path: Path) -> None:
    with Lab.up(tmp_path / "lab", nodes=1) as lab:
        folder = lab.state.node_folder(lab.state.node("node1"))
        (folder / "banner").write_text("*** Authorised use only ***\n" * 50)
        lab.fault("node1", "power-cut")
        with (folder / "sshd_config").open("a") as stream:
            stream.write(f'Banner "{folder / "banner"}"\nPrintMotd yes\n')
        lab.fault("node1", "power-on")
        cluster = load_cluster(lab.cluster_file)
        assert findings(cluster) == {"node1": []}
        with agent_of(cluster) as agent:
            transport = agent.session._connection.transport  # type: ignore[attr-defined]
            assert b"Authorised use only" in transport.get_banner(), "the banner is really there"
            ask_everything(agent)


def test_an_endless_answer_does_not_fill_the_memory_of_this_machine(cluster: Cluster, remote_lab: Lab) -> None:
    with (
        start_file(remote_lab, ".bashrc", "cat /dev/zero\n"),
        agent_of(cluster) as agent,
        pytest.raises(HomelabError, match="more than 64 MiB") as caught,
    ):
        agent.ask("runs")
    assert not isinstance(caught.value, UnreachableError)
