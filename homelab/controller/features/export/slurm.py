"""A batch script for Slurm (sbatch(1), srun(1); tried with Slurm 22.05)."""

from __future__ import annotations

import math
import shlex

from homelab.controller.features.export.scheduled_job import MODULE, MOST_RETRIES, ScheduledJob
from homelab.controller.planning.types import LaunchDocument

_CPUS_OF_A_RANK = 4  # one computes for its card; others read data, and write checkpoints
_OTHER_MEMORY_GB = 8  # Python, CUDA and data, beside weights that pass through memory on their way to a card
FILE = "job.sbatch"
START = f"sbatch {FILE}"

# The machines are known when the job starts. Two jobs on one machine need two ports.
_HEAD = """\
HOMELAB_MASTER=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
HOMELAB_PORT=$((20000 + SLURM_JOB_ID % 20000))
export HOMELAB_MASTER HOMELAB_PORT
"""
# Slurm starts a job again by itself where a machine is lost; where a rank fails, the job has to ask for it.
_AGAIN = f"""\
code=$?
if [ "$code" -ne 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {MOST_RETRIES} ]; then
  echo "homelab: the ranks ended with $code; the job starts again, from its newest checkpoint"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def document(job: ScheduledJob) -> LaunchDocument:
    """The script for sbatch."""
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={job.name}",
        f"#SBATCH --nodes={job.nodes}",
        "#SBATCH --ntasks-per-node=1",
        *_size(job),
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=slurm-%j.out",
        *([f"#SBATCH --partition={job.partition}"] if job.partition else []),
        *([f"#SBATCH --time={job.hours}:00:00"] if job.hours else []),
        *job.comments(START),
        "",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(job.variables.items())),
    ]
    return LaunchDocument(file_name=FILE, text="\n".join(lines) + "\n" + _HEAD + _step(job) + _AGAIN)


def _size(job: ScheduledJob) -> list[str]:
    """What the job takes of each machine. Without these lines Slurm gives one CPU, and often little memory."""
    if job.vram_gb is None:
        return ["#SBATCH --exclusive", "#SBATCH --mem=0"]  # 0: all memory that the machine has
    memory_gb = job.ranks_per_node * (math.ceil(job.vram_gb) + _OTHER_MEMORY_GB)
    return [
        f"#SBATCH --gpus-per-node={job.ranks_per_node}",
        f"#SBATCH --cpus-per-task={job.ranks_per_node * _CPUS_OF_A_RANK}",
        f"#SBATCH --mem={memory_gb}G",
    ]


def _step(job: ScheduledJob) -> str:
    options = (
        f"--nnodes={job.nodes} --nproc-per-node={job.ranks_per_node} --node-rank=$SLURM_PROCID --max-restarts=0"
        ' --master-addr="$HOMELAB_MASTER" --master-port="$HOMELAB_PORT"'
    )
    torchrun, worker = MODULE[:2], MODULE[2:]
    command = f'exec "$0" {" ".join(torchrun)} {options} {" ".join(worker)}'
    return f"srun --kill-on-bad-exit=1 bash -c {shlex.quote(command)} {shlex.quote(job.python)}\n"
