"""The shipped cluster.toml is an example: no command contacts its machines, and `init` puts the owner's in its place."""

from __future__ import annotations

import importlib
import inspect
import socket
from pathlib import Path
from typing import Any, NoReturn

import paramiko
import pytest

from homelab.cli import common, main
from homelab.cli.command_list import NAMES
from homelab.controller.base.errors import EXIT_DONE, EXIT_INPUT
from homelab.controller.config.example import is_example
from homelab.controller.remote import ssh_login
from tests.cli.conftest import LAW

SHIPPED = Path(__file__).parents[2] / "cluster.toml"
# What each command needs beside the cluster file to come as far as its machines.
WORDS = {
    "preflight": [], "plan": ["law.toml"], "launch": ["law.toml"], "run": ["--", "python", "train.py"], "doctor": ["tower"], "bench": ["suite.toml"],
    "merge": ["RUN"], "push": ["RUN", "me/model"], "compare": ["A", "B"], "track": ["RUN", "--to", "tensorboard"], "yield": ["tower"],
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's current folder with the shipped file; whoever opens a connection ends the test."""

    def refuse(*arguments: Any, **_: Any) -> NoReturn:
        pytest.fail(f"a connection was tried: {arguments}")

    (tmp_path / "cluster.toml").write_bytes(SHIPPED.read_bytes())
    (tmp_path / "law.toml").write_text(LAW.replace("/nowhere/model", "TinyLlama/TinyLlama-1.1B-Chat-v1.0"))
    (tmp_path / "suite.toml").write_text('recipe = "law.toml"\n')
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}\n' * 8)
    (tmp_path / "train.py").write_text("pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HOMELAB_CLUSTER", raising=False)
    monkeypatch.setenv("HOMELAB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket.socket, "sendto", refuse)
    monkeypatch.setattr(paramiko.SSHClient, "connect", refuse)
    monkeypatch.setattr(ssh_login, "resolve", refuse)
    return tmp_path


def _command(name: str) -> Any:
    return importlib.import_module(f"homelab.cli.{name}").command


def contacting() -> list[str]:
    """The commands that take a cluster, but for `init`, which looks for machines itself, and `new`, for which the example is no cluster."""
    return [name for name in NAMES if name not in ("init", "new") and "cluster" in inspect.signature(_command(name)).parameters]


@pytest.mark.parametrize("name", [name for name in contacting() if name != "export"])
def test_no_command_contacts_a_machine_of_the_example(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    words = WORDS.get(name, ["RUN"] if "run" in inspect.signature(_command(name)).parameters else [])
    assert main.run([name, *words]) == EXIT_INPUT, capsys.readouterr()
    said = capsys.readouterr().err
    assert "the example file of homelab" in said and "fix:   homelab init" in said, said


def test_a_recipe_is_written_as_if_there_were_no_cluster(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["new", "chats.jsonl", "--model", "Qwen/Qwen3-0.6B"]) == EXIT_DONE
    assert "Next: homelab init" in capsys.readouterr().out


def test_a_plan_of_the_example_without_machines_is_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["plan", "law.toml", "--offline"]) == EXIT_DONE
    assert "tower" in capsys.readouterr().out


def test_a_file_that_its_owner_has_edited_is_a_cluster(folder: Path) -> None:
    shipped = SHIPPED.read_bytes()
    assert is_example(shipped) and is_example(shipped.replace(b"\n", b"\r\n")), (
        "the digest in homelab/controller/config/example.py is of another file"
    )
    assert not is_example(shipped.replace(b"192.168.1.102", b"192.168.1.103"))
    (folder / "cluster.toml").write_bytes(shipped.replace(b"192.168.1.102", b"192.168.1.103"))
    assert len(common.load_cluster(folder / "cluster.toml").nodes) == 3
