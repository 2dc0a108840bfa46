"""The lies of `test_hostile_node` through the real SSH transport: sshd starts the agent, and the agent says what the test has written into a file."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from homelab.controller.features.supervise import status_streams
from homelab.controller.remote import fanout
from homelab.controller.remote.agent import connect
from homelab.controller.remote.ssh import SshSession
from tests.controller.remote import desks
from tests.controller.remote import test_hostile_node as lies
from tests.controller.remote.places import Places, of_this_test

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("sshd") is None and not os.path.exists("/usr/sbin/sshd"), reason="no sshd"),
]
COMMANDS = ("status", "why", "fetch", "recover")
# A Python whose agent says a file of the folder `says` where there is one for the verb, and else what the real agent says, which is kept in `seen`.
_PROGRAM = """#!/bin/sh
case "$*" in "-m homelab.node "*) ;; *) exec {python} "$@" ;; esac
for mark; do :; done
if [ -e {folder}/says/"$3" ]; then
  echo "$mark"; cat {folder}/says/"$3"; exit 0
fi
{python} "$@" >{folder}/seen/"$3".$$
code=$?
cat {folder}/seen/"$3".$$
mv {folder}/seen/"$3".$$ {folder}/seen/"$3"
exit $code
"""


class Node:
    """A node whose answers lie in files. As `test_hostile_node.LyingNode`, for `sweep`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        for inner in ("says", "seen"):
            (folder / inner).mkdir(parents=True)
        self.python = folder / "python"
        self.python.write_text(_PROGRAM.format(python=sys.executable, folder=folder))
        self.python.chmod(0o755)
        self.answers: dict[str, Any] = {
            "facts": lies._facts(name, {}), "checkpoints": {"good": [5], "bad": {}}, "start": {"error": {"kind": "no-room", "message": "the disk is full"}},
        }  # fmt: skip
        self.lie = None

    @property
    def seen(self) -> dict[str, Any]:
        """Verb -> the honest answer, of the verbs that were asked."""
        found = {}
        for file in (self.folder / "seen").iterdir():
            said = file.read_bytes().partition(b"\n")[2]
            if said.startswith(b"{"):
                found[file.name] = json.loads(said)
        return {**found, **self.answers}

    @property
    def lie(self) -> tuple[str, tuple[Any, ...], Any] | None:
        """(verb, place, value): what is said in place of what is true."""
        return self._lie

    @lie.setter
    def lie(self, lie: tuple[str, tuple[Any, ...], Any] | None) -> None:
        self._lie = lie
        said = dict(self.answers)
        if lie is not None:
            verb, place, value = lie
            said[verb] = lies.exchanged(self.seen[verb], place, value)
        for file in (self.folder / "says").iterdir():
            file.unlink()
        for verb, answer in said.items():
            (self.folder / "says" / verb).write_text(json.dumps(answer) + "\n")


@pytest.fixture
def lying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """The desk of two nodes behind a real sshd; the second lies."""
    for name in ("outside", "desk", "places"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside" / "canary").write_text(lies.CANARY)
    desk = tmp_path / "desk"
    places: Places = of_this_test(tmp_path / "places", monkeypatch)
    try:
        places.add("end")
        places.config.write_text("".join(places.block(name, "end") for name in desks.NAMES))
        nodes = {name: Node(tmp_path / "nodes" / f"{name}-answers", name) for name in desks.NAMES}
        workdirs = {name: tmp_path / "nodes" / name for name in desks.NAMES}
        recipe_hash = desks.write_runs(desk, workdirs)
        for node in nodes.values():
            node.answers["manifest"] = {
                "recipe_hash": recipe_hash,
                "path": "/c",
                "files": {"trainer.pt": "a" * 64},
                "sizes": {"trainer.pt": 1},
            }
            node.lie = None
        user = getpass.getuser()
        desks.write(desk, workdirs, {name: f'host = "{name}"\nuser = "{user}"\npython = "{node.python}"\n' for name, node in nodes.items()})
        file = desk / "cluster.toml"
        file.write_text(f'[cluster]\nknown_hosts = "{places.known_hosts}"\n{file.read_text()}')
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.chdir(desk)
        monkeypatch.setenv("HOMELAB_CLUSTER", str(file))
        monkeypatch.setenv("HOMELAB_RUNS", str(desk / "runs"))
        yield nodes["laptop"]
    finally:
        places.close()


# A recovery tries the links between nodes, whose addresses lead nowhere here: 13 s a lie.
@pytest.mark.parametrize("name", [name if name == "fetch" else pytest.param(name, marks=pytest.mark.thorough) for name in COMMANDS])
def test_an_agent_that_sshd_starts_lies(lying: Node, tmp_path: Path, name: str) -> None:
    assert SshSession.__module__ == "homelab.controller.remote.ssh", "nothing is replaced"
    assert vars(fanout)["connect"] is vars(status_streams)["connect"] is connect
    values = lies.hostile(tmp_path / "outside", 1000)
    assert lies.sweep(cast(Any, lying), lies.COMMANDS[name], tmp_path, values[:0:-1], most=4).result[0] > 0
    assert set(lying.seen) > {"facts", "checkpoints", "start", "manifest"}, "real answers were heard, too"


@pytest.mark.thorough
@pytest.mark.parametrize("name", COMMANDS)
def test_an_agent_that_sshd_starts_lies_more(lying: Node, tmp_path: Path, name: str) -> None:
    assert lies.sweep(cast(Any, lying), lies.COMMANDS[name], tmp_path, lies.hostile(tmp_path / "outside", 1000), most=60).result[0] > 30
