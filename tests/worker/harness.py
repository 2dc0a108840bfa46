"""A tiny random model and real torchrun processes: what the tests of the worker run on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from homelab.shared.law.pipeline_schedule import most_in_flight
from homelab.shared.protocol import row_forms
from homelab.shared.recipe import Objective
from homelab.shared.recipe.data import Data
from homelab.shared.recipe.training import Train
from homelab.worker.runtime.task import Task
from scripts.practice.tiny_model import chat_rows, tiny_llama, write_jsonl

__all__ = ["chat_rows", "tiny_llama", "write_jsonl"]  # the tests of the worker find all they need here
REPOSITORY = Path(__file__).resolve().parents[2]


def source(path: Path) -> dict[str, Any]:
    """A file as run.json names it."""
    return {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "kind": "file"}


def resolved_recipe(**changes: Any) -> dict[str, Any]:
    """A whole resolved recipe. `changes` are its keys, as section__key=value."""
    recipe: dict[str, Any] = {
        "model": {"name": "/models/tiny", "revision": None},
        "data": {
            "train": "chats.jsonl", "eval": None, "eval_fraction": 0.0, "format": "auto", "completion_only": True,
            "packing": False, "split": "train", "text_column": "text",
        },
        "method": {
            "kind": "full", "rank": 4, "alpha": 8, "dropout": 0.0, "targets": "all-linear", "backend": "auto", "base": "auto", "model_dropout": False,
        },
        "train": {
            "global_batch": 12, "epochs": 2, "steps": None, "learning_rate": 1e-3, "warmup_steps": 1, "schedule": "cosine",
            "seq_len": 256, "seed": 42, "weight_decay": 0.01, "max_grad_norm": 0.5, "optimizer": "adamw", "precision": "fp32",
            "gradient_checkpointing": False, "fused_loss": False, "lr_scale": "none", "reference_batch": None, "keep_best": False,
            "early_stopping": 0,
        },
        "parallel": {"strategy": "auto", "shares": "auto", "micro_batch": "auto", "compress": "none", "bucket_mb": "auto", "port": 29500},
        "checkpoint": {"every_steps": 2, "keep": 100, "keep_every": None},
        "recovery": {"max_restarts": 5, "min_nodes": 1},
        "tracking": {"tensorboard": False, "eval_every_steps": 0},
        "script": None,
    }  # fmt: skip
    for kind in (Data, Train):  # a launch writes all keys
        given = {field.name: field.default for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING}
        recipe[kind.__name__.lower()] = {**given, **recipe[kind.__name__.lower()]}
    for name, value in changes.items():
        section, key = name.split("__")
        if section == "objective":  # left out where nothing of it is named
            recipe.setdefault(section, dataclasses.asdict(Objective("dpo")))
            recipe["data"]["format"] = Objective(changes["objective__kind"]).format
        assert key in recipe[section], name
        recipe[section][key] = value
    return recipe


def task_of(run_dir: Path, nodes: Sequence[str] = ("here",), *, rank: int = 0, plan: dict[str, Any] | None = None, **changes: Any) -> Task:
    """The task of one rank without any file; `changes` as in `resolved_recipe`. `plan` replaces keys of the plan."""
    ranks = [{"rank": number, "node": node, "share": 12} for number, node in enumerate(nodes)]
    whole = {
        "world_size": len(nodes),
        "backend": "gloo",
        "device": "cpu",
        "precision": "fp32",
        "resume_step": 0,
        "strategy": "ddp",
        "ranks": ranks,
        **(plan or {}),
    }
    run = {
        "name": run_dir.name,
        "recipe": resolved_recipe(**changes),
        "recipe_hash": "r1",
        "draws": 2,
        "experts_in_4_bits": True,
        "moment": "2026-11-26T12:00:00+00:00",
        "data": {"train": {"path": "/d/chats.jsonl", "kind": "file"}, "eval": None},
    }
    return Task(run_dir, 1, nodes[rank], rank, 0, len(nodes), run, whole)


def make_run(folder: Path, model: Path, data: Path, *, eval_data: Path | None = None, **changes: Any) -> Path:
    """A run folder with run.json. `changes` are keys of the recipe, as section__key=value."""
    recipe = resolved_recipe(**{"model__name": str(model), "data__train": data.name, **changes})
    law = {name: recipe[name] for name in ("model", "data", "method", "train")}
    sources = {"train": source(data), "eval": source(eval_data) if eval_data else None}
    digest = hashlib.sha256(json.dumps([law, sources], sort_keys=True).encode()).hexdigest()[:16]
    folder.mkdir(parents=True)
    run = {
        "schema": 1,
        "name": folder.name,
        "moment": "2026-11-26T12:00:00+00:00",
        "rows": row_forms.RULES,
        "draws": 2,
        "experts_in_4_bits": True,
        "recipe": recipe,
        "recipe_hash": digest,
        "data": sources,
        "versions": {},
    }
    (folder / "run.json").write_text(json.dumps(run, indent=2))
    return folder


def make_plan(
    run: Path,
    attempt: int,
    shares: Sequence[int],
    *,
    micro_batch: int | Sequence[int] = 2,
    resume_step: int = 0,
    precision: str = "fp32",
    nodes: Sequence[str] | None = None,
    measured: bool = False,
    token_caps: Sequence[int | None] | None = None,
    switches: dict[str, bool] | None = None,
    strategy: str = "ddp",
    stages: Sequence[int] | None = None,
    stage_order: Sequence[int] | None = None,
    streaming: Sequence[dict[str, Any] | None] | None = None,
) -> None:
    """attempts/<n>/plan.json with one rank per share, all on the node "here", or each on its own of `nodes` (those of a node together).

    `stages`: a pipeline with so many layers on each stage, rank `stage_order[s]` being stage s (default: rank s); `shares` is then the batch
    on the first of them and 0 on the others.

    `streaming`: which layers of each rank come from its host, as a plan says it.

    `measured`: the shares are only where it starts, and the ranks' speeds are measured. Nodes but the first get run folders of their
    own (`folder_of`), with the checkpoint of `resume_step`, as they would have on disks of their own.
    """
    sizes = [micro_batch] * len(shares) if isinstance(micro_batch, int) else list(micro_batch)
    places = list(nodes or ["here"] * len(shares))
    caps = list(token_caps or [None] * len(shares))
    plan = {
        "world_size": len(shares),
        "backend": "gloo",
        "device": "cpu",
        "precision": precision,
        "attempt": attempt,
        "resume_step": resume_step,
        "ranks": [
            {
                "rank": rank, "node": places[rank], "local_rank": places[:rank].count(places[rank]), "device_name": "CPU",
                "share": share, "micro_batch": sizes[rank], "token_cap": caps[rank], "speed": None,
            }
            for rank, share in enumerate(shares)
        ],
        "nodes": list(dict.fromkeys(places)),
        "balance": "measured" if measured else "fixed",
        "switches": switches or {},
        "strategy": strategy,
    }  # fmt: skip
    if stages:
        plan["strategy"] = "pipeline"
        begin = 0
        for number, (rank, layers) in enumerate(zip(stage_order or range(len(stages)), stages, strict=True)):
            flight = most_in_flight(number, len(stages))
            plan["ranks"][rank]["stage"] = {  # type: ignore[index]
                "number": number, "begin": begin, "end": begin + layers, "layers": sum(stages), "work": layers / sum(stages), "in_flight": flight,
            }  # fmt: skip
            begin += layers
    for rank, its in enumerate(streaming or ()):
        plan["ranks"][rank]["streaming"] = its  # type: ignore[index]
    for node in dict.fromkeys(places):
        own = folder_of(run, node, places)
        folder = own / "attempts" / str(attempt)
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(plan))
        if own != run:
            shutil.copy(run / "run.json", own)
            if resume_step:
                name = f"checkpoints/step-{resume_step:08d}"
                shutil.copytree(run / name, own / name, dirs_exist_ok=True)


def folder_of(run: Path, node: str, places: Sequence[str]) -> Path:
    """The run folder on the disk of `node`; that of the first node is `run`."""
    return run if node == places[0] else run.parent / f"{run.name} on {node}"


def start_node(run: Path, attempt: int, places: Sequence[str], node: str, port: int) -> subprocess.Popen[str]:
    """torchrun as it is started on one of several nodes: its own number of processes, its own run folder."""
    names = list(dict.fromkeys(places))
    torchrun = [
        f"--nnodes={len(names)}", f"--nproc-per-node={places.count(node)}", f"--node-rank={names.index(node)}", "--max-restarts=0",
        "--rdzv-backend=static", f"--rdzv-id={run.name}-{attempt}", "--master-addr=127.0.0.1", f"--master-port={port}",
    ]  # fmt: skip
    return _popen(["-m", "torch.distributed.run", *torchrun], folder_of(run, node, places), attempt, node)


def free_port() -> int:
    """A port of loopback that nobody has bound just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def collect(run: Path, attempt: int, places: Sequence[str]) -> None:
    """Bring what the ranks of other nodes wrote into the run folder of the first one, where `lines` looks."""
    for node in dict.fromkeys(places):
        if (own := folder_of(run, node, places)) != run:
            shutil.copytree(own / "attempts" / str(attempt), run / "attempts" / str(attempt), dirs_exist_ok=True)


# What hangs is ended after it; HOMELAB_TESTS_PATIENCE: so many times as long.
LIMIT_S = 60 * float(os.environ.get("HOMELAB_TESTS_PATIENCE", "1"))
spent_s = 0.0  # CPU seconds of all ranks so far


class Forks:
    """Runs attempts as `train` does, without the seconds that importing torch takes: see forks.py."""

    def __init__(self) -> None:
        environment = outside() | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.worker.forks"], env=environment, cwd=REPOSITORY, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.cpu_s = 0.0

    def run(
        self, run: Path, attempt: int, shares: Sequence[int], *, timeout_s: float = LIMIT_S, after_failure_s: float = 15,
        prepare: Callable[[], object] = lambda: None, entry: str = "homelab.worker.training.train:main", **plan: Any,
    ) -> tuple[list[int], str]:  # fmt: skip
        """Plan and run one attempt; the ranks' exit codes and output. `prepare` comes in between; `entry` ("module:function") is what ranks run.

        `after_failure_s` is what the others get to end by themselves when one rank has failed.
        """
        make_plan(run, attempt, shares, **plan)
        prepare()
        places = list(plan.get("nodes") or ["here"] * len(shares))
        own = [
            worker_environment(folder_of(run, node, places), attempt, node)
            | {"FORKS_ENTRY": entry}
            | (
                {
                    "RANK": str(rank), "WORLD_SIZE": str(len(shares)), "LOCAL_RANK": str(places[:rank].count(node)),
                    "LOCAL_WORLD_SIZE": str(places.count(node)),
                }
                if len(shares) > 1
                else {}
            )
            for rank, node in enumerate(places)
        ]  # fmt: skip
        output = run / "attempts" / str(attempt) / "output.txt"
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(
            json.dumps({"ranks": own, "output": str(output), "timeout_s": timeout_s, "after_failure_s": after_failure_s}) + "\n"
        )
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        global spent_s
        spent_s += answer["cpu_s"] - self.cpu_s
        codes, self.cpu_s = answer["codes"], answer["cpu_s"]
        collect(run, attempt, places)
        return codes, output.read_text() if output.exists() else ""

    def train(self, run: Path, attempt: int, shares: Sequence[int], **plan: Any) -> str:
        """`run`, which must end well on every rank; the output."""
        codes, output = self.run(run, attempt, shares, **plan)
        assert not any(codes), f"{codes}\n{output}"
        return output

    def killed(self, run: Path, attempt: int, shares: Sequence[int], *, rank: int, step: int, **plan: Any) -> str:
        """As `run`, and a rank gets kill -9 as soon as its heartbeat says that `step` is done; the output. Fails the test where that rank ends otherwise."""
        killer = threading.Thread(target=kill_when, args=(run, attempt), kwargs={"rank": rank, "step": step})
        codes, output = self.run(run, attempt, shares, prepare=killer.start, **plan)
        killer.join()
        assert codes[rank] == -signal.SIGKILL and all(codes), f"{codes}\n{output}"
        return output

    def close(self) -> None:
        """End the parent. Every run has been waited for, so it is alone."""
        self.process.communicate()


def worker_environment(run: Path, attempt: int, node: str) -> dict[str, str]:
    """What the agent tells a worker."""
    return {
        "HOMELAB_RUN_DIR": str(run),
        "HOMELAB_ATTEMPT": str(attempt),
        "HOMELAB_NODE": node,
        "HOMELAB_DDP_TIMEOUT_S": "30",
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
    }


def outside() -> dict[str, str]:
    """This process's environment without what a worker reads."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("HOMELAB_", "RANK", "WORLD_SIZE"))}


def start(run: Path, attempt: int, processes: int, **environment: str) -> subprocess.Popen[str]:
    """Start the attempt for real: torchrun for several processes, plain python for one."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--max-restarts=0"]
    return _popen(torchrun if processes > 1 else [], run, attempt, "here", **environment)


def _popen(torchrun: list[str], run: Path, attempt: int, node: str, **environment: str) -> subprocess.Popen[str]:
    own = worker_environment(run, attempt, node) | environment
    return subprocess.Popen(
        [sys.executable, *torchrun, "-m", "homelab.worker"], env=outside() | own, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen[str], *, timeout_s: float = 100) -> tuple[int, str]:
    """(exit code, output). A process that does not end in time is killed with its group, and the test fails."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"the worker did not end within {timeout_s} s:\n{output}") from None
    return process.returncode, output


def kill_when(run: Path, attempt: int, *, rank: int, step: int) -> None:
    """kill -9 a rank as soon as its heartbeat says that `step` is done."""
    beat = run / "attempts" / str(attempt) / "ranks" / str(rank) / "heartbeat.json"

    def reached() -> bool:
        return beat.exists() and (heartbeat := json.loads(beat.read_text()))["step"] >= step and heartbeat["phase"] == "training"

    wait_for(reached, timeout_s=90)
    os.kill(json.loads(beat.read_text())["pid"], signal.SIGKILL)


def wait_for(condition: Callable[[], bool], *, timeout_s: float) -> None:
    """Wait until `condition()` holds; fails the test when it does not in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.02)


def lines(run: Path, attempt: int, rank: int, file: str, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a rank's JSONL file, of one kind."""
    path = run / "attempts" / str(attempt) / "ranks" / str(rank) / file
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if kind is None or row["kind"] == kind]


def losses(run: Path, attempt: int, rank: int = 0) -> dict[int, float]:
    """Step -> logged global loss."""
    return {line["step"]: line["loss"] for line in lines(run, attempt, rank, "metrics.jsonl", "train")}


def error_of(run: Path, attempt: int, rank: int = 0) -> dict[str, str]:
    """Why this rank ended, as it wrote it down for the agent."""
    return dict(json.loads((run / f"attempts/{attempt}/ranks/{rank}/error.json").read_text()))


def weights(run: Path, step: int) -> dict[str, Any]:
    """The trained tensors of a checkpoint."""
    from safetensors.torch import load_file

    return load_file(str(run / "checkpoints" / f"step-{step:08d}" / "trainable.safetensors"))


def adapter_settings(run_dir: Path) -> dict[str, Any]:
    """adapter_config.json of final/, with lists in one order: what another program reads, and puts adapters where it says."""
    settings = json.loads((run_dir / "final" / "adapter_config.json").read_text())
    return {key: sorted(value) if isinstance(value, list) else value for key, value in settings.items()}


def relative_error(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Largest |found - expected| / |expected| over the tensors (Euclidean norms)."""
    assert set(found) == set(expected)
    worst = 0.0
    for name in expected:
        size = float(expected[name].double().norm())
        worst = max(worst, float((found[name].double() - expected[name].double()).norm()) / max(size, 1e-12))
    return worst


def whole_error(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """|found - expected| / |expected| of all tensors as one vector."""
    assert set(found) == set(expected)
    apart = sum(float((found[name].double() - expected[name].double()).norm()) ** 2 for name in expected)
    size = sum(float(expected[name].double().norm()) ** 2 for name in expected)
    return float((apart / size) ** 0.5)


def first_gradient(run: Path) -> dict[str, Any]:
    """The clipped gradient of step 1 up to a factor: Adam's first moment in the checkpoint after it. Parameters by number."""
    import torch

    optimizer = torch.load(run / "checkpoints" / "step-00000001" / "optimizer.pt")
    return {str(number): state["exp_avg"] for number, state in optimizer["state"].items()}


def samples(run: Path, attempt: int, ranks: int) -> dict[int, list[int]]:
    """Step -> the data rows that were trained in it, over all ranks, sorted: a row that was trained twice stands there twice."""
    found: dict[int, list[int]] = {}
    for rank in range(ranks):
        for line in lines(run, attempt, rank, "samples.jsonl"):
            found.setdefault(line["step"], []).extend(line["ids"])
    return {step: sorted(ids) for step, ids in sorted(found.items())}
