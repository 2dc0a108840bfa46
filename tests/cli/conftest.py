"""One lab for the whole folder, and a desk from which the real command is run as a subprocess."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from homelab.lab import Lab
from scripts.practice.desk import Desk, left_on, wait_until

SCRIPT = '[script]\npath = "train.py"\n'
LAW = """[model]
name = "/nowhere/model"
[data]
train = "chats.jsonl"
[method]
kind = "lora"
[train]
global_batch = 8
steps = 2
learning_rate = 1e-3
"""


@pytest.fixture(scope="session")
def cli_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with Lab.up(tmp_path_factory.mktemp("cli") / "lab", nodes=2) as started:
        yield started


@pytest.fixture
def desk(cli_lab: Lab, tmp_path: Path) -> Iterator[Desk]:
    """An empty desk for each test. After it, nothing of any run is left on the nodes, and nothing was run by a name."""
    desk = Desk(tmp_path, cli_lab)
    desk.write("script.toml", SCRIPT)
    desk.write("train.py", "import time\nprint('here', flush=True)\ntime.sleep(120)\n")
    desk.write("law.toml", LAW)
    desk.write("chats.jsonl", json.dumps({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}) + "\n")
    yield desk
    assert not list(tmp_path.rglob("pwned")) and not list(cli_lab.folder.rglob("pwned"))
    wait_until(lambda: not left_on(cli_lab), 10.0, lambda: f"left on the nodes: {left_on(cli_lab)}")


@pytest.fixture
def quiet_desk(tmp_path: Path) -> Desk:
    """A desk without a lab, for what is refused before any node is asked."""
    desk = Desk(tmp_path, None, cluster=tmp_path / "cluster.toml")  # type: ignore[arg-type]
    desk.write("cluster.toml", '[[nodes]]\nname = "a"\nhost = "127.0.0.1"\nport = 1\n')
    desk.write("script.toml", SCRIPT)
    desk.write("train.py", "pass\n")
    desk.write("law.toml", LAW)
    return desk


def complaint(desk: Desk, *arguments: str, code: int, as_json: bool = True, timeout_s: float = 120) -> dict[str, Any]:
    """The one error of a command, said to people and to programs alike: three parts, this exit code."""
    said = desk.homelab(*arguments, code=code, timeout_s=timeout_s).stderr
    lines = [line for line in said.splitlines() if not line.startswith(". ")]
    assert lines and lines[0].startswith("error: "), said
    labels = [line.split(":")[0] for line in lines if line.startswith(("error: ", "where: ", "fix:   "))]
    assert labels == ["error", "where", "fix"], said
    found = {"message": said[said.index("error: ") + 7 : said.index("\nwhere: ")]}
    found["where"] = said[said.index("\nwhere: ") + 8 : said.index("\nfix:   ")]
    found["hint"] = said[said.index("\nfix:   ") + 8 :].rstrip("\n")
    if as_json:
        document = desk.json(*arguments, code=code, timeout_s=timeout_s)
        assert set(document["error"]) == {"message", "where", "hint", "exit_code"}
        assert document["error"]["exit_code"] == code
        assert document["error"]["message"].split(":")[0] == found["message"].split(":")[0]
    return found
