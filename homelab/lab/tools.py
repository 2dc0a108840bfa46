"""Running the programs a lab is built from (sshd, ip, tc, unshare), with a clear error when one is missing or fails."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator

from homelab.controller.base.errors import HomelabError
from homelab.lab import procfs

# Program -> package, in the order of _MANAGERS.
PACKAGES = {
    "sshd": ("openssh-server", "openssh-server", "openssh"),
    "ssh-keygen": ("openssh-client", "openssh", "openssh"),
    "ip": ("iproute2", "iproute", "iproute2"),
    "tc": ("iproute2", "iproute-tc", "iproute2"),
    "unshare": ("util-linux", "util-linux", "util-linux"),
    "nsenter": ("util-linux", "util-linux", "util-linux"),
    "setsid": ("util-linux", "util-linux", "util-linux"),
    "umount": ("mount", "util-linux", "util-linux"),
}
# The program that installs packages on Debian and Ubuntu, Fedora, Arch.
_MANAGERS = {"apt": "apt install", "dnf": "dnf install", "pacman": "pacman -S"}
# An ordinary user's PATH often lacks the folders where sshd, ip and tc are.
_SEARCH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def require(*names: str) -> None:
    """Raise ONE HomelabError that names every missing program and the command that installs them."""
    missing = [name for name in names if shutil.which(name, path=_SEARCH) is None]
    if missing:
        sudo = "" if os.geteuid() == 0 else "sudo "
        commands = (
            f"{sudo}{install} {' '.join(dict.fromkeys(PACKAGES[name][place] for name in missing))}"
            for place, (manager, install) in enumerate(_MANAGERS.items())
            if shutil.which(manager, path=_SEARCH)
        )
        raise HomelabError(
            f"the lab needs {', '.join(missing)}, and {'it is' if len(missing) == 1 else 'they are'} not installed",
            where="this machine",
            hint=next(commands, f"install the packages of this system that have {', '.join(missing)}"),
        )


def program(name: str) -> str:
    """The absolute path of an installed program (sshd insists on one). Raises HomelabError when it is missing."""
    require(name)
    path = shutil.which(name, path=_SEARCH)
    assert path
    return os.path.abspath(path)


def call(*arguments: str, timeout_s: float = 20.0) -> str:
    """Run a program to its end and return what it printed. Raises HomelabError with its own words when it refuses."""
    command = [program(arguments[0]), *arguments[1:]]
    try:
        completed = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise HomelabError(
            f"{' '.join(arguments)} did not end within {timeout_s:g} s", where="this machine", hint="run it by hand to see why"
        ) from None
    if completed.returncode != 0:
        words = (completed.stderr or completed.stdout).strip() or f"exit code {completed.returncode}"
        raise HomelabError(
            f"{' '.join(arguments)}: {words}", where="this machine", hint="run it by hand; the lab changes nothing when it fails"
        )
    return completed.stdout


@contextlib.contextmanager
def machine_lock(timeout_s: float = 60.0) -> Iterator[None]:
    """Only one lab of this machine picks a network or a port at a time.

    It is an abstract Unix socket: it leaves no file and ends with its process. Raises HomelabError after `timeout_s`.
    """
    with socket.socket(socket.AF_UNIX) as lock:

        def bound() -> bool:
            try:
                lock.bind("\0homelab-lab")
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                return False
            return True

        if not procfs.until(bound, timeout_s):
            raise HomelabError(
                f"another lab has been starting for more than {timeout_s:g} s",
                where="this machine",
                hint="look for it with: ps -ef | grep 'lab up'",
            )
        yield
