"""Facts of the nodes of a lab, collected by homelab's agent and by `ansible -m setup`, each as a whole process, in turn.

Both log in anew each time with the lab's key and verify host keys by the lab's known_hosts. Ansible is measured as it comes
and with pipelining; the better one counts. It is installed into an environment of its own, once.
"""

from __future__ import annotations

import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from homelab.lab import Lab

_HOME = Path("~/.cache/homelab/ansible").expanduser()
_OURS = Path(__file__).with_name("ours.py")


def ansible() -> Path | None:
    """The program, installed where it was not; None where that cannot be (no package index, no venv)."""
    program = _HOME / "bin" / "ansible"
    if not program.exists():
        shutil.rmtree(_HOME, ignore_errors=True)
        try:
            subprocess.run([sys.executable, "-m", "venv", str(_HOME)], check=True, timeout=120)
            subprocess.run([str(_HOME / "bin" / "pip"), "install", "--quiet", "ansible-core"], check=True, capture_output=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(_HOME, ignore_errors=True)
            print(f"ansible cannot be installed here: {error}", file=sys.stderr)
            return None
    return program


def compare(lab: Lab, repeats: int, runs: list[dict[str, Any]]) -> dict[str, list[float]]:
    """{"homelab", "ansible", "ansible, pipelining": seconds of each round}; only "homelab" where there is no ansible."""
    program = ansible()
    seconds: dict[str, list[float]] = {"homelab": []}
    if program is not None:
        seconds |= {"ansible": [], "ansible, pipelining": []}
    for number in range(-1, repeats):  # the first round does not count: it compiles byte code and ships the code
        for name in seconds:
            took = _homelab(lab) if name == "homelab" else _ansible(lab, program, pipelining="pipelining" in name)
            if number >= 0:
                seconds[name].append(took)
                runs.append({"what": f"facts of {len(lab.nodes)} nodes by {name}", "seconds": took})
    return seconds


def ratio(seconds: dict[str, list[float]]) -> float | None:
    """homelab's median over that of the faster ansible."""
    others = [statistics.median(values) for name, values in seconds.items() if name != "homelab"]
    return statistics.median(seconds["homelab"]) / min(others) if others else None


def _homelab(lab: Lab) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, str(_OURS), str(lab.cluster_file)], check=True, capture_output=True, timeout=120)
    return time.perf_counter() - began


def _ansible(lab: Lab, program: Path | None, *, pipelining: bool) -> float:
    with tempfile.TemporaryDirectory(prefix="homelab-ansible-") as name:
        folder = Path(name)
        inventory = folder / "inventory.ini"
        key = lab.folder / "keys" / "id_ed25519"
        inventory.write_text(
            "".join(
                f"{node.name} ansible_host={node.host} ansible_port={node.port} ansible_user={node.user} "
                f"ansible_ssh_private_key_file={shlex.quote(str(key))} ansible_python_interpreter={shlex.quote(node.python)}\n"
                for node in lab.nodes
            )
        )
        # Connections are kept for as long as the one command needs: the next round logs in anew, as homelab does.
        options = f"-F none -o UserKnownHostsFile={lab.folder / 'known_hosts'} -o ControlMaster=auto -o ControlPersist=2s"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("ANSIBLE_", "HOMELAB_"))} | {
            "ANSIBLE_CONFIG": str(folder / "ansible.cfg"), "ANSIBLE_HOST_KEY_CHECKING": "True", "ANSIBLE_FORKS": str(max(5, len(lab.nodes))),
            "ANSIBLE_SSH_ARGS": options, "ANSIBLE_PIPELINING": str(pipelining), "ANSIBLE_SSH_CONTROL_PATH_DIR": str(folder / "c"),
            "ANSIBLE_LOCAL_TEMP": str(folder / "tmp"),
        }  # fmt: skip
        (folder / "ansible.cfg").touch()
        began = time.perf_counter()
        done = subprocess.run(
            [str(program), "all", "-i", str(inventory), "-m", "setup"], env=environment, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        took = time.perf_counter() - began
        if done.returncode != 0 or done.stdout.count('"ansible_facts"') != len(lab.nodes):
            raise SystemExit(f"error: ansible failed: {(done.stderr or done.stdout)[-600:]}")
        for socket in (folder / "c").iterdir():  # the sockets of the SSH masters are in the folder, so the masters must end first
            subprocess.run(
                ["ssh", "-F", "none", "-o", f"ControlPath={socket}", "-O", "exit", "-"], capture_output=True, timeout=10, check=False
            )
        return took
