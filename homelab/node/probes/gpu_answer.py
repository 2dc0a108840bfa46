"""What torch said of the cards, kept on the node. Asking costs 4 to 10 s, and half a gigabyte of every card for as long as it takes.

The answer holds as long as nothing changes that it depends on: this start of the machine, the driver, the cards and their order, what
hides cards, the files of torch and bitsandbytes, the question itself. Kept is only that every card computed: what failed is asked anew,
as somebody may have mended it.
"""

import contextlib
import hashlib
import os
import sys
from importlib.machinery import PathFinder

from homelab.node import files, paths, processes

_BOOT = "/proc/sys/kernel/random/boot_id"
_HIDING = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
_IN_USE_BYTES = 256 << 20  # of a card where nvidia-smi names no process (containers, WSL2): somebody computes there


def answer(request, told, question, ask):
    """torch's view of the cards that nvidia-smi has `told` of: the kept one, or what `ask(with_four_bit)` says; None where that fails.

    {"not_asked": [run, ...]} where runs of ours compute on them and nothing is kept: a card that trains has no room for a question.
    """
    with_four_bit = (request.get("method") or {}).get("kind") == "qlora"
    path = paths.gpu_file(request["workdir"]) if request.get("workdir") else None
    mark = _mark(told, question)
    kept = (files.read_object(path) if path else None) or {}
    if mark["boot"] and kept.get("mark") == mark and _is_well(kept.get("answer"), with_four_bit):
        return kept["answer"]
    runs = _computing(request, told["gpus"])
    if runs:
        return {"not_asked": runs}
    found = ask(with_four_bit)
    if path and _is_well(found, with_four_bit):
        with contextlib.suppress(OSError):  # the next one asks again; whether the disk can be written is another probe's business
            files.write_json(path, {"mark": mark, "answer": found})
    return found


def _mark(told, question):
    return {
        "boot": _line(_BOOT),
        "driver": told["driver_version"],
        "cards": [card.get("uuid") or card.get("bus_id") for card in told["gpus"]],
        "python": sys.executable,
        "packages": [_package(name) for name in ("torch", "bitsandbytes")],
        "hiding": [os.environ.get(name) for name in _HIDING],
        "question": hashlib.sha256(question.encode()).hexdigest()[:16],
    }


def _package(name):
    """Which file it is imported from, and which write of it; None where it is not installed. It is not imported."""
    found = PathFinder.find_spec(name)
    if found is None or not found.origin:
        return None
    try:
        status = os.stat(found.origin)
    except OSError:
        return None
    return [found.origin, status.st_size, status.st_mtime_ns, status.st_ino]


def _is_well(answer, with_four_bit):
    devices = answer.get("devices") if isinstance(answer, dict) else None
    if not devices or not isinstance(devices, list) or not all(isinstance(device, dict) for device in devices):
        return False
    return all(
        device.get("matmul_ok") is True and (device.get("four_bit_ok") is True or not with_four_bit) for device in devices
    )


def _computing(request, cards):
    """Names of the runs of ours that compute on the cards."""
    named = {holder.get("run") for card in cards for holder in card.get("holders") or ()} - {None}
    if any(card.get("holders") for card in cards) or not request.get("workdir"):
        return sorted(named)
    in_use = any((card.get("memory_used_bytes") or 0) > _IN_USE_BYTES for card in cards)
    return sorted(processes.of_runs(request["workdir"], request.get("node", ""))) if in_use else []


def _line(path):
    try:
        with open(path) as stream:
            return stream.read().strip()
    except OSError:
        return None
