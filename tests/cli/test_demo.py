"""`homelab demo`: what it refuses before it starts anything, and, thorough, the whole demo of a wheel that was installed into an empty environment."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace

import pytest

from homelab.cli import demo
from homelab.controller.base.errors import InputError
from scripts.practice.desk import Desk
from tests.cli.conftest import complaint
from tests.lab.conftest import wait_until

pytestmark = pytest.mark.timeout(60)
REPOSITORY = Path(__file__).resolve().parents[2]


def test_what_it_refuses(quiet_desk: Desk, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    venv.create(empty, with_pip=False)
    lacking = complaint(quiet_desk, "demo", "--python", str(empty / "bin" / "python"), code=2, as_json=False)
    assert "it lacks torch, transformers" in lacking["message"] and str(empty) in lacking["where"]
    assert f"uv pip install --python {empty}/bin/python torch" in lacking["hint"], "it has no pip"
    missing = complaint(quiet_desk, "demo", "--python", "no-such-python", code=2, as_json=False)
    assert missing["message"] == "there is no such Python" and "--python no-such-python" in missing["where"]
    assert "python3 -m venv ~/.homelab/env" in missing["hint"]
    assert not (tmp_path / "demo").exists()


# Instead of the Python that homelab is installed in: says what it was asked, and starts no lab.
STAND_IN = """#!/bin/sh
echo "$@" >>"$ASKED"
case $* in *"lab up"*) exit 1;; "- "*) cat >/dev/null; echo "# The demo: a small real model" >"$3";; esac
"""


def demo_command(tmp_path: Path, stand_in: str = STAND_IN) -> tuple[list[str], dict[str, str]]:
    """(the script, the environment in which it runs without anything of this machine); the demo's folder is tmp_path/"demo"."""
    python, model = tmp_path / "python", tmp_path / "model"
    python.write_text(stand_in)
    python.chmod(0o755)
    model.mkdir()
    (model / "config.json").write_text("{}")
    environment = {
        **os.environ, "HOMELAB_DEMO": str(tmp_path / "demo"), "HOMELAB_DEMO_PYTHON": str(python), "HOMELAB_MODEL": str(model),
        "ASKED": str(tmp_path / "asked"),
    }  # fmt: skip
    return [str(REPOSITORY / "scripts" / "demo")], environment


@pytest.mark.parametrize(
    ("file", "refused"),
    [
        ("lab/mine", "lab"), ("lab/nodes/mine", "lab"), ("lab", "lab"), ("demo.toml", "demo.toml"), ("data/demo.jsonl", "data"), ("status.json", "status.json"),
        ("runs/mine", None), ("lab/lab.lock", None), ("lab/nodes/.homelab-lab", None),
    ],
)  # fmt: skip
def test_what_no_demo_has_made_is_left_alone(tmp_path: Path, file: str, refused: str | None) -> None:
    mine = tmp_path / "demo" / file
    mine.parent.mkdir(parents=True)
    mine.write_text("mine\n")
    command, environment = demo_command(tmp_path)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    if refused is None:
        assert done.returncode == 1 and "lab up" in (tmp_path / "asked").read_text()
        return
    assert done.returncode == 2 and f"{tmp_path / 'demo' / refused}\n" in done.stderr
    assert "fix:   name another folder: homelab demo DIR" in done.stderr
    assert mine.read_text() == "mine\n" and not (tmp_path / "asked").exists()


def test_a_folder_of_an_earlier_demo_is_used_again(tmp_path: Path) -> None:
    command, environment = demo_command(tmp_path)
    for _ in range(2):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 1 and "no demo has made" not in done.stderr
        (tmp_path / "demo" / "data").mkdir(exist_ok=True)
    assert (tmp_path / "asked").read_text().count("lab up") == 2


# A lab that is up until it is taken down, which lasts until the test says so; its preflight has no end.
SLOW_STAND_IN = STAND_IN.replace(
    '*"lab up"*) exit 1;;',
    '*"lab up"*) mkdir -p "$HOMELAB_DEMO/lab"; touch "$HOMELAB_DEMO/lab/lab.json";; *preflight*) exec sleep 30;;'
    ' *"lab down"*) while ! [ -e "$ASKED.go-on" ]; do sleep 0.02; done; rm "$HOMELAB_DEMO/lab/lab.json";;',
)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_ctrl_c_does_not_leave_the_lab(tmp_path: Path, first: signal.Signals) -> None:
    command, environment = demo_command(tmp_path, SLOW_STAND_IN)
    asked = tmp_path / "asked"
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True) as demo:
        wait_until(lambda: asked.exists() and "preflight" in asked.read_text())
        os.killpg(demo.pid, first)
        wait_until(lambda: "lab down" in asked.read_text())
        for again in (signal.SIGINT, signal.SIGHUP):
            os.killpg(demo.pid, again)
        (tmp_path / "asked.go-on").touch()
        assert demo.stderr is not None and "taking the lab down" in demo.stderr.read()
    assert demo.returncode == 128 + first
    assert not (tmp_path / "demo" / "lab" / "lab.json").exists()


@pytest.mark.parametrize(
    ("user", "unable", "options"), [(0, "", "--cpu 1.0,0.6,0.3"), (0, "no cgroup tree", "--backend loopback"), (1000, "no cgroup tree", "")]
)
def test_where_root_can_make_no_nodes_with_limits_they_are_equal(tmp_path: Path, user: int, unable: str, options: str) -> None:
    command, environment = demo_command(tmp_path, STAND_IN.replace("case $* in", f"case $* in -c*) echo {unable};;"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "id").write_text(f"#!/bin/sh\necho {user}\n")
    (tmp_path / "bin" / "id").chmod(0o755)
    environment["PATH"] = f"{tmp_path / 'bin'}{os.pathsep}{environment['PATH']}"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
    (up,) = (line for line in (tmp_path / "asked").read_text().splitlines() if "lab up" in line)
    assert up.partition(f"--python {tmp_path / 'python'}")[2].strip() == options
    assert (unable in done.stdout) == (user == 0)


def test_a_model_that_cannot_be_made_is_told_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="", returncode=0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("gguf", "safetensors") else object())
    monkeypatch.setenv("HOMELAB_MODEL", str(tmp_path / "model"))
    with pytest.raises(InputError, match="it lacks safetensors, gguf") as refused:
        demo._refuse_unfit("python", sys.executable, tmp_path / "demo")
    assert "HOMELAB_MODEL=FOLDER homelab demo" in refused.value.hint and "scripts/demo" in refused.value.hint
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    demo._refuse_unfit("python", sys.executable, tmp_path / "demo")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_wheel_in_an_empty_environment_runs_the_demo(tmp_path: Path) -> None:
    """As `pipx install` and `uvx` do it: a wheel, an environment that has nothing but it, the command from another folder."""
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path / "wheels"), str(REPOSITORY)], check=True, timeout=300
    )
    (wheel,) = (tmp_path / "wheels").glob("homelab_trainer-*.whl")
    python = tmp_path / "env" / "bin" / "python"
    venv.create(tmp_path / "env", with_pip=True)
    subprocess.run([python, "-m", "pip", "install", "-q", "-c", REPOSITORY / "constraints.txt", wheel], check=True, timeout=600)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for words in (["--version"], ["--help"], ["lab", "faults"], ["explain", "network.reach"]):
        done = subprocess.run(
            [python.with_name("homelab"), *words], cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0 and done.stdout and not done.stderr, done
    place = subprocess.run(
        [python, "-c", "import homelab; print(homelab.__file__)"],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert place.stdout.startswith(str(tmp_path / "env")), "not the code of the checkout"
    demo = [str(python.with_name("homelab")), "demo", "my demo", "--python", sys.executable]
    done = subprocess.run(demo, cwd=elsewhere, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{done.stdout[-5000:]}\n{done.stderr[-3000:]}"
    assert "held-out loss" in done.stdout and "Done. The adapter and its model card" in done.stdout
    assert [path.name for path in elsewhere.iterdir()] == ["my demo"]
