"""From one data file and cold machines to the tuned model as a GGUF file, as a new user types it: bare practice nodes, a real terminal, no edit by hand.

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

import fcntl
import json
import os
import pty
import re
import select
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks import report

from homelab.lab import Lab
from scripts.practice.misconfigurations import login

_LIMIT_S = 900.0
_PROMPT = "$ "
# What a person reads in a question -> what they type. A question that is not here ends the benchmark.
_ANSWERS = {
    "Which of them are nodes?": "",
    "Is this machine a node, too?": "n",
    "Save this key?": "y",
    "Which network is for the training?": "",
}
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


def on_screen(raw: str) -> str:
    """What stays on a terminal of all that was written: a dashboard draws over itself, and what stood on another screen is gone."""
    raw = re.sub(r"\x1b\[\?1049h.*?\x1b\[\?1049l", "", raw, flags=re.DOTALL)
    lines, row, column = [""], 0, 0
    for code, text in re.findall(r"(\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|[\r\n\b])|([^\x1b\r\n\b]+)", raw):
        number = int(digits[0]) if (digits := re.findall(r"\d+", code)) else 1
        if text:
            lines[row] = lines[row].ljust(column)[:column] + text + lines[row][column + len(text) :]
            column += len(text)
        elif code == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif code == "\r":
            column = 0
        elif code.endswith("A"):
            row = max(0, row - number)
        elif code.endswith("K"):
            lines[row] = lines[row][:column] if code == "\x1b[K" else ""
        elif code.endswith("J"):
            del lines[row + 1 :]
    return "\n".join(line.rstrip() for line in lines)


class Person:
    """A shell on a terminal of its own, and what was typed into it."""

    def __init__(self, home: Path, folder: Path) -> None:
        self.commands: list[str] = []
        self.questions: list[str] = []
        self.transcript = self._raw = ""
        self.words_printed = 0  # until `is_done`
        self.is_done = False
        environment = {
            "HOME": str(home), "PATH": f"{home}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "xterm", "PS1": _PROMPT, "LANG": "C.UTF-8",
            # this machine's way to the package index
            "PIP_CONFIG_FILE": os.environ.get("PIP_CONFIG_FILE") or str(Path.home() / ".config/pip/pip.conf"),
        }  # fmt: skip
        self._pid, self._terminal = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 80, 0, 0))
            os.execve("/bin/sh", ["sh", "-i"], environment)
        self._until_prompt()

    def type(self, command: str) -> str:
        """One command, typed and waited for; what it printed. Raises SystemExit where it fails."""
        self.commands.append(command)
        began_s = time.monotonic()
        os.write(self._terminal, f"{command}\n".encode())
        printed = self._until_prompt()
        shown = "\n".join(line for line in on_screen(self._raw).removesuffix(_PROMPT.strip()).splitlines()[1:] if line.strip())
        os.write(self._terminal, b"echo $?\n")
        code = self._until_prompt().split()[-1]
        self.words_printed += 0 if self.is_done else len(shown.split())
        self.transcript += f"$ {command}\n{shown}\n[{time.monotonic() - began_s:.0f} s]\n\n"
        if code != "0":
            raise SystemExit(f"error: exit code {code}\nwhere: {command}\n{self.transcript}")
        return printed

    def _until_prompt(self) -> str:
        """Everything up to the shell's next prompt; questions on the way are answered."""
        deadline_s = time.monotonic() + _LIMIT_S
        printed, read, self._raw = "", 0, ""
        while not printed.endswith(_PROMPT):
            if time.monotonic() > deadline_s:
                raise SystemExit(f"error: no end within {_LIMIT_S:.0f} s\n{self.transcript}{printed}")
            if select.select([self._terminal], [], [], 1.0)[0]:
                piece = os.read(self._terminal, 65536).decode(errors="replace")
                self._raw += piece
                printed += _CODES.sub("", piece)
            question = next((words for words in _ANSWERS if words in printed[read:]), None)
            if question:
                self.questions.append(question)
                os.write(self._terminal, f"{_ANSWERS[question]}\n".encode())
                read = len(printed)
        return printed.removesuffix(_PROMPT)

    def close(self) -> None:
        """End the shell."""
        os.write(self._terminal, b"exit\n")
        os.waitpid(self._pid, 0)
        os.close(self._terminal)


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
    environment = {**os.environ, "HOME": str(home), "PIP_CONFIG_FILE": pip, "PATH": f"{home}/bin:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "homelab", "setup", "--recipe", "chats.toml", "--json"]
    done = subprocess.run(command, cwd=work, env=environment, capture_output=True, text=True, check=True, timeout=_LIMIT_S)
    answer: dict[str, Any] = json.loads(done.stdout)
    return sum(entry["changed"] for entry in answer["nodes"].values()) + sum(
        bool(entry["sent_bytes"]) for entry in answer["models"].values()
    )


if __name__ == "__main__":
    sys.exit(main())
