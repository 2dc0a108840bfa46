"""An exported job on a real Slurm: the loss of `homelab launch`, and on from the checkpoint after a kill."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from homelab.cli.main import run
from homelab.lab import Lab
from scripts.practice.desk import Desk
from tests.controller.launchers import slurm
from tests.controller.launchers.slurm import Slurm, until
from tests.e2e.conftest import LAW
from tests.lab.conftest import namespaces_missing
from tests.worker import harness

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not slurm.is_here() or bool(namespaces_missing()), reason="needs root, namespaces and Slurm (scripts/setup with HOMELAB_FLAWS=1)"
    ),
]
STEPS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of a tiny model and its data."""
    base = tmp_path_factory.mktemp("slurm")
    model = harness.tiny_llama(base / "tiny-llama")
    harness.write_jsonl(base / "chats.jsonl", harness.chat_rows(40))
    recipe = LAW.format(model=model, kind="lora", global_batch=12, length=f"steps = {STEPS}", learning_rate="1e-3")
    (base / "law.toml").write_text(recipe.replace("every_steps = 10", "every_steps = 4"))
    return base


@pytest.fixture(scope="module")
def losses(folder: Path) -> dict[int, float]:
    """Step -> loss of `homelab launch` on three nodes with shares 6:4:2."""
    with Lab.up(folder / "lab", nodes=3, backend="namespaces") as lab:
        desk = Desk(folder, lab)
        launched = desk.launch("law.toml")
        launched.wait_for_end(1, nodes=3)
        return launched.losses()


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[Slurm]:
    with Slurm(folder / "system") as system:
        yield system


def exported(folder: Path, name: str) -> tuple[Path, Path]:
    """The job's folder, and the run's in it."""
    job = folder / name
    cluster_file = folder / "three.toml"
    cluster_file.write_text("".join(f'[[nodes]]\nname = "n{number}"\nhost = "127.0.0.{number}"\n' for number in (1, 2, 3)))
    assert (
        run(
            [
                "export",
                str(folder / "law.toml"),
                "--to",
                "slurm",
                "--output",
                str(job),
                "--python",
                sys.executable,
                "--cluster",
                str(cluster_file),
            ]
        )
        == 0
    )
    (run_dir,) = (job / "runs").iterdir()
    return job, run_dir


def submit(cluster: Slurm, job: Path) -> str:
    return cluster.run(
        "sbatch", "--parsable", "job.sbatch", cwd=job, environment={"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ).strip()


def said(job: Path) -> str:
    return "\n".join(path.read_text(errors="replace")[-4000:] for path in job.glob("slurm-*.out"))


def logged(run_dir: Path) -> dict[int, float]:
    """Step -> loss, of the newest attempt that did the step."""
    found: dict[int, float] = {}
    for file in sorted(run_dir.glob("attempts/*/ranks/0/metrics.jsonl"), key=lambda path: int(path.parts[-4])):
        lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
        found |= {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}
    return found


def farthest(curve: dict[int, float], reference: dict[int, float]) -> float:
    """The largest difference of two curves of the same steps."""
    assert curve.keys() == reference.keys()
    return max(abs(curve[step] - reference[step]) for step in reference)


def test_the_exported_job_trains_to_the_loss_of_a_launch(cluster: Slurm, folder: Path, losses: dict[int, float]) -> None:
    job, run_dir = exported(folder, "job")
    assert re.search(r"Job \d+ to start at .* using 3 processors", cluster.run("sbatch", "--test-only", "job.sbatch", cwd=job))
    number = submit(cluster, job)
    until(lambda: cluster.state(number)["JobState"] not in ("PENDING", "RUNNING", "COMPLETING"), 300, lambda: said(job))
    assert cluster.state(number)["JobState"] == "COMPLETED", said(job)
    assert farthest(logged(run_dir), losses) < 1e-5 and len(losses) == STEPS
    assert (run_dir / "final/adapter_model.safetensors").is_file() and (run_dir / "final/README.md").is_file()
    assert {path.name for path in run_dir.glob("attempts/1/ranks/*")} == {"0", "1", "2"}


def test_after_a_kill_it_goes_on_from_the_checkpoint(cluster: Slurm, folder: Path, losses: dict[int, float]) -> None:
    job, run_dir = exported(folder, "killed")
    number = submit(cluster, job)
    until(lambda: (run_dir / "checkpoints/step-00000004").is_dir() and max(logged(run_dir), default=0) >= 6, 200, lambda: said(job))
    heartbeat = json.loads((run_dir / "attempts/1/ranks/1/heartbeat.json").read_text())
    os.kill(_outside(heartbeat["pid"], str(job)), signal.SIGKILL)
    until(lambda: cluster.state(number).get("Restarts") == "1", 90, lambda: said(job))
    until(lambda: _is_over(cluster, number), 200, lambda: f"{cluster.state(number)}\n{said(job)}")
    assert cluster.state(number)["JobState"] == "COMPLETED", said(job)
    second = json.loads((run_dir / "attempts/2/plan.json").read_text())
    assert second["resume_step"] >= 4 and not (run_dir / "attempts/3").exists()
    assert farthest(logged(run_dir), losses) < 1e-5 and len(logged(run_dir)) == STEPS
    assert f"attempt 2, from the checkpoint of step {second['resume_step']}" in said(job)


def _is_over(cluster: Slurm, number: str) -> bool:
    """Slurm waits two minutes before it starts a job again: not in a test."""
    state = cluster.state(number)
    if state["JobState"] == "PENDING" and state["Reason"] == "BeginTime":
        cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now", check=False)
    return state["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED")


def _outside(pid: int, job: str) -> int:
    """The number that a process of Slurm's namespace has here."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            numbers = next(line.split()[1:] for line in status.read_text().splitlines() if line.startswith("NSpid:"))
            if int(numbers[-1]) == pid and len(numbers) > 1 and job.encode() in (status.parent / "environ").read_bytes():
                return int(numbers[0])
        except (OSError, StopIteration):
            continue
    raise AssertionError(f"no process {pid} in there")
