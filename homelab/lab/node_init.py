"""The first process of a lab node: makes the node's view of the machine, starts sshd, adopts orphaned processes.

Run as a file with isolated Python (`python -I -S node_init.py SPEC.json`): standard library only, nothing of ours.
As PID 1 of a namespace its death ends every process of the node. Without namespaces it is a "subreaper" (prctl(2)): a
process that detaches itself stays below it, so a power cut finds it even when it has cleared its environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from typing import Any

# Constants of mount(2) and prctl(2).
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 8192, 16384, 1 << 18
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Read the specification, make the node, stay until killed."""
    with open(sys.argv[1]) as stream:
        spec = json.load(stream)
    for file in spec["cgroup_member_files"]:
        with open(file, "w") as stream:
            stream.write("0")  # "the process that writes", whatever its number in whichever namespace
    if spec["isolated"]:
        socket.sethostname(spec["hostname"])
        make_view(spec)
    elif _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    server = subprocess.Popen(spec["sshd"], stdin=subprocess.DEVNULL)
    server.returncode = 0  # reaped below, with everybody else
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(1.0)  # no process is left to wait for; an orphan may still be adopted


def make_view(spec: dict[str, Any]) -> None:
    """The node's own /proc, /sys, /tmp, /dev/shm and files of /etc; all else is the machine's."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    # A new sysfs shows the node's own network interfaces; the cgroup trees are carried over into it.
    new_sys = spec["folder"] + "/sys"
    mount("sysfs", new_sys, "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if os.path.isdir("/sys/fs/cgroup"):
        mount("/sys/fs/cgroup", new_sys + "/fs/cgroup", None, MS_BIND | MS_REC)
    mount(new_sys, "/sys", None, MS_MOVE)
    # Opened before /tmp is covered: some of these may lie below it and must stay where they are.
    kept = [(path, os.open(path, os.O_PATH)) for path in spec["shared"] if os.path.exists(path)]
    make_etc(spec["folder"] + "/etc-view")
    for path, target in spec["binds"]:
        mount(path, target, None, MS_BIND)
    mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV)
    for path, descriptor in kept:
        os.makedirs(path, exist_ok=True)
        mount(f"/proc/self/fd/{descriptor}", path, None, MS_BIND | MS_REC)
        os.close(descriptor)


def make_etc(stage: str) -> None:
    """A folder of the node's own as /etc: the machine's files copied, its folders as they are.

    A file of the node cannot lie on the machine's own /etc/passwd: a program there that replaces that file (each package that adds an
    account does) takes the mount away in all namespaces (rename(2), since Linux 3.18), and the node sees the machine's.
    """
    mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV)
    os.chmod(stage, 0o755)
    for entry in os.scandir("/etc"):
        target = f"{stage}/{entry.name}"
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), target)
        elif entry.is_dir():
            os.mkdir(target)
            mount(entry.path, target, None, MS_BIND | MS_REC)
        elif entry.is_file():
            with contextlib.suppress(FileNotFoundError):  # a program of the machine has just taken it away
                found = entry.stat()
                shutil.copyfile(entry.path, target)
                os.chown(target, found.st_uid, found.st_gid)
                os.chmod(target, stat.S_IMODE(found.st_mode))
    mount(stage, "/etc", None, MS_MOVE)


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    """mount(2). Raises OSError with what was tried."""
    if _libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, flags, None) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source} on {target}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
