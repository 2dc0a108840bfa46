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


@pytest.mark.parametrize(("arguments", "said"), [((), True), (("--within",), False), (("--for-tests",), False)])
def test_it_ends_with_the_next_command(tmp_path: Path, arguments: tuple[str, ...], said: bool) -> None:
    for name in ("constraints.txt", "pyproject.toml", "scripts/setup"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    for name in (".venv/bin/python", "bin/apt-get", "bin/sudo"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(NOTHING)
        (tmp_path / name).chmod(0o755)
    asked = tmp_path / "asked"
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}", "ASKED": str(asked)}
    done = subprocess.run(
        [tmp_path / "scripts" / "setup", *arguments],
        env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    if said:
        assert lines[-1].startswith("Set up. Next: scripts/demo") and "homelab init" in lines[-1]
        assert (REPOSITORY / "scripts" / "demo").exists()
    else:
        assert not any("Next:" in line for line in lines)
    assert (" homelab.lab.model " in asked.read_text()) == (arguments != ("--for-tests",))
