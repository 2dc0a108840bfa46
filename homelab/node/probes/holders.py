"""The processes that hold a card's memory: nvidia-smi gives their ids, /proc gives their owners, as far as this user may read them."""

from __future__ import annotations

import os
import pwd
from typing import TYPE_CHECKING

from homelab.node.system import processes

if TYPE_CHECKING:
    from typing import Any

    from homelab.shared.protocol.files import JsonObject


def named(holders: list[JsonObject]) -> list[JsonObject]:
    """The holders with what /proc adds: user, a readable program name, whether they are ours to end, and the run they belong to.

    A process that is gone, or lives in another PID namespace, keeps what nvidia-smi said of it. One that computes and draws
    is listed twice by nvidia-smi and once here.
    """
    by_pid: dict[Any, Any] = {}
    for holder in holders:
        process = by_pid.setdefault(holder["pid"], dict(holder))
        process["memory_bytes"] = max(process["memory_bytes"] or 0, holder["memory_bytes"] or 0) or None
        if holder["type"] not in process["type"]:
            process["type"] += "+" + holder["type"]
    for holder in by_pid.values():
        holder.update(_owner(holder["pid"]))
        holder["program"] = _program(holder["pid"], holder["program"])
    return sorted(by_pid.values(), key=lambda holder: -(holder["memory_bytes"] or 0))


def _owner(pid: int) -> JsonObject:
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except (OSError, TypeError):
        return {"user": None, "ours": False, "run": None}
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return {"user": user, "ours": uid == os.getuid(), "run": processes.run_of(pid)}


def _program(pid: int, reported_name: str) -> str:
    """Two words at most: "python train.py", "Xorg". nvidia-smi gives a path, for some programs with all their arguments."""
    words = (processes.command_line(pid) if pid is not None else "").split() or reported_name.split()
    if not words:
        return ""
    name = os.path.basename(words[0])
    if name.startswith(("python", "pt_main_thread")):
        script = next((word for word in words[1:] if not word.startswith("-")), "")
        if script and "-c" not in words[: words.index(script)]:
            name += " " + os.path.basename(script)
    return name[:60]
