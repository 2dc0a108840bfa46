"""From one data file and cold machines to the tuned model as a GGUF file, as a new user types it: bare practice nodes, a terminal (tmux), no edit by hand.

The nodes have no packages and no way out. The first has an account and a port of its own, and its login shell is fish; python3 of the second, which has another
port, is 3.9 where this machine has one.
The person has an ~/.ssh/config with their names, a folder with one file of questions and answers, and the folder of a model.

commands_typed        lines that the person types
decisions_asked       values of the recipe that they have to choose
questions_asked       questions that they answer
files_edited          files that they have to edit by hand
setup_again_changes   nodes on which a second `homelab setup` changes something
words_read_before     words of the README up to the last of the commands
words_printed         words that the commands print, up to the first answer of the tuned model
journey_minutes       from the first key to the last answer
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks import report

from homelab.lab import Lab
from scripts.practice.misconfigurations import login

_LIMIT_S = 900.0
_PROMPT = re.compile(r"\[(\d+)\] \$")  # with the exit code of the last command
# What a person reads in a question -> what they type. A question that is not here ends the benchmark.
_ANSWERS = {
    "Which of them are nodes?": "",
    "Is this machine a node, too?": "n",
    "Save this key?": "y",
    "Which network is for the training?": "",
}


class Person:
    """A shell in tmux, 80 columns wide, and what was typed into it."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.commands: list[str] = []
        self.questions: list[str] = []
        self.transcript = ""
        self.words_printed = 0  # until `is_done`
        self.is_done = False
        self._socket = home / "tmux"
        environment = {
            "HOME": str(home), "PATH": f"{home}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "xterm", "PS1": "[$?] $ ", "LANG": "C.UTF-8",
            # this machine's way to the package index
            "PIP_CONFIG_FILE": os.environ.get("PIP_CONFIG_FILE") or str(Path.home() / ".config/pip/pip.conf"),
        }  # fmt: skip
        # tmux lets a pane have the history that is set before it begins.
        start = (
            "start-server",
            ";",
            "set-option",
            "-g",
            "history-limit",
            "50000",
            ";",
            "new-session",
            "-d",
            "-x",
            "80",
            "-y",
            "50",
            "-c",
            str(folder),
            "sh",
            "-i",
        )
        subprocess.run(["tmux", "-S", str(self._socket), "-f", "/dev/null", *start], env=environment, check=True, timeout=60)
        self._until_prompt()

    def type(self, command: str) -> None:
        """One command, typed and waited for. Raises SystemExit where it fails."""
        self.commands.append(command)
        began_s = time.monotonic()
        self._tmux("send-keys", "-R", ";", "clear-history")
        self._tmux("send-keys", "-l", "--", command)
        self._tmux("send-keys", "Enter")
        code, screen = self._until_prompt()
        shown = "\n".join(line for line in screen.partition(command)[2].splitlines() if line)
        self.words_printed += 0 if self.is_done else len(shown.split())
        self.transcript += f"$ {command}\n{shown}\n[{time.monotonic() - began_s:.0f} s]\n\n"
        if code:
            raise SystemExit(f"error: exit code {code}\nwhere: {command}\n{self.transcript}")

    def close(self) -> None:
        """End the shell, and tmux with it, if it has not ended by itself."""
        subprocess.run(["tmux", "-S", str(self._socket), "kill-server"], capture_output=True, check=False, timeout=60)

    def _until_prompt(self) -> tuple[int, str]:
        """The exit code that the shell's next prompt shows, and the lines above it; questions on the way are answered."""
        deadline_s = time.monotonic() + _LIMIT_S
        answered: Counter[str] = Counter()
        while True:
            lines = [line.rstrip() for line in self._tmux("capture-pane", "-p", "-J", "-S", "-").rstrip().splitlines()] or [""]
            if prompt := _PROMPT.fullmatch(lines[-1]):
                return int(prompt[1]), "\n".join(lines[:-1])
            if time.monotonic() > deadline_s:
                raise SystemExit(f"error: no end within {_LIMIT_S:.0f} s\n{self.transcript}" + "\n".join(lines))
            for question, answer in _ANSWERS.items():
                if "\n".join(lines).count(question) > answered[question]:
                    answered[question] += 1
                    self.questions.append(question)
                    self._tmux("send-keys", "-l", "--", answer)
                    self._tmux("send-keys", "Enter")
            time.sleep(0.2)

    def _tmux(self, *words: str) -> str:
        return subprocess.run(["tmux", "-S", str(self._socket), *words], capture_output=True, text=True, check=True, timeout=60).stdout


def main() -> int:
    """Walk once. Returns 0 when the figures hold: 7 commands, 5 questions, no edit, nothing changed by a second setup."""
    options = report.arguments(__doc__ or "")
    folder = Path(tempfile.mkdtemp(prefix="homelab-bench-"))
    folder.chmod(0o711)  # another account has its home below
    try:
        with (
            Lab.up(folder / "lab", nodes=3, backend="namespaces", shared=[], logins={"node1": "anna:2222", "node2": "root:2022"}) as lab,
            _odd(lab),
        ):
            person, minutes, changes = _walk(lab, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(person.transcript)
    figures = {
        "commands_typed": float(len(person.commands)), "questions_asked": float(len(person.questions)), "files_edited": 0.0, "decisions_asked": 0.0,
        "setup_again_changes": float(changes), "words_read_before": float(_words_before()), "words_printed": float(person.words_printed), "journey_minutes": minutes,
    }  # fmt: skip
    rows = [("characters typed", str(sum(map(len, person.commands))))]
    report.finish("journey", figures, [{"command": command} for command in person.commands], rows, options.json)
    return 0 if len(person.commands) <= 7 and len(person.questions) <= 5 and not changes else 1


def _walk(lab: Lab, folder: Path) -> tuple[Person, float, int]:
    home, work = _home(lab, folder), folder / "work"
    work.mkdir()
    shutil.copyfile("recipes/data/demo.jsonl", work / "chats.jsonl")
    names = " ".join(node.name for node in lab.nodes)
    began_s = time.monotonic()
    person = Person(home, work)
    try:
        person.type(f"homelab init {names}")
        person.type("homelab new chats.jsonl --model ~/.cache/homelab/models/smollm2-135m-instruct")
        person.type("homelab setup --recipe chats.toml")
        person.type("homelab launch chats.toml --wait")
        person.type('homelab chat --prompt "What is the law of homelab?"')
        person.is_done = True
        person.type("homelab fetch")
        person.type("homelab gguf")
        minutes = (time.monotonic() - began_s) / 60
        changes = _changes_of_setup(person, home, work)
    finally:
        person.close()
    return person, minutes, changes


def _words_before() -> int:
    """What a newcomer reads before they type: the README from its top to the end of the commands."""
    readme = Path("README.md").read_text(encoding="utf-8")
    return len(re.sub(r"!\[.*?\]\(.*?\)|<.*?>", "", readme.partition("## The law")[0]).split())


@contextmanager
def _odd(lab: Lab) -> Iterator[None]:
    """As people's machines are: another login shell, an old Python before the newer one."""
    first, second = lab.nodes[0].name, lab.nodes[1].name
    fish = shutil.which("fish")
    old = next((str(path) for path in sorted(Path.home().glob(".pyenv/versions/3.9*/bin/python3.9"))), None) or shutil.which("python3.9")
    if old:
        (lab.folder / "nodes" / second / "bin" / "python3").symlink_to(old)
    print(f". login shell of {first}: {fish or 'as on this machine'}; python3 of {second}: {old or 'as on this machine'}", file=sys.stderr)
    with login.shell(lab, first, f'#!/bin/sh\nexec {fish} "$@"\n') if fish else nullcontext():
        yield


def _home(lab: Lab, folder: Path) -> Path:
    """A person's home: names in ~/.ssh/config, the model of the demo, and nothing else."""
    home = folder / "home"
    ssh, programs = home / ".ssh", home / "bin"
    ssh.mkdir(parents=True)
    programs.mkdir()
    sections = [
        f'Host {node.name}\n  HostName {node.host}\n  Port {node.port}\n  User {node.user}\n  IdentityFile "{lab.folder}/keys/id_ed25519"\n'
        for node in lab.nodes
    ]
    (ssh / "config").write_text("".join(sections))
    # ssh reads the home of the account, never HOME: the real program, told where the config is.
    (programs / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {shlex.quote(str(ssh / "config"))} "$@"\n')
    (programs / "ssh").chmod(0o755)
    model = home / ".cache/homelab/models/smollm2-135m-instruct"
    model.parent.mkdir(parents=True)
    shutil.copytree(os.environ["HOMELAB_MODEL"], model)
    return home


def _changes_of_setup(person: Person, home: Path, work: Path) -> int:
    """Nodes that a second setup changes; not part of the walk."""
    pip = os.environ.get("PIP_CONFIG_FILE") or str(Path.home() / ".config/pip/pip.conf")
    outside = {name: value for name, value in os.environ.items() if not name.startswith("HOMELAB_")}  # as the person's terminal has none
    environment = {**outside, "HOME": str(home), "PIP_CONFIG_FILE": pip, "PATH": f"{home}/bin:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "homelab", "setup", "--recipe", "chats.toml", "--json"]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=True, timeout=_LIMIT_S)
    answer: dict[str, Any] = json.loads(done.stdout)
    return sum(entry["changed"] for entry in answer["nodes"].values()) + sum(
        bool(entry["sent_bytes"]) for entry in answer["models"].values()
    )


if __name__ == "__main__":
    sys.exit(main())
