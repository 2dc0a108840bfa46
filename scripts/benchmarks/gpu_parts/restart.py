"""What a recovery pays on a card: until the memory of a killed rank is free again, and then importing, context, loading, the first step."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path

from benchmarks.gpu_parts import material, ranks
from benchmarks.gpu_parts.place import Place

_EVERY_S = 0.01


def measure(place: Place) -> None:
    """Killed holders of different size, then the parts of a start, cold and warm."""
    for size_gb in (8, 60) if place.is_card else (0.05,):
        if place.is_card and size_gb * 10**9 > 0.8 * _free_bytes():
            place.run(f"killed with {size_gb} GB", problem="the card has not so much free")
            continue
        _killed(place, size_gb)
    shape, kind = ("7B", "qlora") if importlib.util.find_spec("bitsandbytes") else ("7B", "lora")
    model = material.model(place.folder / "model", shape if place.is_card else "tiny", device=place.device)
    for name in ("cold", "warm"):
        if name == "cold":
            _forget(model)
        _start(place, name, model, kind)
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
    seen: list[dict[str, object]] = []
    began = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    while time.perf_counter() - began < 20:
        # Nobody has waited for it yet, so it stays a zombie: that is what an agent beside torchrun sees, too.
        free = _free_bytes() if place.is_card else 0
        now = {"state": _state(folder), "environment": _size(folder / "environ"), "tasks": _tasks(folder), "free_bytes": free}
        if not seen or any(seen[-1][key] != value for key, value in now.items()):
            seen.append({"s": time.perf_counter() - began, **now})
        if now["state"] == "Z" and (not place.is_card or free - before > 0.95 * size_gb * 10**9):
            break
        time.sleep(_EVERY_S)
    started.process.wait()
    freed = float(str(seen[-1]["s"]))
    place.run(f"killed with {size_gb} GB", seen=seen)
    place.figure(f"free_again_after_kill_{size_gb}_gb_s", freed)
    place.figure(f"environment_empty_after_kill_{size_gb}_gb_s", next((float(str(one["s"])) for one in seen if not one["environment"]), freed))


def _start(place: Place, name: str, model: Path, kind: str) -> None:
    """Every part of a start in a process of its own."""
    program = ["-m", "benchmarks.gpu_parts.restart_start", place.device, str(model), kind if place.is_card else "lora"]
    started = [ranks.start(program, place.folder / f"start-{name}.txt")]
    ranks.checked(started, 150)
    for line in started[0].words().splitlines():
        words = line.split()
        if len(words) == 3 and words[0] == "took":
            place.run(f"start, {name}", part=words[1], seconds=float(words[2]))
            place.figure(f"start_{name}_{words[1]}_s", float(words[2]))


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


def _forget(model: Path) -> None:
    """The files of the model leave the page cache, as after a restart of the machine."""
    for file in model.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.fdatasync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
