"""`homelab demo`: what it refuses before it starts anything, and, thorough, the whole demo of a wheel that was installed into an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from scripts.practice.desk import Desk
from tests.cli.conftest import complaint

pytestmark = pytest.mark.timeout(60)
REPOSITORY = Path(__file__).resolve().parents[2]


def test_what_it_refuses(quiet_desk: Desk, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    venv.create(empty, with_pip=False)
    lacking = complaint(quiet_desk, "demo", "--python", str(empty / "bin" / "python"), code=2, as_json=False)
    assert (
        "it lacks torch, transformers" in lacking["message"]
        and "-m pip install torch" in lacking["hint"]
        and str(empty) in lacking["where"]
    )
    missing = complaint(quiet_desk, "demo", "--python", "no-such-python", code=2, as_json=False)
    assert missing["message"] == "there is no such Python" and "--python no-such-python" in missing["where"]
    assert not (tmp_path / "demo").exists()


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
