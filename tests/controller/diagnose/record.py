"""Record how torchrun really fails: three nodes on 127.0.0.1, one is hurt, and what is left behind becomes test data.

    python tests/controller/diagnose/record.py [SCENARIO ...]          (needs root, for a host name of its own per node)

Each scenario starts three torchruns (tower with two ranks, mini and laptop with one each) of a small gloo program, and
writes `data/<scenario>.json`: the agents' replies as `homelab.controller.remote.poll_reply` reads them. Only paths are changed, to those
of a real node.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"
NODES = {"tower": (0, 1), "mini": (2,), "laptop": (3,)}  # node -> its ranks
HURT_RANK = 2
SITE = "/home/me/.homelab/env"
RUN_DIR = "/home/me/homelab/runs/2026-11-21-1405-practice"
TAIL_LINES = 80

WORKER = r"""
import json, os, socket, sys, time
from datetime import timedelta
from pathlib import Path

scenario, hurt_rank = sys.argv[1], int(sys.argv[2])
rank = int(os.environ["RANK"])
hurt = rank == hurt_rank

if scenario == "missing_package" and hurt:
    import flash_attention_of_yesterday

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


def heartbeat(phase, step):
    path = Path("heartbeats") / f"{rank}.json"
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"time": time.time(), "rank": rank, "pid": os.getpid(), "phase": phase,
                                  "step": step, "total_steps": 1000}))
    os.replace(beside, path)


def hurt_now():
    if scenario == "python_error" or scenario == "python_error_recorded":
        rows = {"prompt": "hello"}
        rows["completion"]
    elif scenario == "exit_3":
        sys.exit(3)
    elif scenario == "memory_error":
        raise MemoryError()
    elif scenario == "host_allocation":
        torch.empty(1 << 50, dtype=torch.uint8)
    elif scenario == "segfault":
        import ctypes
        ctypes.string_at(0)
    elif scenario == "disk_full":
        with open("/dev/full", "w") as file:
            file.write("checkpoint")
    elif scenario == "permission":
        os.setuid(65534)
        open("/etc/shadow").read()
    elif scenario == "timeout":
        time.sleep(3600)
    elif scenario == "nan":
        raise FloatingPointError("loss is NaN at step 5")
    elif scenario == "missing_file":
        open("data/train.jsonl").read()


def main():
    heartbeat("starting", 0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    x = torch.ones(1000)
    for step in range(1000):
        if step == 5 and hurt:
            hurt_now()
        heartbeat("training", step)
        print(f"step {step}", flush=True)
        dist.all_reduce(x)
        x /= dist.get_world_size()
        time.sleep(0.05)


if scenario == "python_error":
    main()
else:
    record(main)()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def lines(path: Path, scratch: Path) -> list[str]:
    """The end of a log, with the paths of a real node."""
    if not path.exists():
        return []
    text = path.read_text(errors="replace").replace(sys.prefix, SITE).replace(str(scratch), RUN_DIR)
    return text.splitlines()[-TAIL_LINES:]


def reply_of(node: str, scratch: Path, process: subprocess.Popen[bytes], ended_at: float, started_at: float) -> dict[str, Any]:
    ranks: dict[str, Any] = {}
    for local_rank, rank in enumerate(NODES[node]):
        logs = sorted((scratch / node / "logs").glob(f"*/attempt_0/{local_rank}")) or [scratch / "nothing"]
        heartbeat = scratch / "heartbeats" / f"{rank}.json"
        ranks[str(rank)] = {
            "heartbeat": json.loads(heartbeat.read_text()) if heartbeat.exists() else None,
            "metrics": [],
            "log_tail": {name: lines(logs[-1] / f"{name}.log", scratch) for name in ("stdout", "stderr")},
            "error": None,
        }
    alive = process.returncode is None
    code = process.returncode
    exit_json = (
        None
        if alive
        else {"returncode": code if code >= 0 else None, "signal": -code if code < 0 else None, "ended_at": ended_at, "stopped": False}
    )
    return {
        "node": node,
        "time": time.time(),
        "hostname": node,
        "load": {"cpu_percent": 12.0, "memory_used_bytes": 6 << 30, "memory_total_bytes": 32 << 30},
        "gpus": [],
        "run": {
            "name": Path(RUN_DIR).name,
            "attempt": 1,
            "agent_alive": alive,
            "torchrun_alive": alive,
            "exit": exit_json,
            "started_at": started_at,
            "ranks": ranks,
            "torchrun_tail": lines(scratch / node / "err.log", scratch),
            "checkpoints": [],
            "final": False,
        },
    }


def start(node: str, node_rank: int, scenario: str, port: int, scratch: Path) -> subprocess.Popen[bytes]:
    """One node's torchrun, in a UTS namespace of its own, so that its messages carry the node's own name."""
    folder = scratch / node
    (folder / "logs").mkdir(parents=True)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "3",
        "--nproc-per-node",
        str(len(NODES[node])),
        "--node-rank",
        str(node_rank),
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        str(port),
        "--max-restarts",
        "0",
        "--log-dir",
        str(folder / "logs"),
        "--redirects",
        "3",
        "worker.py",
        scenario,
        str(HURT_RANK),
    ]
    shell = f"hostname {shlex.quote(node)} && exec {shlex.join(command)}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONUNBUFFERED": "1"}
    with open(folder / "out.log", "wb") as out, open(folder / "err.log", "wb") as err:
        return subprocess.Popen(["unshare", "--uts", "sh", "-c", shell], cwd=scratch, env=environment, stdout=out, stderr=err)


def until(seen: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not seen():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.05)


def step_of(scratch: Path, rank: int) -> int:
    path = scratch / "heartbeats" / f"{rank}.json"
    return int(json.loads(path.read_text())["step"]) if path.exists() else -1


def record(scenario: str) -> None:
    with tempfile.TemporaryDirectory(prefix="practice-") as folder:
        scratch = Path(folder)
        (scratch / "heartbeats").mkdir()
        os.chmod(scratch, 0o777)
        (scratch / "worker.py").write_text(WORKER)
        port = free_port()
        stranger = None
        if scenario == "port_in_use":
            stranger = socket.create_server(("127.0.0.1", port))
        started_at = time.time()
        chosen = [node for node in NODES if not (scenario == "head_missing" and node == "tower")]
        processes = {node: start(node, i, scenario, port, scratch) for i, node in enumerate(NODES) if node in chosen}
        ended: dict[str, float] = {}
        try:
            if scenario in ("kill_9", "stop_torchrun"):
                until(lambda: step_of(scratch, HURT_RANK) >= 10, 60)
            if scenario == "kill_9":
                os.kill(json.loads((scratch / f"heartbeats/{HURT_RANK}.json").read_text())["pid"], signal.SIGKILL)
            if scenario == "stop_torchrun":
                processes["mini"].terminate()
            deadline = time.monotonic() + (30 if scenario in ("port_in_use", "head_missing") else 90)
            while len(ended) < len(processes) and time.monotonic() < deadline:
                for node, process in processes.items():
                    if node not in ended and process.poll() is not None:
                        ended[node] = time.time()
                if scenario == "timeout" and len(ended) == 2:
                    break
                time.sleep(0.05)
            replies = {node: reply_of(node, scratch, process, ended.get(node, 0.0), started_at) for node, process in processes.items()}
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.terminate()
                process.wait()
            if stranger is not None:
                stranger.close()
        unreachable = {node: "no route to host" for node in NODES if node not in chosen}
        case = {"scenario": scenario, "replies": replies, "unreachable": unreachable}
        (DATA / f"{scenario}.json").write_text(json.dumps(case, indent=1) + "\n")
        print(scenario, {node: process.returncode for node, process in processes.items()}, flush=True)


SCENARIOS = (
    "kill_9",
    "python_error",
    "python_error_recorded",
    "exit_3",
    "memory_error",
    "host_allocation",
    "segfault",
    "disk_full",
    "permission",
    "timeout",
    "nan",
    "missing_package",
    "missing_file",
    "port_in_use",
    "head_missing",
    "stop_torchrun",
)

if __name__ == "__main__":
    for name in sys.argv[1:] or SCENARIOS:
        record(name)
