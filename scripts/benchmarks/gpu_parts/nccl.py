"""NCCL with several ranks on one card: who holds on for how long when a peer dies, what a start sends, what a communicator takes.

Behaviour is real, bandwidth is not: kernels of several processes take turns on the card, and the wire is loopback.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.gpu_parts import material, ranks
from benchmarks.gpu_parts.place import Place

_PEER = ("-m", "benchmarks.gpu_parts.nccl_peer")
# What decides how long a survivor holds on (ProcessGroupNCCL.cpp). The plan's own variables are asked of the planner.
_SETTINGS: dict[str, dict[str, str]] = {
    "torch's defaults": {},
    "short dump": {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"},
    "heartbeat 30": {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "30", "TORCH_NCCL_PROPAGATE_ERROR": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"},
}
_TIMEOUT_S = 20  # of a collective, so that what ends by it ends soon
_LIMIT_S = 100.0


def measure(place: Place) -> None:
    """The checks, the most telling first."""
    backend = "nccl" if place.is_card else "gloo"
    settings = _SETTINGS | {"the plan's": planned()} if place.is_card else {"torch's defaults": {}}
    for local in (False, True):
        _subgroup(place, backend, local=local)
    for name, variables in settings.items():
        _death(place, backend, signal.SIGKILL, name, variables)
    if place.is_card:
        for name in ("torch's defaults", "the plan's"):
            _death(place, backend, signal.SIGSTOP, name, settings[name])
        _interfaces(place)
        _one_host(place)
    _starts(place, backend)


def planned() -> dict[str, str]:
    """NCCL's and torch's variables as `homelab plan` sets them for two nodes with a card; nothing where the planner cannot be imported."""
    try:
        from homelab.config.cluster import Cluster
        from homelab.config.recipe import Recipe
        from homelab.planning import plan
    except ImportError:
        return {}
    nodes = [
        {"name": name, "host": "127.0.0.1", "lan_address": "127.0.0.1", "interface": "lo", "gpus": [{"model": "RTX 4090", "vram_gb": 24}]}
        for name in ("n0", "n1")
    ]
    made = plan.make(
        Cluster.model_validate({"nodes": nodes}, strict=False), Recipe.model_validate({"script": {"path": "x.py"}}), {}, run="r", attempt=1, port=29500,
        resume_step=0, code_dir=lambda workdir: workdir, script_path=lambda workdir: "x.py",
    )  # fmt: skip
    return {name: value for name, value in made.nodes[0].environment.items() if name.startswith(("NCCL_", "TORCH_NCCL_"))}


def _subgroup(place: Place, backend: str, *, local: bool) -> None:
    """A gloo group of two beside the group of three: without `use_local_synchronization` the third rank waits for a split that nobody enters."""
    name = "subgroup with local synchronization" if local else "subgroup"
    started = ranks.group(3, [*_PEER, "subgroup", backend, str(_TIMEOUT_S), str(int(local))], place.folder / name)
    well = ranks.wait(started, 60)
    place.run(name, codes=[rank.code for rank in started], seconds=[rank.seconds for rank in started], words=[rank.words(600) for rank in started])
    place.figure("subgroup_local_hangs" if local else "subgroup_hangs", float(not well))
    if local:
        place.gate("subgroup_beside_a_group_of_three", well)


def _death(place: Place, backend: str, how: signal.Signals, name: str, variables: Mapping[str, str]) -> None:
    """Three ranks add up in a loop; the third dies or stops. Seconds until each survivor ends by itself."""
    folder = place.folder / f"{how.name} {name}"
    started = ranks.group(3, [*_PEER, "sums", backend, str(_TIMEOUT_S), "0"], folder, variables)
    _until(lambda: all("step 20" in rank.words() for rank in started), 90, started)
    began = time.monotonic()
    os.kill(started[2].process.pid, how)
    ranks.wait(started[:2], _LIMIT_S, began)
    if how is signal.SIGSTOP:
        os.kill(started[2].process.pid, signal.SIGCONT)
    ranks.wait(started[2:], 1)
    seconds = [_LIMIT_S if rank.code is None else rank.seconds for rank in started[:2]]
    place.run(
        f"{how.name}, {name}", variables=dict(variables), codes=[rank.code for rank in started[:2]], seconds=seconds,
        words=[rank.words() for rank in started[:2]],
    )  # fmt: skip
    place.figure(f"{how.name.lower()}_{_key(name)}_s", max(second or 0.0 for second in seconds))


def _interfaces(place: Place) -> None:
    """NCCL_SOCKET_IFNAME is a list of beginnings, but for one that begins with "="."""
    for name in ("=lo", "l"):
        started = ranks.group(2, [*_PEER, "once", "nccl", str(_TIMEOUT_S), "0"], place.folder / f"interface {name}", {"NCCL_SOCKET_IFNAME": name, "NCCL_DEBUG": "INFO"})
        well = ranks.wait(started, 60)
        used = re.findall(r"NET/Socket : Using (.*)", started[0].words(100_000))
        place.run(f"NCCL_SOCKET_IFNAME={name}", well=well, used=used[:1])


def _one_host(place: Place) -> None:
    """What NCCL says of two ranks on one card that are not told to be hosts of their own."""
    started = ranks.group(2, [*_PEER, "once", "nccl", str(_TIMEOUT_S), "0"], place.folder / "one host", own=[{"NCCL_HOSTID": "same"}] * 2)
    well = ranks.wait(started, 60)
    place.run("two ranks on one card", well=well, words=[rank.words(1500) for rank in started])


def _starts(place: Place, backend: str) -> None:
    """A real start of three ranks with adapters on a frozen base: bytes on loopback before the first step, and what each rank holds of the card."""
    steps = 4
    model = material.model(place.folder / "model", "1.1B" if place.is_card else "tiny", device=place.device)
    base_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    data = material.rows(place.folder / "rows.jsonl", material.lengths(12 * steps, 250))
    channels = {"NCCL_MAX_NCHANNELS": "2", "NCCL_BUFFSIZE": "1048576"}
    for name, variables in {"as it is": {}, "two channels, 1 MiB": channels}.items() if place.is_card else {"as it is": {}}.items():
        run = material.run(place.folder / name, model, data, method__kind="lora", train__steps=steps)
        precision = "bf16" if place.is_card else "fp32"
        material.plan(run, 1, (6, 4, 2), device=place.device, precision=precision, backend=backend)
        before = _loopback_bytes()
        started = ranks.worker(run, 1, 3, variables)
        _until(lambda run=run: bool(ranks.lines(run, 1, 0)), 120, started)
        sent = _loopback_bytes() - before
        held = _held_bytes([rank.process.pid for rank in started])
        ranks.checked(started, 120)
        place.run(f"start, {name}", backend=backend, loopback_bytes=sent, base_bytes=base_bytes, held_bytes=held, losses=[line["loss"] for line in ranks.lines(run, 1, 0)])
        place.figure(f"start_bytes_over_base_{_key(name)}", sent / base_bytes)
        if held:
            place.figure(f"rank_holds_bytes_{_key(name)}", max(held))
        shutil.rmtree(run)


def _until(holds: object, limit_s: float, started: list[ranks.Rank]) -> None:
    assert callable(holds)
    deadline = time.monotonic() + limit_s * ranks.patience()
    while not holds():
        if time.monotonic() > deadline or any(rank.process.poll() not in (None, 0) for rank in started):
            ranks.wait(started, 0)
            raise RuntimeError("the ranks did not get so far:\n" + "\n".join(rank.words(1500) for rank in started))
        time.sleep(0.05)


def _loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def _held_bytes(pids: list[int]) -> list[int]:
    """What nvidia-smi says that these processes hold; nothing where it does not say (containers hide the process ids)."""
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=30).stdout
    found = dict(re.findall(r"(\d+), (\d+)", said))
    return [int(found[str(pid)]) << 20 for pid in pids if str(pid) in found]


def _key(name: str) -> str:
    return re.sub(r"\W+", "_", name.replace("'", "")).strip("_").lower()


if __name__ == "__main__":
    print(json.dumps(planned(), indent=1))
