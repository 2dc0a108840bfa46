"""The cache of torch's answer about the cards. The question takes 4 to 10 s, and half a gigabyte of every card meanwhile.

The answer is valid until something changes that it depends on: this start of the machine, its sleep since, the driver and its error
reports, the cards and their order, the settings that hide cards, the files of torch and bitsandbytes, or the question itself. Only the answer that every card computes is
kept; after a failure torch is asked again, because somebody may have fixed it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

from homelab.node import paths
from homelab.node.system import processes
from homelab.shared.protocol import files, quantisation

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from homelab.shared.protocol.files import JsonObject

_BOOT = "/proc/sys/kernel/random/boot_id"
_SUSPENDS = "/sys/power/suspend_stats/success"
_LAYERS = {quantisation.NF4: "four_bit", quantisation.INT8: "eight_bit", None: None}
_HIDING = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
# of a card where nvidia-smi names no process (containers, WSL2): more memory in use means that a program computes there
_IN_USE_BYTES = 256 << 20


def answer(request: JsonObject, gpu_facts: JsonObject, question: str, ask: Callable[[str | None], Any]) -> Any:
    """torch's view of the cards in `gpu_facts` (from nvidia-smi): the kept one, or what `ask(layer)` says; None where that fails.

    `layer`: the quantised one that the recipe trains with ("four_bit", "eight_bit"), or None.

    {"not_asked": [run, ...]} where runs of ours compute on them and nothing is kept: a card that trains has no room for a question.
    """
    method = request.get("method") or {}
    layer = _LAYERS[quantisation.of(method.get("kind"), method.get("base"))]
    path = paths.gpu_file(request["workdir"]) if request.get("workdir") else None
    mark = _mark(request, gpu_facts, question)
    kept = (files.read_object(path) if path else None) or {}
    if mark["boot"] and kept.get("mark") == mark and _is_well(kept.get("answer"), layer):
        return kept["answer"]
    runs = _computing(request, gpu_facts["cards"])
    if runs:
        return {"not_asked": runs}
    fresh = ask(layer)
    if path and _is_well(fresh, layer):
        with contextlib.suppress(OSError):  # the next preflight asks again; another probe reports a disk that cannot be written
            files.write_json(path, {"mark": mark, "answer": fresh})
    return fresh


def _mark(request: JsonObject, gpu_facts: JsonObject, question: str) -> JsonObject:
    reports = (request.get("facts") or {}).get("xid") or ()
    return {
        "boot": files.text(_BOOT) or None,
        # CUDA often fails after sleep, while nvidia-smi answers as before
        "suspends": files.integer(_SUSPENDS),
        "reports": [[report["code"], report["bus_id"], report["count"]] for report in reports],
        "driver": gpu_facts["driver_version"],
        "cards": [card.get("uuid") or card.get("bus_id") for card in gpu_facts["cards"]],
        "python": sys.executable,
        "packages": [_package(name) for name in ("torch", "bitsandbytes")],
        "hiding": [os.environ.get(name) for name in _HIDING],
        "question": hashlib.sha256(question.encode()).hexdigest()[:16],
    }


def _package(name: str) -> list[Any] | None:
    """The file that a package is imported from, with its size and times; None where it is not installed. Nothing is imported."""
    spec = PathFinder.find_spec(name)
    if spec is None or not spec.origin:
        return None
    try:
        status = os.stat(spec.origin)
    except OSError:
        return None
    return [spec.origin, status.st_size, status.st_mtime_ns, status.st_ino]


def _is_well(answer: Any, layer: str | None) -> bool:
    devices = answer.get("devices") if isinstance(answer, dict) else None
    if not devices or not isinstance(devices, list) or not all(isinstance(device, dict) for device in devices):
        return False
    return all(device.get("matmul_ok") is True and (layer is None or device.get(f"{layer}_ok") is True) for device in devices)


def _computing(request: JsonObject, cards: list[JsonObject]) -> list[str]:
    """Names of the runs of ours that compute on the cards."""
    named = {holder.get("run") for card in cards for holder in card.get("holders") or ()} - {None}
    if any(card.get("holders") for card in cards) or not request.get("workdir"):
        return sorted(named)
    in_use = any((card.get("memory_used_bytes") or 0) > _IN_USE_BYTES for card in cards)
    return sorted(processes.of_runs(request["workdir"], request.get("node", ""))) if in_use else []
