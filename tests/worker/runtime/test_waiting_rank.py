"""Ranks that wait for the next attempt of a run with their imports done, and go on with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from homelab.shared.protocol import files, waiting_mark
from homelab.worker.runtime import waiting_rank
from tests.worker import harness
from tests.worker.training.test_law import TOLERANCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def waiting(run: Path, rank: int, **more: str) -> subprocess.Popen[bytes]:
    """A process that stands by for attempt 2, as its launcher starts it."""
    own = harness.worker_environment(run, 1, "here") | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    environment = harness.outside() | own | {waiting_mark.VARIABLE: "1", "OMP_DYNAMIC": "false", **more}
    return subprocess.Popen(
        [sys.executable, "-m", "homelab.worker"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def _score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def test_on_a_card_nothing_is_imported_that_asks_for_it(tmp_path: Path) -> None:
    task = harness.task_of(tmp_path)
    assert waiting_rank.names_of(task, takes_cards=True) == [], "nothing was written down yet"
    task.rank_dir.mkdir(parents=True)
    for written, found in (
        (["__main__", "torch", "bitsandbytes.nn", "peft.tuners.lora.bnb", "transformers.quantizers.quantizer_bnb_4bit", 5], ["torch"]), ("torch", []), (None, []),
    ):  # fmt: skip
        (task.rank_dir / "modules.json").write_text(json.dumps(written))
        assert waiting_rank.names_of(task, takes_cards=True) == found
    (task.rank_dir / "modules.json").write_text('["torch", "bitsandbytes"')
    assert waiting_rank.names_of(task, takes_cards=False) == []
    (task.rank_dir / "modules.json").write_text('["torch", "bitsandbytes"]')
    assert waiting_rank.names_of(task, takes_cards=False) == ["torch", "bitsandbytes"]


def test_those_that_wait_go_on_as_new_processes_would(forks: harness.Forks, tmp_path: Path, model: Path, data: Path) -> None:
    recipe: dict[str, Any] = {"method__kind": "lora", "train__epochs": 2}  # 4 steps per epoch
    undisturbed = harness.make_run(tmp_path / "undisturbed", model, data, **recipe)
    forks.train(undisturbed, 1, [12], micro_batch=4)
    run = harness.make_run(tmp_path / "run", model, data, **recipe)
    forks.killed(run, 1, [7, 5], rank=1, step=3)
    imported = json.loads((run / "attempts/1/ranks/0/modules.json").read_text())
    assert {"torch", "transformers.models.llama.modeling_llama", "homelab.worker.training.trainer"} <= set(imported)

    processes = [waiting(run, rank) for rank in (0, 1)]
    idle = waiting(run, 0)
    try:
        for process in (*processes, idle):
            harness.wait_for(lambda pid=process.pid: files.text(f"/proc/{pid}/comm") == waiting_mark.WAITS, timeout_s=120)
        assert "libtorch" in Path(f"/proc/{processes[0].pid}/maps").read_text(), "its imports are done"
        assert _score(processes[0].pid) == 1000, "where memory ends it goes first"
        held = sum(
            int(line.split()[1]) << 10
            for line in Path(f"/proc/{processes[0].pid}/smaps_rollup").read_text().splitlines()
            if "Private" in line
        )
        assert held < waiting_mark.RANK_BYTES, held
        idle.communicate(timeout=20)
        assert idle.returncode == 0, "its launcher is gone: nobody will ever need it"

        harness.make_plan(run, 2, [5, 7], resume_step=2)
        port = harness.free_port()
        for rank, process in enumerate(processes):
            environment = harness.outside() | harness.worker_environment(run, 2, "here") | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            said = {"environment": environment, "out": str(tmp_path / f"out-{rank}"), "err": str(tmp_path / f"err-{rank}")}
            assert process.stdin is not None
            process.stdin.write(json.dumps(said).encode() + b"\n")
            process.stdin.flush()
        harness.wait_for(lambda: files.text(f"/proc/{processes[0].pid}/comm") == waiting_mark.AT_WORK, timeout_s=60)
        assert _score(processes[0].pid) == _score(os.getpid()) < 1000, "and as a rank it is like any other"
        for rank, process in enumerate(processes):
            printed, _ = process.communicate(timeout=100)
            assert process.returncode == 0, (printed, (tmp_path / f"err-{rank}").read_text())
    finally:
        for process in (*processes, idle):
            process.kill()
            process.wait()
    assert harness.losses(run, 2) == pytest.approx(
        {step: loss for step, loss in harness.losses(undisturbed, 1).items() if step > 2}, rel=TOLERANCE
    )
    assert harness.relative_error(harness.weights(run, 8), harness.weights(undisturbed, 8)) < TOLERANCE
