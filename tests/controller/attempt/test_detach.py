"""The supervisor's start, where the locale knows ASCII only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from homelab.controller.attempt import placement
from homelab.controller.base.errors import HomelabError
from homelab.controller.run.paths import RunPaths

pytestmark = pytest.mark.timeout(60)


def test_a_node_with_other_letters_gets_its_supervisor_under_an_ascii_locale(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$PYTHONUTF8" "$@" > "{tmp_path}/given"\n')
    program.chmod(0o755)
    (tmp_path / "runs/r").mkdir(parents=True)
    script = (
        "import sys; from pathlib import Path; from homelab.controller.attempt import placement; from homelab.controller.run.paths import RunPaths\n"
        f"sys.executable = {str(program)!r}\n"
        f"placement.start(RunPaths(Path({str(tmp_path)!r}) / 'runs' / 'r'), Path(sys.argv[1]), ['tower-\\u03a9', 'laptop'])\n"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "clüster.toml")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    given = (tmp_path / "given").read_text(encoding="utf-8").splitlines()
    assert given[0] == "1", "the supervisor's own Python reads its arguments as UTF-8"
    assert "tower-Ω,laptop" in given and str(tmp_path / "clüster.toml") in given


def test_a_start_that_cannot_be_is_a_warning_and_no_internal_error(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    with pytest.raises(HomelabError, match="the supervisor did not start"):
        placement.start(RunPaths(tmp_path / "r"), Path("cluster.toml"), ["a\0b"])
