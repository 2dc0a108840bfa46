"""Commands as an ordinary user, without an account of ours on the machine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

NAME, NUMBER = "homelabtest", 61234

# Runs as root in a mount namespace of its own: the user exists in this view of /etc alone.
_ENTER = """
import os, sys
from homelab.lab.node_init import make_etc
home, account, *command = sys.argv[1:]
os.makedirs(home + "/etc-view", exist_ok=True)
make_etc(home + "/etc-view")
with open("/etc/passwd", "a", errors="surrogateescape") as passwd:
    passwd.write(account)
os.execvp(command[0], command)
"""
# Through env: setpriv itself still finds programs with root's rights.
_DROP = ("setpriv", f"--reuid={NUMBER}", f"--regid={NUMBER}", "--clear-groups", "--no-new-privs", "--inh-caps=-all", "env")


def enter(home: Path, environment: Mapping[str, str]) -> list[str]:
    """The prefix that makes root's command the user's. `home` holds a copy of the package, which the user may read.

    A file that is mounted on /etc/passwd itself would not do: a program that replaces the machine's file takes that mount away
    (see `make_etc`), and the user is nobody in the middle of a command.
    """
    account = f"{NAME}:x:{NUMBER}:{NUMBER}::{home}:/bin/sh\n"
    drop = (*_DROP, "-i", *(f"{key}={value}" for key, value in environment.items()))
    return ["unshare", "--mount", "env", f"PYTHONPATH={home}", sys.executable, "-c", _ENTER, str(home), account, *drop]


def run(home: Path, *command: str, environment: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Root's way to run a command as the user, in `home`."""
    return subprocess.run([*enter(home, environment), *command], cwd=home, capture_output=True, text=True, timeout=timeout_s, check=False)
