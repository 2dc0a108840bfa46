"""Who holds a card's memory: nvidia-smi gives process ids, /proc says whose they are, as far as this user may read."""

import os
import pwd

from homelab.node import processes


def named(holders):
    """The holders with what /proc adds: user, a readable program name, whether they are ours to end, and the run they belong to.

    A process that is gone, or lives in another PID namespace, keeps what nvidia-smi said of it. One that computes and draws
    is listed twice by nvidia-smi and once here.
    """
    found = {}
    for holder in holders:
        known = found.setdefault(holder["pid"], dict(holder))
        known["memory_bytes"] = max(known["memory_bytes"] or 0, holder["memory_bytes"] or 0) or None
        if holder["type"] not in known["type"]:
            known["type"] += "+" + holder["type"]
    for holder in found.values():
        holder.update(_owner(holder["pid"]))
        holder["program"] = _program(holder["pid"], holder["program"])
    return sorted(found.values(), key=lambda holder: -(holder["memory_bytes"] or 0))


def _owner(pid):
    try:
        uid = os.stat("/proc/%d" % pid).st_uid
    except (OSError, TypeError):
        return {"user": None, "ours": False, "run": None}
    try:
        user = pwd.getpwuid(uid).pw_name
    except KeyError:
        user = str(uid)
    return {"user": user, "ours": uid == os.getuid(), "run": processes.run_of(pid)}


def _program(pid, said):
    """Two words at most: "python train.py", "Xorg". nvidia-smi gives a path, for some programs with all their arguments."""
    words = (processes.command_line(pid) if pid is not None else "").split() or said.split()
    if not words:
        return ""
    name = os.path.basename(words[0])
    if name.startswith(("python", "pt_main_thread")):
        script = next((word for word in words[1:] if not word.startswith("-")), "")
        if script and "-c" not in words[: words.index(script)]:
            name += " " + os.path.basename(script)
    return name[:60]
