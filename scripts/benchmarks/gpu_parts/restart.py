"""The cost of a recovery on a card: the time until the memory of a killed rank is free, then imports, context, loading, the first step."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from pathlib import Path

from benchmarks.gpu_parts import material, ranks
from benchmarks.gpu_parts.place import Place

_EVERY_S = 0.01
# Who loads the base: "files" reads the model's own and quantises it; "worker" as a worker does, which keeps it the first time and reads it then.
_STARTS = {"cold": "files", "warm": "files", "keeping": "worker", "kept, cold": "worker"}


def measure(place: Place) -> None:
    """Killed holders of different size; the parts of a start, from the model's own files and from the quantised base that a worker keeps."""
    for size_gb in (8, 60) if place.is_card else (0.05,):
        if place.is_card and size_gb * 10**9 > 0.8 * _free_bytes():
            place.run(f"killed with {size_gb} GB", problem="the card has not so much free")
            continue
        with place.attempt(f"killed with {size_gb} GB"):
            _killed(place, size_gb)
    has_quantised = importlib.util.find_spec("bitsandbytes") is not None
    model = material.model(place.folder / "model", "7B" if place.is_card else "tiny", device=place.device)
    loads = {}
    for name, way in _STARTS.items():
        if way == "worker" and not has_quantised:
            place.run(f"start, {name}", problem="bitsandbytes is not installed here: no base is kept")
            continue
        with place.attempt(f"start, {name}"):
            if name.endswith("cold"):
                _forget(place.folder)
            loads[name] = _start(place, name, model, "qlora" if has_quantised else "lora", way)["load"]
    if {"cold", "kept, cold"} <= loads.keys():
        place.figure("gain_of_the_kept_base", loads["cold"] / loads["kept, cold"])
    with place.attempt("gpu probe"):
        _probe(place)


def _killed(place: Place, size_gb: float) -> None:
    """Each 10 ms: whether /proc has the process, its environment and tasks, and what is free on the card."""
    started = ranks.start(["-m", "benchmarks.gpu_parts.restart_holder", place.device, str(size_gb)], place.folder / f"holder-{size_gb}.txt")
    deadline = time.monotonic() + 90 * ranks.patience()
    while "computing" not in started.words():
        if started.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the process that holds {size_gb} GB did not begin:\n{started.words()}")
        time.sleep(0.05)
    pid, before = started.process.pid, _free_bytes() if place.is_card else 0
    folder = Path(f"/proc/{pid}")
    samples: list[dict[str, object]] = []
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    while time.perf_counter() - began < 20:
        # No process has waited for it yet, so it stays a zombie. An agent beside torchrun sees the same.
        free = _free_bytes() if place.is_card else 0
        now = {"state": _state(folder), "environment": _size(folder / "environ"), "tasks": _tasks(folder), "free_bytes": free}
        if not samples or any(samples[-1][key] != value for key, value in now.items()):
            samples.append({"s": time.perf_counter() - began, **now})
        if now["state"] == "Z" and (not place.is_card or free - before > 0.95 * size_gb * 10**9):
            break
        time.sleep(_EVERY_S)
    started.process.wait()
    freed = float(str(samples[-1]["s"]))
    place.run(f"killed with {size_gb} GB", seen=samples)
    place.figure(f"free_again_after_kill_{size_gb}_gb_s", freed)
    place.figure(
        f"environment_empty_after_kill_{size_gb}_gb_s", next((float(str(one["s"])) for one in samples if not one["environment"]), freed)
    )


def _start(place: Place, name: str, model: Path, kind: str, way: str) -> dict[str, float]:
    """Seconds of every part of a start in a process of its own."""
    # Two folders deep: beside them the worker keeps the quantised base.
    program = ["-m", "benchmarks.gpu_parts.restart_start", place.device, str(model), kind, way, str(place.folder / "runs" / "run")]
    started = ranks.start(program, place.folder / f"start-{name}.txt")
    ranks.checked([started], 150)
    words = started.words(10**6)
    parts = {part: float(seconds) for part, seconds in re.findall(r"^took (\w+) ([0-9.]+)$", words, re.MULTILINE)}
    place.run(f"start, {name}", seconds=parts, notes=re.findall("^base: .*", words, re.MULTILINE))
    for part, seconds in parts.items():
        place.figure(f"start_{name.replace(', ', '_')}_{part}_s", seconds)
    return parts


def _probe(place: Place) -> None:
    """The question that every facts, recovery and rejoin asks of torch: seconds, and what it takes of the card meanwhile."""
    began, before = time.perf_counter(), _free_bytes() if place.is_card else 0
    program = "import json; from homelab.node.probes import gpu; print(json.dumps(gpu.read({'method': {'kind': 'qlora'}}))[:200])"
    started = ranks.start(["-c", program], place.folder / "probe.txt")
    least = before
    while started.process.poll() is None:
        least = min(least, _free_bytes()) if place.is_card else 0
        time.sleep(_EVERY_S)
    place.run("gpu probe", seconds=time.perf_counter() - began, bytes=before - least, words=started.words(300))
    place.figure("gpu_probe_s", time.perf_counter() - began)
    place.figure("gpu_probe_bytes", before - least)


def _free_bytes() -> int:
    """What the driver has free on the first card. This process keeps a context of its own for it."""
    import torch

    return int(torch.cuda.mem_get_info(0)[0])


def _state(folder: Path) -> str:
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def _size(file: Path) -> int:
    try:
        return len(file.read_bytes())
    except OSError:
        return 0


def _tasks(folder: Path) -> int:
    try:
        return len(list((folder / "task").iterdir()))
    except OSError:
        return 0


def _forget(folder: Path) -> None:
    """All files of models leave the page cache, as after a restart of the machine."""
    for file in folder.rglob("*.safetensors"):
        with file.open("rb") as stream:
            os.fdatasync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
