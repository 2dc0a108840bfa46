"""The loopback backend as an ordinary user: no root, no capability, no account of ours left on the machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import homelab
from tests import ordinary_user, private_etc

pytestmark = [pytest.mark.timeout(90), pytest.mark.skipif(os.geteuid() != 0, reason="without root every loopback test is this test")]

# Runs as the ordinary user. Prints one JSON object.
STORY = """
import json, os, pathlib, subprocess, sys, time
from homelab.controller.base.errors import HomelabError
from homelab.lab import Lab
folder = pathlib.Path(sys.argv[1])
told = {"uid": os.geteuid()}
def refusal(action):
    try: action()
    except HomelabError as error: return str(error)
    return ""
told["namespaces"] = refusal(lambda: Lab.up(folder, backend="namespaces"))
told["cpu"] = refusal(lambda: Lab.up(folder, backend="loopback", cpu=[0.5]))
lab = Lab.up(folder, nodes=2)
told["backend"] = lab.state.backend
done = subprocess.run([*lab.ssh_command("node2"), "cat; echo $HOME; whoami; exit 5"], input="through\\n", capture_output=True, text=True, timeout=20)
told["ssh"] = [done.returncode, done.stdout.split(), done.stderr]
told["home"] = lab.nodes[1].home
subprocess.run([*lab.ssh_command("node1"), "setsid env -i PATH=$PATH sleep 654 >/dev/null 2>&1 </dev/null & exit 0"], timeout=20, check=True)
def sleepers(): return sorted(p.parent.name for p in pathlib.Path("/proc").glob("[0-9]*/cmdline") if p.read_bytes() == b"sleep\\x00654\\x00")
for _ in range(200):
    told["sleeping"] = len(sleepers())
    if told["sleeping"]: break
    time.sleep(0.02)
told["throttle"] = refusal(lambda: lab.fault("node1", "throttle=0.5"))
lab.fault("node1", "freeze"); told["frozen"] = lab.status()["nodes"][0]["frozen"]; lab.fault("node1", "thaw")
lab.fault("node1", "power-cut"); told["after_power_cut"] = [len(sleepers()), lab.status()["nodes"][0]["power"]]
lab.fault("node1", "power-on"); told["again"] = lab.status()["nodes"][0]["ssh"]
lab.down(); told["gone"] = not folder.exists()
print(json.dumps(told))
"""


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that the ordinary user owns, with a readable copy of the package."""
    folder = Path(tempfile.mkdtemp(prefix="homelab-ordinary-"))
    source = Path(homelab.__file__).parent
    shutil.copytree(source, folder / "homelab", ignore=shutil.ignore_patterns("__pycache__"))
    for path in (folder, *folder.rglob("*")):
        os.chown(path, ordinary_user.NUMBER, ordinary_user.NUMBER)
    yield folder
    shutil.rmtree(folder)


def as_user(home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": str(home)}
    return ordinary_user.run(home, *command, environment=environment, timeout_s=60)


# Runs as root where the files of /etc are copies; its arguments make a command the user's.
AN_ACCOUNT_IS_ADDED = """
import subprocess
waiting = ["sh", "-c", "echo here; read line; exec whoami"]
with subprocess.Popen([*sys.argv[1:], *waiting], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as user:
    assert user.stdout.readline() == "here\\n"
    replace("/etc/passwd")
    print(user.communicate("go\\n")[0].strip())
"""


def test_an_account_that_is_added_meanwhile_leaves_the_user_a_name(home: Path, tmp_path: Path) -> None:
    """useradd and apt replace /etc/passwd by rename."""
    machines = Path("/etc/passwd").stat().st_ino
    enter = ordinary_user.enter(home, {"PATH": "/usr/bin:/bin"})
    assert private_etc.run(tmp_path / "etc-view", AN_ACCOUNT_IS_ADDED, *enter, timeout_s=60).strip() == ordinary_user.NAME
    assert Path("/etc/passwd").stat().st_ino == machines, "the machine's own file was replaced"


def test_the_whole_story_as_an_ordinary_user(home: Path) -> None:
    for name in ("unshare", "setpriv"):
        if shutil.which(name) is None:
            pytest.skip(f"not installed: {name}")
    pythons = [
        python
        for python in (sys.executable, "/usr/bin/python3")
        if as_user(home, python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))").returncode == 0
    ]
    if not pythons:
        pytest.skip("an ordinary user finds no Python 3.11 or newer on this machine")
    done = as_user(home, pythons[0], "-c", STORY, str(home / "lab"))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["uid"] == ordinary_user.NUMBER
    assert "needs root" in told["namespaces"] and "loopback" in told["namespaces"]
    assert "--cpu" in told["cpu"] and "cpu controller" in told["throttle"]
    assert told["backend"] == "loopback"
    assert told["ssh"] == [5, ["through", told["home"], ordinary_user.NAME], ""]
    assert told["sleeping"] == 1 and told["after_power_cut"] == [0, "off"]
    assert told["frozen"] and told["again"] and told["gone"]
