"""`scripts/setup` says that it is done and what comes next, unless another script goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(30)

REPOSITORY = Path(__file__).parent.parent
# Instead of a Python with packages, and of what would install some.
NOTHING = '#!/bin/sh\necho "$@" >>"$ASKED"\necho nothing done\n'


def checkout(tmp_path: Path) -> dict[str, str]:
    """A copy of what the script reads, with stand-ins for what it asks; returns the environment in which it runs."""
    for name in ("constraints.txt", "pyproject.toml", "scripts/setup"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for name in (".venv/bin/python", "bin/apt-get", "bin/sudo"):
        program(tmp_path / name, NOTHING)
    return {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "ASKED": str(tmp_path / "asked")}


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def setup(tmp_path: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [tmp_path / "scripts" / "setup", *arguments],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(("arguments", "said"), [((), True), (("--within",), False), (("--for-tests",), False)])
def test_it_ends_with_the_next_command(tmp_path: Path, arguments: tuple[str, ...], said: bool) -> None:
    done = setup(tmp_path, checkout(tmp_path), *arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if said:
        assert lines[-1].startswith("Set up. Next: scripts/demo") and "homelab init" in lines[-1]
        assert (REPOSITORY / "scripts" / "demo").exists()
    else:
        assert not any("Next:" in line for line in lines)
    asked = (tmp_path / "asked").read_text()
    assert (" homelab.lab.model " in asked) == (arguments != ("--for-tests",))


def test_it_runs_from_its_own_folder(tmp_path: Path) -> None:
    environment = checkout(tmp_path)
    done = subprocess.run(
        ["./setup"], cwd=tmp_path / "scripts", env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "Set up. Next:" in done.stdout, done.stderr
