"""What the user asked for, checked as a whole before anything is made."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.lab import faults, nodes
from homelab.lab.lab_state import BackendName, LabNode, LabState, boot_id, user_name

BACKEND_NAMES = ("loopback", "namespaces")
MOST_NODES = 32
_LEAST_GB = 0.2  # sshd and an agent
# Of accounts that only a node has: 60706 to 61183 belong to none of systemd's ranges (its UIDS-GIDS.md).
_FIRST_UID = 61000
_USER = re.compile(r"^[a-z_][a-z0-9_-]{0,30}$")
_NAME = re.compile(r"^[a-zA-Z0-9][a-zA-Z0-9.-]{0,62}$")


class LabOptions(TypedDict, total=False):
    """What `Lab.up` may be given beside the folder and the number of nodes.

    `backend` None: namespaces for root, else loopback. `cpu`: cores per node (one value: the same for all), `memory`: GB of its processes.
    `rate`: of every cable, like "1gbit". `names`: instead of node1, node2, ... `python`: the interpreter written
    into cluster.toml (default: this one). `shared`: folders below /tmp or /dev/shm that the nodes of the namespaces
    backend see all the same, though theirs are private; the folder that holds the lab's folder is always one.
    `logins`: node -> "user" or "user:port", an account and a port that only this node of the namespaces backend has.
    """

    backend: BackendName | None
    cpu: Sequence[float] | None
    memory: Sequence[float] | None
    rate: str | None
    names: Sequence[str] | None
    python: str | None
    shared: Sequence[Path | str]
    logins: Mapping[str, str]


def new_state(path: Path, count: int, options: LabOptions) -> LabState:
    """The state of a lab that does not exist yet; addresses are still open. Raises InputError for what is impossible."""
    _check_path(path)
    names = _checked_names(count, options.get("names"))
    limits = _checked_limits(options.get("cpu"), len(names))
    memory = _checked_memory(options.get("memory"), len(names))
    backend = _checked_backend(options.get("backend"))
    user = user_name()
    logins = _checked_logins(path, options.get("logins") or {}, names, backend, user)
    python = os.path.abspath(os.path.expanduser(options.get("python") or sys.executable))
    shared = [
        str(path.parent),
        *nodes.python_home_folders(python),
        *(str(Path(folder).expanduser().resolve()) for folder in options.get("shared", ())),
    ]
    placeholders = tuple(
        LabNode(
            name=name,
            number=number,
            host="",
            port=logins[name][1] if name in logins else 0,
            interface="",
            user=logins[name][0] if name in logins else user,
            uid=_FIRST_UID + number if name in logins and logins[name][0] != user else None,
            python=python,
            home=str(path / "nodes" / name / "home"),
            workdir=str(path / "nodes" / name / "home" / "homelab"),
            cpu=limit,
            memory_bytes=memory_bytes,
        )
        for number, (name, limit, memory_bytes) in enumerate(zip(names, limits, memory, strict=True), start=1)
    )
    return LabState(
        folder=str(path),
        id=secrets.token_hex(3),
        backend=backend,
        boot_id=boot_id(),
        phase="starting",
        nodes=placeholders,
        rate=options.get("rate"),
        shared=tuple(dict.fromkeys(shared)),
    )


def _check_path(path: Path) -> None:
    if any(ord(c) < 32 or c in '"%\\$' for c in str(path)):
        raise InputError(
            "a lab's folder cannot have control characters or any of \" % \\ $ in its path: sshd reads them otherwise",
            where=str(path),
            hint="choose another folder",
        )


def _checked_names(count: int, names: Sequence[str] | None) -> Sequence[str]:
    if names is None:
        if not 1 <= count <= MOST_NODES:
            raise InputError(f"{count} nodes", where="--nodes", hint=f"from 1 to {MOST_NODES}")
        names = [f"node{number}" for number in range(1, count + 1)]
    for name in names:
        if not _NAME.match(name):
            raise InputError(f'"{name}" is no host name', where="--names", hint="letters, digits, - and . (63 at most)")
    if len(set(names)) != len(names) or not 1 <= len(names) <= MOST_NODES:
        raise InputError(f"names must differ, and be 1 to {MOST_NODES}", where="--names", hint="--names tower,laptop,mini")
    return names


def _checked_logins(
    path: Path, logins: Mapping[str, str], names: Sequence[str], backend: BackendName, own: str
) -> dict[str, tuple[str, int]]:
    """{node: (user, port)}. Another user must reach its home, which lies below the lab's folder."""
    checked = {}
    for node, text in logins.items():
        user, _, port = text.partition(":")
        if backend != "namespaces" or node not in names:
            raise InputError(
                f"{node} cannot have a login of its own", where="--login", hint=f"a node of --backend namespaces: {', '.join(names)}"
            )
        if not _USER.match(user) or not (port or "22").isdigit() or not 0 < int(port or 22) < 65536:
            raise InputError(f'"{text}" is no login', where="--login", hint=f"--login {node}=anna:2222")
        if user != own and any(line.startswith(f"{user}:") for line in Path("/etc/passwd").read_text(errors="replace").splitlines()):
            raise InputError(f'this machine has an account "{user}" already', where="--login", hint="choose a name that it does not have")
        checked[node] = (user, int(port or 22))
    closed = next((folder for folder in path.parents if folder.exists() and not folder.stat().st_mode & 0o001), None)
    if closed is not None and any(user != own for user, _ in checked.values()):
        raise InputError("another user cannot reach the lab's folder", where=str(closed), hint=f"chmod o+x {closed}")
    return checked


def _checked_limits(cpu: Sequence[float] | None, count: int) -> Sequence[float | None]:
    if not cpu:
        return [None] * count
    if len(cpu) not in (1, count):
        raise InputError(f"{len(cpu)} CPU limits for {count} nodes", where="--cpu", hint="one for each node, or one for all")
    return [faults.check_cores(cores) for cores in (list(cpu) * count if len(cpu) == 1 else cpu)]


def _checked_memory(memory: Sequence[float] | None, count: int) -> Sequence[int | None]:
    if not memory:
        return [None] * count
    if len(memory) not in (1, count) or min(memory) < _LEAST_GB:
        raise InputError(
            f"no memory limits for {count} nodes: {', '.join(f'{size:g}' for size in memory)}", where="--memory",
            hint=f"GB for each node, or once for all, {_LEAST_GB} or more: --memory 1.5,1.2,1.2",
        )  # fmt: skip
    return [round(size * 1e9) for size in (list(memory) * count if len(memory) == 1 else memory)]


def _checked_backend(backend: BackendName | None) -> BackendName:
    chosen = backend or ("namespaces" if os.geteuid() == 0 else "loopback")
    if chosen not in BACKEND_NAMES:
        raise InputError(
            f'no backend "{chosen}".{did_you_mean(chosen, BACKEND_NAMES)}', where="--backend", hint=f"there are: {', '.join(BACKEND_NAMES)}"
        )
    return chosen
