"""`homelab init` on real servers: from an ssh_config and a lab to a cluster.toml, asked on a real terminal, and run again."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from homelab.controller.config.load import load_cluster
from scripts.practice import prepared_commands
from scripts.practice.desk import COMMAND, Desk
from tests.cli.conftest import complaint

pytestmark = pytest.mark.timeout(200)
NEIGHBOURS = "[]"


class Home:
    """A person's home with an ssh_config for the nodes of the lab, and the programs that `init` asks, which answer from recorded texts."""

    def __init__(self, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
        self.desk, self.folder = desk, desk.folder / "my home"
        self.ssh = self.folder / ".ssh"
        self.ssh.mkdir(parents=True)
        self.known_hosts = self.ssh / "known_hosts"
        self.file = desk.folder / "cluster.toml"
        desk.cluster = self.file
        programs = self.folder / "bin"
        programs.mkdir()
        # ssh reads the home of the account, never HOME: the real program, told where the config is.
        self._program(
            programs / "ssh",
            f'[ -f "$HOME/.ssh/config" ] || exec {shutil.which("ssh")} -F none "$@"; exec {shutil.which("ssh")} -F "$HOME/.ssh/config" "$@"',
        )
        self._program(programs / "ip", f"cat '{self.folder}/ip '\"$2\"")
        (self.folder / "ip neigh").write_text(NEIGHBOURS)
        (self.folder / "ip addr").write_text("[]")
        monkeypatch.setenv("HOME", str(self.folder))
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        self.config()

    def _program(self, file: Path, script: str) -> None:
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    def node(self, number: int, name: str, user: str | None = None) -> str:
        """The Host section of a node of the lab under this name."""
        node = self.desk.lab.nodes[number]
        lines = [
            f"Host {name}",
            f"  HostName {node.host}",
            f"  Port {node.port}",
            f"  User {user or node.user}",
            f'  IdentityFile "{self.desk.lab.folder}/keys/id_ed25519"',
        ]
        return "\n".join(lines) + "\n"

    def config(self, *sections: str) -> None:
        """The first node is named inside an Include that stands inside a Host section."""
        (self.ssh / "more").mkdir(exist_ok=True)
        (self.ssh / "more" / "attic.conf").write_text(self.node(0, "attic"))
        include = f'Host *.example laptop\n  ServerAliveInterval 30\nHost *\n  Include "{self.ssh}/more/*.conf"\n'
        forge = "Host github.com\n  IdentityFile ~/.ssh/id\nHost code\n  HostName 127.0.0.1\n  User git\n"
        (self.ssh / "config").write_text("".join([forge, *(sections or [self.node(1, "cellar")]), include.replace(" laptop", "")]))

    def believe(self, *numbers: int) -> None:
        """The host keys of these nodes are known, hashed as Debian's ssh writes them."""
        lines = (self.desk.lab.folder / "known_hosts").read_text().splitlines()
        self.known_hosts.write_text("".join(f"{lines[number]}\n" for number in numbers))
        subprocess.run(["ssh-keygen", "-H", "-f", str(self.known_hosts)], check=True, capture_output=True, stdin=subprocess.DEVNULL)
        assert "|1|" in self.known_hosts.read_text()

    def init(self, *arguments: str, answers: str = "", code: int = 0) -> subprocess.CompletedProcess[str]:
        """With answers on a standard input that is no terminal."""
        done = prepared_commands.run(["init", *arguments], cwd=self.desk.folder, env=self.desk._environment(), timeout_s=100, stdin=answers)
        assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        return done

    def toml(self) -> dict[str, object]:
        return tomllib.loads(self.file.read_text())


@pytest.fixture
def home(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> Home:
    return Home(desk, monkeypatch)


def names(home: Home) -> list[str]:
    return [node.name for node in load_cluster(home.file).nodes]


def test_from_an_ssh_config_to_a_cluster_and_again(home: Home) -> None:
    home.believe(0, 1)
    done = home.init("--yes", "--no-this-machine")
    assert names(home) == ["cellar", "attic"], done.stderr
    assert "cores" in home.file.read_text() and "wrote" in done.stdout and "Next: homelab setup" in done.stdout
    assert {node.host for node in load_cluster(home.file).nodes} == {"attic", "cellar"}
    assert "code" not in done.stderr and "github" not in done.stdout + done.stderr
    first = home.file.read_bytes()
    again = home.init("--yes", "--no-this-machine")
    assert home.file.read_bytes() == first and "nothing to change" in again.stdout
    home.desk.homelab("preflight", "--only", "ssh", code=0)


@pytest.mark.parametrize("line_end", [pytest.param(b"\n", marks=pytest.mark.thorough), b"\r\n"], ids=["unix", "windows"])
def test_the_shipped_example_gives_way_to_the_machines_that_are_found(home: Home, line_end: bytes) -> None:
    home.believe(0, 1)
    home.file.write_bytes((Path(__file__).parents[2] / "cluster.toml").read_bytes().replace(b"\n", line_end))
    done = home.init("attic", "--yes", "--no-this-machine")
    assert names(home) == ["attic"] and "was the example" in done.stdout
    assert "192.168.1." not in home.file.read_text()
    home.init("cellar", "--yes")
    assert names(home) == ["attic", "cellar"], "the file is its owner's now"


def test_a_named_host_is_added_and_every_comment_stays(home: Home) -> None:
    home.believe(0, 1)
    text = (
        '# my machines\n[cluster]  # all of them\nname = "house"\n\n[[nodes]]\nname = "below"  # the old one\nhost = "cellar"\n# the end\n'
    )
    home.file.write_text(text.replace("\n", "\r\n"))
    home.init("attic", "--yes")
    written = home.file.read_bytes().decode()
    assert names(home) == ["below", "attic"] and written.count("\n") == written.count("\r\n")
    assert all(line in written for line in text.split("\n"))
    document = json.loads(home.init("attic", "--yes", "--json").stdout)
    assert document["written"] is False and [node["state"] for node in document["nodes"]] == ["unchanged", "unchanged"]
    assert home.file.read_bytes().decode() == written


@pytest.mark.thorough
def test_a_machine_that_has_moved_is_no_second_node(home: Home) -> None:
    """Its old address is silent, or another machine answers there; its host key, which was accepted once, answers at another place."""
    lines = [line.split(" ", 1) for line in (home.desk.lab.folder / "known_hosts").read_text().splitlines()]
    for old_place in ("[127.0.0.1]:9", lines[0][0]):  # nobody; the other node
        home.known_hosts.write_text(f"{old_place} {lines[1][1]}\n")
        host, _, port = old_place.strip("[").partition("]:")
        text = f'[cluster]\n\n[[nodes]]\nname = "below"  # the old one\nhost = "{host}"  # until the router was exchanged\nport = {port or 22}\n'
        home.file.write_text(text)
        done = home.init("cellar", "--yes", "--no-this-machine")
        assert names(home) == ["below"] and "below is at cellar now" in done.stdout + done.stderr
        (node,) = load_cluster(home.file).nodes
        assert (node.host, "# until the router was exchanged" in home.file.read_text()) == ("cellar", True)
        home.desk.homelab("preflight", "--only", "ssh", code=0)
        assert "nothing to change" in home.init("cellar", "--yes", "--no-this-machine").stdout


def test_a_new_host_key_is_shown_and_may_be_declined(home: Home) -> None:
    home.believe(0)
    declined = home.init("attic", "cellar", "--no-this-machine", answers="n\n", code=3)
    assert names(home) == ["attic"] and "cellar: its host key was not accepted" in declined.stderr and "homelab init" in declined.stderr
    shown = re.findall(r"SHA256:\S+", declined.stderr)
    host_key = subprocess.run(
        ["ssh-keygen", "-lf", str(home.desk.lab.state.node_folder(home.desk.lab.nodes[1]) / "host_key.pub")], capture_output=True, text=True
    ).stdout
    assert len(shown) == 1 and shown[0] in host_key
    before = home.known_hosts.read_bytes()
    home.init("cellar", "--no-this-machine", answers="y\n")
    assert names(home) == ["attic", "cellar"] and home.known_hosts.read_bytes().startswith(before)


@pytest.mark.thorough
def test_one_node_under_two_names_and_this_machine(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its host key before a login; and where another server of the same machine shows another one, by its workdir."""
    home.config(home.node(1, "cellar basement"), home.node(0, "loft"))
    home.believe(0, 1)
    done = home.init("--yes", "--this-machine")
    assert len(names(home)) == 3 and names(home)[:2] == ["cellar", "loft"]
    assert "basement is cellar under another name" in done.stdout and "attic is loft" in done.stdout
    assert load_cluster(home.file).nodes[2].host == "local"
    first = home.file.read_bytes()
    assert "basement" not in home.init("--yes").stderr.partition("answer by SSH")[2]
    assert home.file.read_bytes() == first


def test_a_refused_login_gets_one_command(home: Home) -> None:
    home.believe(0, 1)
    home.config(home.node(1, "cellar", user="nobody-here"))
    refused = home.init("--yes", "--no-this-machine", code=3)
    assert names(home) == ["attic"] and "cellar: the login was refused" in refused.stderr
    assert re.search(r"fix: +ssh-copy-id .*nobody-here@", refused.stderr)
    user = home.desk.lab.nodes[1].user
    home.init("cellar", "--no-this-machine", answers=f"{user}\n")
    assert load_cluster(home.file).node("cellar").user == user
    assert home.toml()["nodes"][1]["user"] == user  # type: ignore[index]


def test_an_old_node_that_does_not_answer_stays_as_it_is(home: Home) -> None:
    home.believe(0)
    text = '[[nodes]]\nname = "off"\nhost = "127.0.0.1"\nport = 1\n'
    home.file.write_text(text)
    done = home.init("attic", "--yes", code=3)
    assert home.file.read_text().startswith(text) and names(home) == ["off", "attic"]
    assert "off: no SSH server answers" in done.stderr


def refused(home: Home, words: str, flag: str, *arguments: str) -> None:
    """Ends with three parts that name these words and this flag, for people and for programs."""
    _, message, where, hint = re.split(r"^(?:error|where|fix):", home.init(*arguments, code=2).stderr, flags=re.MULTILINE)
    assert words in message and flag in hint and where
    error = json.loads(home.init(*arguments, "--json", code=2).stdout)["error"]
    assert words in error["message"] and flag in error["hint"]


def test_nobody_to_ask(home: Home) -> None:
    home.believe(0, 1)
    for arguments, words, flag in (
        ([], "which machines are nodes", "--yes"),
        (["attic"], "whether this machine is a node, too", "--no-this-machine"),
    ):
        refused(home, words, flag, *arguments)
    home.known_hosts.unlink()
    refused(home, "whether this key is right", "--yes", "attic", "--no-this-machine")
    assert not home.file.exists() and not home.known_hosts.exists()


def test_nothing_is_found_or_reached(home: Home) -> None:
    (home.ssh / "config").unlink()
    assert "no machine was chosen" in complaint(home.desk, "init", "--yes", code=2)["message"]
    assert "no SSH server answers" in complaint(home.desk, "init", "127.0.0.1:1", "--no-this-machine", code=3)["message"]
    assert "names no machine" in complaint(home.desk, "init", "$(touch pwned)", code=2)["message"]
    home.file.write_text("[clutser]\n")
    assert "clutser" in complaint(home.desk, "init", "--yes", code=2)["message"]
    assert home.file.read_text() == "[clutser]\n"


@pytest.mark.thorough
def test_neighbours_are_offered_and_are_no_nodes_by_default(home: Home) -> None:
    node = home.desk.lab.nodes[0]
    (home.ssh / "config").write_text(f"Host {node.host}\n" + home.node(0, "x").partition("\n")[2].replace("HostName", "# HostName"))
    (home.folder / "ip neigh").write_text(json.dumps([{"dst": node.host, "dev": "eth0", "state": ["REACHABLE"]}]))
    home.believe(0)
    text = (home.ssh / "config").read_text()
    (home.ssh / "config").write_text(text.replace(f"Host {node.host}", "Host 10.*,127.*\nMatch all"))
    home.init("--yes", "--no-this-machine", code=2)
    done = home.init("--no-this-machine", answers="7\n1\n")
    assert "one of these is not in the list" in done.stderr and "ip neigh" in done.stderr
    assert [entry.host for entry in load_cluster(home.file).nodes] == [node.host]


class Terminal:
    """A command on a terminal of its own, like a person's."""

    def __init__(self, desk: Desk, *arguments: str) -> None:
        self.seen = ""
        self.pid, self.place = pty.fork()
        if self.pid == 0:
            os.chdir(desk.folder)
            os.execve(sys.executable, [*COMMAND, *arguments], desk._environment())

    def until(self, text: str, timeout_s: float = 90) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.seen:
            assert time.monotonic() < deadline, self.seen
            ready, _, _ = select.select([self.place], [], [], 1.0)
            block = b""
            if ready:
                try:
                    block = os.read(self.place, 4096)
                except OSError:  # it has ended
                    raise AssertionError(f"{text!r} was never shown:\n{self.seen}") from None
            self.seen += block.decode()
        self.seen = self.seen.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.place, text.encode())

    def end(self) -> int:
        """Its exit code, once it has ended."""
        with contextlib.suppress(OSError):
            while os.read(self.place, 4096):
                pass
        _, status = os.waitpid(self.pid, 0)
        os.close(self.place)
        return os.waitstatus_to_exitcode(status)


def test_the_questions_on_a_terminal(home: Home) -> None:
    home.config(home.node(1, "cellar", user="nobody-here"))
    terminal = Terminal(home.desk, "init")
    terminal.until("Which of them are nodes?")
    terminal.type("cellar attic\n")
    terminal.until("Is this machine a node, too?")
    terminal.type("n\n")
    for _ in range(2):
        terminal.until("SHA256:")
        terminal.until("Save this key?")
        terminal.type("y\n")
    terminal.until("User name on this machine")
    terminal.type(f"{home.desk.lab.nodes[1].user}\n")
    terminal.until("wrote")
    assert terminal.end() == 0
    assert names(home) == ["cellar", "attic"] and len(home.known_hosts.read_text().splitlines()) == 2


@pytest.mark.thorough
@pytest.mark.parametrize(
    "question", ["Which of them are nodes?", "Is this machine a node, too?", "Save this key?", "User name on this machine"]
)
def test_ctrl_c_at_a_question_leaves_the_file(home: Home, question: str) -> None:
    home.believe(*([0] if question.startswith("Save") else [0, 1]))
    home.config(home.node(1, "cellar", user="nobody-here"))
    text = '[[nodes]]\nname = "attic"\nhost = "attic"  # up there\n'
    home.file.write_text(text)
    answers = {"Which of them are nodes?": "all\n", "Is this machine a node, too?": "n\n", "Save this key?": "y\n"}
    terminal = Terminal(home.desk, "init")
    for earlier, answer in answers.items():
        if earlier == question or (earlier.startswith("Save") and question.startswith("User")):
            break
        terminal.until(earlier)
        terminal.type(answer)
    terminal.until(question)
    terminal.type("\x03")
    assert terminal.end() == 130
    assert home.file.read_text() == text
