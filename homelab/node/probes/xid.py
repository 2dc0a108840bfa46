"""The NVIDIA driver's own error reports, "Xid" lines of the kernel log since the start of the machine, as far as it can be read.

Line formats: NVIDIA's "XID Errors" guide; the process's name came with driver 510, before that there is at most its id.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from homelab.node.probes import nvidia
from homelab.node.system import programs
from homelab.shared.protocol import files

if TYPE_CHECKING:
    from typing import Any

    from homelab.shared.protocol.files import JsonObject

# A user without access to the kernel's buffer may often read the journal (members of adm or systemd-journal).
_LOGS = (("dmesg",), ("journalctl", "-k", "-b", "-o", "short-monotonic", "--no-pager", "-q", "-g", "NVRM: Xid"))
_LINE = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)(.*)")
_TIMEOUT_S = 4.0


def read(request: JsonObject) -> list[JsonObject] | None:
    """What was found; None where there is no NVIDIA driver, or the log cannot be read."""
    if programs.path_of(nvidia.QUERY[0]) is None:
        return None
    for words in _LOGS:
        if programs.path_of(words[0]) is None:
            continue
        try:
            code, output, _ = programs.answer_of(words, _TIMEOUT_S)
        except (OSError, TimeoutError):
            continue
        # Without the right to read, dmesg fails and journalctl is silent; journalctl also fails where nothing matches.
        if code == 0 and (output or words[0] == "dmesg"):
            return parse(output, _uptime_s())
    return None


def parse(text: str, uptime_s: float | None = None) -> list[JsonObject]:
    """One entry for each card and number, in the order of their first line: `homelab.controller.facts.gpu.Xid`."""
    entries: dict[Any, JsonObject] = {}
    for line in text.splitlines():
        match = _LINE.search(line)
        if match is None:
            continue
        bus, code, rest = match.groups()
        entry = entries.setdefault((bus, code), {"code": int(code), "bus_id": bus, "count": 0, "last_s_ago": None, "program": None})
        entry["count"] += 1
        at = re.match(r"(?:<\d+>)?\[\s*(\d+\.\d+)\]", line)
        if at and uptime_s is not None:
            entry["last_s_ago"] = max(0.0, round(uptime_s - float(at.group(1)), 1))
        named = re.search(r"name='?([^,']+)", rest)
        if named and named.group(1) != "<unknown>":
            entry["program"] = named.group(1).strip()
    return list(entries.values())


def _uptime_s() -> float | None:
    try:
        return float(files.text("/proc/uptime").split()[0])
    except (ValueError, IndexError):
        return None
