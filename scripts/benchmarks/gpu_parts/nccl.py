"""NCCL with several ranks on one card: who holds on for how long when a peer dies, what a start sends, what a communicator takes.

Behaviour is real, bandwidth is not: kernels of several processes take turns on the card, and the wire is loopback.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from benchmarks.gpu_parts import material, ranks, smi
from benchmarks.gpu_parts.place import Place

_PEER = ("-m", "benchmarks.gpu_parts.nccl_peer")
# What decides how long a survivor holds on (ProcessGroupNCCL.cpp). The plan's own variables are asked of the planner.
_SETTINGS: dict[str, dict[str, str]] = {
    "short dump": {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"},
    "torch's defaults": {},
    "heartbeat 30": {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "30", "TORCH_NCCL_PROPAGATE_ERROR": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"},
}
_TIMEOUT_S = 20  # of a collective: short, so that the measurements end soon
_LIMIT_S = 100.0


def measure(place: Place) -> None:
    """What a run does by itself first, then what is quick to see, then all that waits for a timeout: the last checks may not fit into the limit."""
    backend = "nccl" if place.is_card else "gloo"
    for name, check in _checks(place, backend):
        with place.attempt(name):
            check()


def _checks(place: Place, backend: str) -> Iterator[tuple[str, Callable[[], None]]]:
    settings = _settings(place)
    first, *others = settings

    def death(how: signal.Signals, name: str) -> tuple[str, Callable[[], None]]:
        return f"{how.name}, {name}", lambda: _death(place, backend, how, name, settings[name])

    yield "subgroup with local synchronization", lambda: _subgroup(place, backend, local=True)
    yield "start, as it is", lambda: _start(place, backend, "as it is", {})
    yield death(signal.SIGKILL, first)
    if place.is_card:
        yield death(signal.SIGSTOP, first)
        yield from ((f"interface {name}", lambda name=name: _interface(place, name)) for name in ("=lo", "l"))
        yield "two ranks on one card", lambda: _one_host(place)
        yield (
            "start, two channels",
            lambda: _start(place, backend, "two channels, 1 MiB", {"NCCL_MAX_NCHANNELS": "2", "NCCL_BUFFSIZE": "1048576"}),
        )
        yield from (death(signal.SIGKILL, name) for name in others)
        yield death(signal.SIGSTOP, "torch's defaults")
    yield "subgroup", lambda: _subgroup(place, backend, local=False)


def _settings(place: Place) -> dict[str, dict[str, str]]:
    """Variables to be measured, by name: the plan's own first, but not where the planner cannot be imported."""
    if not place.is_card:
        return {"torch's defaults": {}}
    own: dict[str, str] = {}
    with place.attempt("the plan's"):
        own = planned()
    if not own:
        place.run("the plan's", problem="the planner cannot be imported here (pydantic?): its variables are not known, and left out")
        return _SETTINGS
    return {"the plan's": own, **_SETTINGS}


def planned() -> dict[str, str]:
    """NCCL's and torch's variables as `homelab plan` sets them for two nodes with a card; nothing where the planner cannot be imported."""
    try:
        from homelab.controller.config.cluster import Cluster
        from homelab.controller.config.recipe import parse_recipe
        from homelab.controller.planning import plan
        from homelab.controller.planning.inputs import PlanInputs
    except ImportError:
        return {}
    nodes = [
        {"name": name, "host": "127.0.0.1", "lan_address": "127.0.0.1", "interface": "lo", "gpus": [{"model": "RTX 4090", "vram_gb": 24}]}
        for name in ("n0", "n1")
    ]
    cluster, recipe = Cluster.model_validate({"nodes": nodes}, strict=False), parse_recipe({"script": {"path": "x.py"}})
    made = plan.make(PlanInputs(cluster, recipe, {}, run="r", port=29500))
    ours = {name: value for name, value in made.nodes[0].environment.items() if name.startswith(("NCCL_", "TORCH_NCCL_"))}
    # in the folder of a run, which there is none of here
    return {name: value for name, value in ours.items() if name != "NCCL_DEBUG_FILE"}


def _subgroup(place: Place, backend: str, *, local: bool) -> None:
    """A gloo group of two beside the group of three: without `use_local_synchronization` the third rank waits for a split that nobody enters."""
    name = "subgroup with local synchronization" if local else "subgroup"
    started = ranks.group(3, [*_PEER, "subgroup", backend, str(_TIMEOUT_S), str(int(local))], place.folder / name)
    well = ranks.wait(started, 60)
    place.run(
        name, codes=[rank.code for rank in started], seconds=[rank.seconds for rank in started], words=[rank.words(600) for rank in started]
    )
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


def _interface(place: Place, name: str) -> None:
    """NCCL_SOCKET_IFNAME is a list of beginnings, but for one that begins with "="."""
    started = ranks.group(
        2,
        [*_PEER, "once", "nccl", str(_TIMEOUT_S), "0"],
        place.folder / f"interface {name}",
        {"NCCL_SOCKET_IFNAME": name, "NCCL_DEBUG": "INFO"},
    )
    well = ranks.wait(started, 60)
    used = re.findall(r"NET/Socket : Using (.*)", started[0].words(100_000))
    place.run(f"NCCL_SOCKET_IFNAME={name}", well=well, used=used[:1])


def _one_host(place: Place) -> None:
    """What NCCL says of two ranks on one card that are not told to be hosts of their own."""
    started = ranks.group(2, [*_PEER, "once", "nccl", str(_TIMEOUT_S), "0"], place.folder / "one host", own=[{"NCCL_HOSTID": "same"}] * 2)
    well = ranks.wait(started, 60)
    place.run("two ranks on one card", well=well, words=[rank.words(1500) for rank in started])


def _start(place: Place, backend: str, name: str, variables: Mapping[str, str]) -> None:
    """A real start of three ranks with adapters on a frozen base: bytes on loopback before the first step, and what each rank holds of the card."""
    steps = 4
    model = material.model(place.folder / "model", "1.1B" if place.is_card else "tiny", device=place.device)
    base_bytes = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    data = material.rows(place.folder / "rows.jsonl", material.lengths(12 * steps, 250))
    run = material.run(place.folder / name, model, data, method__kind="lora", train__steps=steps)
    material.plan(run, 1, (6, 4, 2), device=place.device, precision="bf16" if place.is_card else "fp32", backend=backend)
    before = _loopback_bytes()
    started = ranks.worker(run, 1, 3, variables)
    _until(lambda: bool(ranks.lines(run, 1, 0)), 120, started)
    sent = _loopback_bytes() - before
    held = smi.held_bytes([rank.process.pid for rank in started])
    ranks.checked(started, 120)
    place.run(
        f"start, {name}",
        backend=backend,
        loopback_bytes=sent,
        base_bytes=base_bytes,
        held_bytes=held,
        losses=[line["loss"] for line in ranks.lines(run, 1, 0)],
    )
    place.figure(f"start_bytes_over_base_{_key(name)}", sent / base_bytes)
    if held:
        place.figure(f"rank_holds_bytes_{_key(name)}", max(held))
    material.remove(run, 3)


def _until(holds: Callable[[], bool], limit_s: float, started: list[ranks.Rank]) -> None:
    deadline = time.monotonic() + limit_s * ranks.patience()
    while not holds():
        if time.monotonic() > deadline or any(rank.process.poll() not in (None, 0) for rank in started):
            ranks.wait(started, 0)
            raise RuntimeError("the ranks did not get so far:\n" + "\n".join(rank.words(1500) for rank in started))
        time.sleep(0.05)


def _loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[8])


def _key(name: str) -> str:
    return re.sub(r"\W+", "_", name.replace("'", "")).strip("_").lower()


if __name__ == "__main__":
    print(json.dumps(planned(), indent=1))
