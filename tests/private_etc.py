"""Programs of root in a mount namespace of their own. The files of its /etc are copies, so that a test may replace them: nothing reaches the machine's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_BEGIN = """
import os, shutil, sys
from homelab.lab.node_init import make_etc
stage = sys.argv.pop(1)
os.makedirs(stage, exist_ok=True)
make_etc(stage)
def replace(file):  # by rename, as useradd and apt do it
    shutil.copyfile(file, file + ".homelab-test")
    shutil.copystat(file, file + ".homelab-test")
    os.replace(file + ".homelab-test", file)
"""


def run(stage: Path, program: str, *arguments: str, timeout_s: float) -> str:
    """What a Python program printed, which must succeed. `replace(FILE)` is known to it; `stage` is an empty folder."""
    done = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", _BEGIN + program, str(stage), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
