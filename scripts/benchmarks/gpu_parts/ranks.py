"""Starts the ranks of an attempt without torchrun, each as if it were alone on its machine, and reads how they end."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts.environment import python_path
from benchmarks.gpu_parts.material import folder_of, node_of

# What a plan sets for every rank on CUDA (homelab/controller/planning/environment/cuda.py), as far as it changes how much memory torch reserves.
ALLOCATOR_OF_RUNS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}


@dataclass
class Rank:
    """A process that was started, and how it ended; `seconds` since `ends_since`."""

    process: subprocess.Popen[Any]
    output: Path
    code: int | None = None
    seconds: float | None = None

    def words(self, most: int = 3000) -> str:
        """The end of what it printed."""
        return self.output.read_text(errors="replace")[-most:]

    def last_line(self, pattern: str) -> str:
        """The last line that is all of `pattern`: libraries print warnings before and after it. RuntimeError where there is none."""
        lines = re.findall(f"^{pattern}$", self.words(10**6), re.MULTILINE)
        if not lines:
            raise RuntimeError(f"it printed no line like {pattern}:\n{self.words()}")
        return str(lines[-1])


def start(program: Sequence[str], output: Path, environment: Mapping[str, str] | None = None) -> Rank:
    """`python PROGRAM`, with what it prints in a file."""
    output.parent.mkdir(parents=True, exist_ok=True)
    variables = {
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    with output.open("w") as stream:
        process = subprocess.Popen(
            [sys.executable, *program],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables, **(environment or {})},
        )
    return Rank(process, output)


def group(
    size: int, program: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None, own: Sequence[Mapping[str, str]] = ()
) -> list[Rank]:
    """`size` ranks of one program that meet on loopback. Each is a host of its own for NCCL, or it would refuse two ranks on one card:
    what it compares is a hash of NCCL_HOSTID (NCCL src/misc/utils.cc, getHostHash) beside the card's bus."""
    port = str(free_port())
    started = []
    for rank in range(size):
        variables = {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo", "NCCL_IB_DISABLE": "1", "NCCL_HOSTID": f"rank-{rank}",
        }  # fmt: skip
        started.append(start(program, folder / f"rank-{rank}.txt", variables | dict(environment or {}) | (dict(own[rank]) if own else {})))
    return started


def worker(
    run: Path, attempt: int, size: int, environment: Mapping[str, str] | None = None, program: Sequence[str] = ("-m", "homelab.worker"), per_node: int = 1
) -> list[Rank]:  # fmt: skip
    """The ranks of an attempt whose plan is written, `per_node` of them on a node."""
    variables = {"HOMELAB_ATTEMPT": str(attempt), "HOMELAB_DDP_TIMEOUT_S": "60"} | dict(environment or {})
    own = [{"HOMELAB_RUN_DIR": str(folder_of(run, rank)), "HOMELAB_NODE": node_of(rank, per_node)} for rank in range(size)]
    if size == 1:
        return [start(program, run / f"attempt-{attempt}" / "rank-0.txt", variables | own[0])]
    return group(size, program, run / f"attempt-{attempt}", variables, own)


def wait(ranks: Sequence[Rank], limit_s: float, since: float | None = None) -> bool:
    """Wait until all have ended; what has not after `limit_s` is killed. True when all ended well. `since`: what their seconds count from."""
    since = time.monotonic() if since is None else since
    deadline = time.monotonic() + limit_s * patience()
    while any(rank.code is None for rank in ranks) and time.monotonic() < deadline:
        for rank in ranks:
            if rank.code is None and (code := rank.process.poll()) is not None:
                rank.code, rank.seconds = code, time.monotonic() - since
        time.sleep(0.01)
    for rank in ranks:
        if rank.code is None:
            rank.process.kill()
            rank.process.wait()
    return all(rank.code == 0 for rank in ranks)


def checked(ranks: Sequence[Rank], limit_s: float) -> None:
    """`wait`, and RuntimeError with the words of the one that failed first: others then wait for it until they are killed."""
    if not wait(ranks, limit_s):
        bad = min((rank for rank in ranks if rank.code != 0), key=lambda rank: float("inf") if rank.seconds is None else rank.seconds)
        raise RuntimeError(f"a rank ended with {bad.code} after {bad.seconds} s:\n{bad.words()}")


def lines(run: Path, attempt: int, rank: int, kind: str = "train") -> list[dict[str, Any]]:
    """What a rank wrote into metrics.jsonl, of one kind."""
    file = folder_of(run, rank) / "attempts" / str(attempt) / "ranks" / str(rank) / "metrics.jsonl"
    entries = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [line for line in entries if line["kind"] == kind]


def patience() -> float:
    """How much longer than on a card everything may take: on a CPU, which others use too, only the parts' plumbing is looked at."""
    return float(os.environ.get("BENCH_PATIENCE", "1"))


def free_port() -> int:
    """A port of loopback that nobody has bound just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
