"""How busy a node is: CPU, memory, GPUs, and what its network cards have carried. Standard library and `nvidia-smi` only."""

from __future__ import annotations

import csv
import os
import time
from typing import TYPE_CHECKING

from homelab.node.system import programs
from homelab.shared.protocol.run_messages import NodeLoad

if TYPE_CHECKING:
    from typing import Any

    from homelab.shared.protocol.files import JsonObject
    from homelab.shared.protocol.run_messages import NodeLoad

_COUNTERS = "/proc/net/dev"
_INTERFACES = "/sys/class/net"
_GPU_FIELDS = (
    "index",
    "name",
    "memory.total",
    "memory.used",
    "temperature.gpu",
    "utilization.gpu",
    "power.draw",
    "compute_cap",
    "power.limit",
    "memory.reserved",
)
_OLD = 7  # as many of them every driver knows


def read() -> NodeLoad:
    """How busy the machine is now."""
    total, available = memory()
    used = total - (available or 0) if total else None
    return read_traffic().replace(cpu_percent=cpu_percent(), memory_used_bytes=used, memory_total_bytes=total)


def memory() -> tuple[int | None, int | None]:
    """(total, available) bytes, (None, None) where /proc/meminfo is missing."""
    values = {}
    try:
        with open("/proc/meminfo") as stream:
            for line in stream:
                key, _, rest = line.partition(":")
                values[key] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return None, None
    return values.get("MemTotal"), values.get("MemAvailable")


def cpu_percent(window_s: float = 0.1) -> float | None:
    """Share of all cores that was busy during `window_s`, 0 to 100; None where /proc/stat is missing."""
    first = _cpu_times()
    time.sleep(window_s if first else 0.0)
    second = _cpu_times()
    if first is None or second is None:
        return None
    busy, total = second[0] - first[0], second[1] - first[1]
    return round(100.0 * busy / total, 1) if total > 0 else 0.0


def _cpu_times() -> tuple[int, int] | None:
    try:
        with open("/proc/stat") as stream:
            values = [int(word) for word in stream.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    return sum(values) - values[3] - values[4], sum(values)


def gpus(timeout_s: float = 10.0) -> tuple[str, list[JsonObject]]:
    """(state, cards): state is "ok", "missing" or nvidia-smi's own error; memory in bytes, `[N/A]` fields are None.

    Field names: `nvidia-smi --help-query-gpu`. Drivers before 510 refuse the whole question for a field they do not know
    (compute_cap, memory.reserved): they are asked again without it and what comes after it.
    """
    program = programs.path_of("nvidia-smi")
    if program is None:
        return "missing", []
    for fields in (_GPU_FIELDS, _GPU_FIELDS[:_OLD]):
        try:
            words = [program, "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"]
            code, output, errors = programs.answer_of(words, timeout_s)
        except TimeoutError:
            return f"nvidia-smi did not answer within {timeout_s:.0f} s", []
        except OSError as error:
            return f"nvidia-smi could not be started: {error}", []
        if code == 0 or "not a valid field" not in output + errors:
            break
    if code != 0:
        return (output + errors).strip()[:500] or f"nvidia-smi ended with {code}", []
    return "ok", parse_gpus(output)


def wait_for_cards(limit_s: float = 5.0, every_s: float = 0.3) -> None:
    """Wait until no card's used memory falls any more: a driver may still be giving it back when the process that had it is gone.

    At once where there is no card, and where nvidia-smi does not answer.
    """
    deadline = time.monotonic() + limit_s
    before = _used_bytes()
    while before and time.monotonic() < deadline:
        time.sleep(every_s)
        now = _used_bytes()
        if not any(now.get(index, used) < used for index, used in before.items()):
            return
        before = now


def _used_bytes() -> dict[Any, Any]:
    return {card["index"]: card["memory_used_bytes"] for card in gpus(3.0)[1] if card["memory_used_bytes"] is not None}


def parse_gpus(text: str) -> list[JsonObject]:
    """The cards of nvidia-smi's CSV answer: the fields above, with or without the last three. Other lines are left out."""
    cards = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if not _OLD <= len(row) <= len(_GPU_FIELDS) or not row[0].strip().isdigit():
            continue
        numbers = [_number(field) for field in row]
        cards.append(
            {
                "index": int(row[0]),
                "name": row[1].strip(),
                "memory_total_bytes": _mebibytes(numbers[2]),
                "memory_used_bytes": _mebibytes(numbers[3]),
                "temperature_c": numbers[4],
                "utilization_percent": numbers[5],
                "power_w": numbers[6],
                "power_limit_w": numbers[8] if len(row) > 8 else None,
                "memory_reserved_bytes": _mebibytes(numbers[9]) if len(row) > 9 else None,
                "compute_capability": row[7].strip() if len(row) > 7 and numbers[7] is not None else None,
            }
        )
    return cards


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _mebibytes(value: float | None) -> int | None:
    return None if value is None else int(value * 1024 * 1024)


def read_traffic() -> NodeLoad:
    """Bytes received and sent since the machine started, and when they were counted; None where the kernel does not tell."""
    try:
        with open(_COUNTERS) as stream:
            counted = parse_traffic(stream.read())
    except (OSError, ValueError, IndexError):
        return NodeLoad()
    names = [name for name in counted if name != "lo"]
    # What a bridge, a container or a tunnel carries passes a real card once more. Where there is no real card (a container) all count.
    real = [name for name in names if os.path.exists(os.path.join(_INTERFACES, name, "device"))]
    pairs = [counted[name] for name in real or names]
    return NodeLoad(received_bytes=sum(pair[0] for pair in pairs), sent_bytes=sum(pair[1] for pair in pairs), counted_at_s=time.monotonic())


def parse_traffic(text: str) -> dict[str, tuple[int, int]]:
    """Interface -> (bytes received, bytes sent) of the text of /proc/net/dev."""
    counted = {}
    for line in text.splitlines():
        name, colon, fields = line.partition(":")
        if colon:
            words = fields.split()
            counted[name.strip()] = (int(words[0]), int(words[8]))
    return counted
