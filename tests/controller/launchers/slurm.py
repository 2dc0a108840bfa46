"""A real Slurm of several nodes on this machine, in namespaces of its own: its end takes everything with it.

Debian's slurmctld, slurmd and slurm-client (22.05); without munge, as root. The nodes have names of their own and share 127.0.0.1.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

_CONF = """\
ClusterName=practice
SlurmctldHost=head(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPort=6817
JobRequeue=1
MinJobAge=3600
KillWait=5
InactiveLimit=0
{nodes}
PartitionName=all Nodes={names} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""
_INIT = """\
set -e
mount --make-rprivate /
mount --bind {folder}/hosts /etc/hosts
hostname head
ip link set lo up
ip link add v0 type veth peer name v1
ip addr add 198.18.0.1/24 dev v0
ip link set v0 up
ip link set v1 up
export SLURM_CONF={folder}/slurm.conf
slurmctld -D -c > {folder}/ctld.out 2>&1 &
for node in {nodes}; do slurmd -D -N $node > {folder}/$node.out 2>&1 & done
touch {folder}/started
wait
"""


def is_here() -> bool:
    """Whether it can be started: Slurm's programs, and root for the namespaces."""
    return os.geteuid() == 0 and all(
        shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") for name in ("slurmctld", "slurmd", "sbatch", "unshare")
    )


class Slurm:
    """A running Slurm; a context manager."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self.folder = folder
        self.names = [f"slurm{number}" for number in range(nodes)]
        self._init: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Slurm:
        folder = self.folder
        (folder / "state").mkdir(parents=True)
        hosts = ["127.0.0.1 localhost head", *(f"127.0.0.1 {name}" for name in self.names)]
        (folder / "hosts").write_text("\n".join(hosts) + "\n")
        lines = [
            f"NodeName={name} NodeHostname=head NodeAddr=127.0.0.1 Port={17001 + number} CPUs=1 State=UNKNOWN"
            for number, name in enumerate(self.names)
        ]
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder, nodes="\n".join(lines), names=",".join(self.names)))
        script = _INIT.format(folder=folder, nodes=" ".join(self.names))
        command = ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", script]
        self._init = subprocess.Popen(command, env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin"}, start_new_session=True)
        try:
            until(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D", check=False).strip() == str(len(self.names)), 60, self._why)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._init is not None
        if self._init.poll() is None:
            os.killpg(self._init.pid, signal.SIGKILL)  # unshare's --kill-child ends the namespace's first process, and with it all others
        self._init.wait(timeout=30)

    def run(self, *command: str, check: bool = True, cwd: Path | None = None, environment: dict[str, str] | None = None) -> str:
        """What a command of Slurm says, both streams. Raises AssertionError where it fails."""
        assert self._init is not None
        child = _first_child(self._init.pid)
        if child is None or not (self.folder / "started").exists():
            assert not check, "Slurm has not started"
            return ""
        inside = ["nsenter", f"--target={child}", "--net", "--mount", "--uts", "--pid", f"--wdns={cwd or self.folder}", *command]
        done = subprocess.run(
            inside,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf"), **(environment or {})},
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def state(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says of a job."""
        words = self.run("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _why(self) -> str:
        return "\n".join(
            f"{path.name}: {path.read_text(errors='replace')[-1500:]}"
            for path in sorted(self.folder.glob("*.[ol]*"))
            if path.suffix in (".out", ".log")
        )


def until(condition: Callable[[], bool], limit_s: float, why: Callable[[], str]) -> None:
    """Wait for a condition. Raises AssertionError with the reason after its limit."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, why()
        time.sleep(0.3)


def _first_child(pid: int) -> int | None:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None
