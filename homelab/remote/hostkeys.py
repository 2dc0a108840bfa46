"""Host keys: verified always, accepted once by an explicit yes (`homelab trust`), a changed one refused."""

from __future__ import annotations

import base64
import hashlib
import shlex
from pathlib import Path

import paramiko
from paramiko.hostkeys import InvalidHostKey

from homelab.config.cluster import Cluster
from homelab.errors import HomelabError, InputError


def files_of(cluster: Cluster) -> list[Path]:
    """The known_hosts files that count: the cluster's own when it names one, else the user's and the system's."""
    if cluster.known_hosts:
        return [Path(cluster.known_hosts)]
    return [Path("~/.ssh/known_hosts").expanduser(), Path("/etc/ssh/ssh_known_hosts")]


def load(client: paramiko.SSHClient, cluster: Cluster) -> None:
    """Give the client the known keys and make it refuse all others (fabric's own default accepts any key unseen)."""
    for path in files_of(cluster):
        if path.exists():
            try:
                client.load_system_host_keys(str(path))
            except (OSError, ValueError, paramiko.SSHException, InvalidHostKey) as error:
                what = f"this line is damaged: {error.line.strip()[:60]}" if isinstance(error, InvalidHostKey) else str(error)
                raise InputError(
                    f"the known host keys cannot be read: {what}", where=str(path),
                    hint=f"mend or remove the line, then: ssh-keygen -l -f {shlex.quote(str(path))}",
                ) from error
    client.set_missing_host_key_policy(paramiko.RejectPolicy())


def fingerprint(key: paramiko.PKey) -> str:
    """SHA256:... as `ssh-keygen -lf` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")


def name_in_file(host: str, port: int) -> str:
    """How known_hosts spells a host: `[host]:port` where the port is not 22."""
    return host if port == 22 else f"[{host}]:{port}"


def remember(cluster: Cluster, host: str, port: int, key: paramiko.PKey) -> Path:
    """Append a key to the first known_hosts file; the file that now holds it."""
    path = files_of(cluster)[0]
    line = f"{name_in_file(host, port)} {key.get_name()} {key.get_base64()}\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        with path.open("a", encoding="utf-8") as stream:
            stream.write(f"\n{line}" if unfinished else line)
    except OSError as error:
        raise HomelabError(
            f"the host key cannot be written down: {error.strerror}", where=str(path),
            hint=f"ls -ld {shlex.quote(str(path.parent))} {shlex.quote(str(path))}",
        ) from error
    return path
