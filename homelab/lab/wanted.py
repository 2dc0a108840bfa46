"""What the user asked for, checked as a whole before anything is made."""

from __future__ import annotations

import os
import re
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from homelab.errors import InputError, did_you_mean
from homelab.lab import faults, nodes
from homelab.lab.state import BackendName, LabNode, LabState, boot_id, user_name

BACKEND_NAMES = ("loopback", "namespaces")
MOST_NODES = 32
_NAME = re.compile(r"^[a-zA-Z0-9][a-zA-Z0-9.-]{0,62}$")


def wanted(
    path: Path,
    count: int,
    backend: BackendName | None,
    cpu: Sequence[float] | None,
    rate: str | None,
    names: Sequence[str] | None,
    python: str | None,
    shared: Sequence[Path | str],
) -> LabState:
    """The state of a lab that does not exist yet; addresses are still open. Raises InputError for what cannot be."""
    if any(ord(c) < 32 or c in '"%\\$' for c in str(path)):
        raise InputError(
            "a lab's folder cannot have control characters or any of \" % \\ $ in its path: sshd reads them otherwise",
            where=str(path),
            hint="choose another folder",
        )
    if names is None:
        if not 1 <= count <= MOST_NODES:
            raise InputError(f"{count} nodes", where="--nodes", hint=f"from 1 to {MOST_NODES}")
        names = [f"node{number}" for number in range(1, count + 1)]
    for name in names:
        if not _NAME.match(name):
            raise InputError(f'"{name}" is no host name', where="--names", hint="letters, digits, - and . (63 at most)")
    if len(set(names)) != len(names) or not 1 <= len(names) <= MOST_NODES:
        raise InputError(
            f"names must differ, and be 1 to {MOST_NODES}", where="--names", hint="--names tower,laptop,mini"
        )
    limits: list[float | None] = [None] * len(names)
    if cpu:
        if len(cpu) not in (1, len(names)):
            raise InputError(
                f"{len(cpu)} CPU limits for {len(names)} nodes", where="--cpu", hint="one for each node, or one for all"
            )
        limits = [faults.check_cores(cores) for cores in (list(cpu) * len(names) if len(cpu) == 1 else cpu)]
    chosen = backend or ("namespaces" if os.geteuid() == 0 else "loopback")
    if chosen not in BACKEND_NAMES:
        raise InputError(
            f'no backend "{chosen}".{did_you_mean(chosen, BACKEND_NAMES)}',
            where="--backend",
            hint=f"there are: {', '.join(BACKEND_NAMES)}",
        )
    user = user_name()
    interpreter = os.path.abspath(os.path.expanduser(python or sys.executable))
    kept = [
        str(path.parent),
        *nodes.python_home_folders(interpreter),
        *(str(Path(s).expanduser().resolve()) for s in shared),
    ]
    placeholders = tuple(
        LabNode(
            name=name,
            number=number,
            host="",
            port=0,
            interface="",
            user=user,
            python=interpreter,
            home=str(path / "nodes" / name / "home"),
            workdir=str(path / "nodes" / name / "home" / "homelab"),
            cpu=limit,
        )
        for number, (name, limit) in enumerate(zip(names, limits, strict=True), start=1)
    )
    return LabState(
        folder=str(path),
        id=secrets.token_hex(3),
        backend=chosen,
        boot_id=boot_id(),
        phase="starting",
        nodes=placeholders,
        rate=rate,
        shared=tuple(dict.fromkeys(kept)),
    )
