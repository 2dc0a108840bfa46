"""Host keys: verified always, accepted once by an explicit yes (`homelab trust`), a changed one refused."""

from __future__ import annotations

import base64
import hashlib
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

import paramiko
from paramiko.hostkeys import HostKeyEntry, InvalidHostKey

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.config.cluster import Cluster


def files_of(cluster: Cluster, own: Sequence[str] = ()) -> list[Path]:
    """The known_hosts files that count: the cluster's own when it names one, else the user's and the system's.

    `own`: the user's, where ssh_config names other ones (UserKnownHostsFile).
    """
    if cluster.known_hosts:
        return [Path(cluster.known_hosts)]
    return (
        [*(Path(os.path.expanduser(file)) for file in own), Path("/etc/ssh/ssh_known_hosts")]
        if own
        else [Path("~/.ssh/known_hosts").expanduser(), Path("/etc/ssh/ssh_known_hosts")]
    )


def load(client: paramiko.SSHClient, cluster: Cluster) -> None:
    """Give the client the known keys and make it refuse all others (fabric's own default accepts any key unseen)."""
    _read(files_of(cluster), into=client.get_host_keys())
    client.set_missing_host_key_policy(paramiko.RejectPolicy())


def known(cluster: Cluster, own: Sequence[str] = ()) -> paramiko.HostKeys:
    """All keys that were accepted. `own`: see `files_of`."""
    keys = paramiko.HostKeys()
    _read(files_of(cluster, own), into=keys)
    return keys


def file_with(name: str, cluster: Cluster, own: Sequence[str] = ()) -> Path:
    """The file that has the key of a host, by its name there; the first of them where none has it. `own`: see `files_of`. Raises InputError."""
    files = files_of(cluster, own)
    for file in files:
        keys = paramiko.HostKeys()
        _read([file], into=keys)
        if keys.lookup(name):
            return file
    return files[0]


def _read(files: Sequence[Path], into: paramiko.HostKeys) -> None:
    """Read the files as OpenSSH does (sshd(8), SSH_KNOWN_HOSTS FILE FORMAT): a damaged line is left out, a revoked key is none.

    paramiko's own reader gives up at a line with a marker (@cert-authority) or with a damaged key.
    """
    revoked, entries = set(), []
    for path in files:
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        except OSError as error:
            raise InputError(
                f"the known host keys cannot be read: {error.strerror}", where=str(path), hint=f"ls -ld {shlex.quote(str(path))}"
            ) from error
        for line in lines:
            marker, _, rest = line.strip().partition(" ")
            entry = _entry(rest if marker == "@revoked" else line.strip())
            if entry is not None and marker == "@revoked":
                revoked.add(entry.key.asbytes())
            elif entry is not None:
                entries.append(entry)
    for entry in entries:
        for host in entry.hostnames if entry.key.asbytes() not in revoked else ():
            if not into.check(host, entry.key):
                into.add(host, entry.key.get_name(), entry.key)


def _entry(line: str) -> HostKeyEntry | None:
    """The hosts and the key of one line; None for comments, markers we do not follow, and what cannot be read."""
    if not line or line[0] in "#@":
        return None
    try:
        entry = HostKeyEntry.from_line(line)
    except (paramiko.SSHException, InvalidHostKey, ValueError):
        return None
    return entry if entry is not None and entry.key is not None else None


def key_of(line: str) -> paramiko.PKey | None:
    """The key of a public key's line, "ssh-ed25519 AAAA..."; None where it cannot be read."""
    entry = _entry(f"host {line}")
    return entry.key if entry else None


def keys_in(file: Path) -> list[paramiko.PKey]:
    """The keys of a known_hosts file; none where it is not there."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    return [entry.key for line in lines if (entry := _entry(line.strip())) is not None]


def fingerprint(key: paramiko.PKey) -> str:
    """SHA256:... as `ssh-keygen -lf` prints it."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")


def name_in_file(host: str, port: int) -> str:
    """How known_hosts spells a host: `[host]:port` where the port is not 22."""
    return host if port == 22 else f"[{host}]:{port}"


def remember(cluster: Cluster, host: str, port: int, key: paramiko.PKey, *, name: str = "", own: Sequence[str] = ()) -> Path:
    """Append a key to the first known_hosts file; the file that now holds it. `name`: as the host is called there, where it has an alias."""
    path = files_of(cluster, own)[0]
    line = f"{name or name_in_file(host, port)} {key.get_name()} {key.get_base64()}\n"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        with path.open("a", encoding="utf-8") as stream:
            stream.write(f"\n{line}" if unfinished else line)
    except OSError as error:
        raise HomelabError(
            f"the host key cannot be saved: {error.strerror}",
            where=str(path),
            hint=f"ls -ld {shlex.quote(str(path.parent))} {shlex.quote(str(path))}",
        ) from error
    return path
