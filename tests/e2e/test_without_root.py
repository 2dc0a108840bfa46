"""The whole way as an ordinary user: a loopback lab, launch, done, down. No root, no capability, no account of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import homelab
from scripts.practice.desk import REPOSITORY
from tests import ordinary_user
from tests.worker import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

RECIPE = """
[model]
name = "{model}"
[data]
train = "chats.jsonl"
[method]
kind = "lora"
rank = 2
[train]
global_batch = 4
steps = 3
learning_rate = 1e-3
seq_len = 128
gradient_checkpointing = false
[tracking]
tensorboard = false
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that the user owns, with model, data and recipe, and a readable copy of the package."""
    folder = Path(tempfile.mkdtemp(prefix="homelab-user-"))
    model = harness.tiny_llama(folder / "tiny-llama")
    harness.write_jsonl(folder / "chats.jsonl", harness.chat_rows(16))
    (folder / "small.toml").write_text(RECIPE.format(model=model), encoding="utf-8")
    (folder / "script.toml").write_text('[script]\npath = "program.py"\n', encoding="utf-8")
    (folder / "program.py").write_text("import os\nprint('user', os.getuid())\n", encoding="utf-8")
    if os.geteuid() == 0:
        source = Path(homelab.__file__).parent
        shutil.copytree(source, folder / "homelab", ignore=shutil.ignore_patterns("__pycache__"))
        for path in (folder, *folder.rglob("*")):
            os.chown(path, ordinary_user.NUMBER, ordinary_user.NUMBER)
    yield folder
    shutil.rmtree(folder)


def as_user(home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run as the user this is; for root, as one who exists in this command's own view of /etc alone."""
    is_root = os.geteuid() == 0
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "HOMELAB_CLUSTER": str(home / "lab" / "cluster.toml")}
    environment["PYTHONPATH"] = str(home if is_root else REPOSITORY)
    if is_root:
        return ordinary_user.run(home, *command, environment=environment, timeout_s=90)
    return subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=90, check=False)


def python_of_user(home: Path) -> str:
    """A Python that the user may run, of this version, with the packages of this one. Skips the test where there is none."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    environment = home / "env"
    why = ""
    for python in (sys.executable, f"/usr/bin/python{version}"):
        made = as_user(home, python, "-m", "venv", "--without-pip", str(environment))
        if made.returncode == 0:
            packages = environment / "lib" / f"python{version}" / "site-packages" / "packages.pth"
            packages.write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
            probe = as_user(home, str(environment / "bin" / "python"), "-c", "import os, torch, fabric; print(os.geteuid())")
            if probe.returncode == 0 and probe.stdout.strip() != "0":
                return str(environment / "bin" / "python")
            made = probe
        why += f"{python}: {(made.stderr or made.stdout).strip()[-200:]}\n"
        shutil.rmtree(environment, ignore_errors=True)
    pytest.skip(f"no Python {version} with torch that an ordinary user may run:\n{why}")


@pytest.mark.parametrize(
    ("recipe", "nodes"), [("script.toml", ["node1"]), pytest.param("small.toml", ["node1", "node2"], marks=pytest.mark.thorough)]
)
def test_launch_as_an_ordinary_user(home: Path, recipe: str, nodes: list[str]) -> None:
    for name in ("unshare", "setpriv") if os.geteuid() == 0 else ():
        if shutil.which(name) is None:
            pytest.skip(f"not installed: {name}")
    python = python_of_user(home)

    def say(*arguments: str, code: int = 0) -> str:
        done = as_user(home, python, "-m", "homelab", *arguments)
        assert done.returncode == code, f"homelab {' '.join(arguments)}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    say("lab", "up", "lab", "--nodes", str(len(nodes)))
    try:
        assert json.loads(say("lab", "status", "lab", "--json"))["backend"] == "loopback"
        said = say("launch", recipe, "--wait")
        if recipe == "script.toml":
            assert "user 0" not in (printed := say("logs")) and "user " in printed
        else:
            assert "done  step 3/3" in said
        [run] = json.loads(say("runs", "--json"))["runs"]
        assert (run["state"], run["nodes"]) == ("done", nodes)
        assert json.loads(say("stop", "--json"))["clean"] is True
    finally:
        down = say("lab", "down", "lab")
    assert "verified" in down
    assert not (home / "lab").exists()
