"""A task of dstack (docs/reference/dstack.yml/task of dstack 0.22)."""

from __future__ import annotations

import shlex

from homelab.controller.features.export import yaml_text
from homelab.controller.features.export.scheduled_job import MODULE, ScheduledJob
from homelab.controller.planning.types import LaunchDocument

FILE = "task.dstack.yml"
_SHARED_MEMORY = "8GB"  # NCCL exchanges there between the cards of a machine, and a container has 64 MB of it by itself
START = f"dstack apply -f {FILE}"


def document(job: ScheduledJob) -> LaunchDocument:
    """The task. Without an image dstack's own, with its Python, and the packages are installed at each start."""
    torchrun, worker = MODULE[:2], MODULE[2:]
    options = (
        f"--nnodes=$DSTACK_NODES_NUM --nproc-per-node={job.ranks_per_node} --node-rank=$DSTACK_NODE_RANK --max-restarts=0"
        f" --master-addr=$DSTACK_MASTER_NODE_IP --master-port={job.port}"
    )
    install = [] if job.image else [f"{shlex.quote(job.python)} -m pip install -q -r {shlex.quote(job.at + '/requirements.txt')}"]
    gpu = {"count": job.ranks_per_node, "memory": f"{job.vram_gb:g}GB.."} if job.vram_gb else None
    content = {
        "type": "task",
        "name": job.name,
        **({"nodes": job.nodes} if job.nodes > 1 else {}),
        **({"image": job.image} if job.image else {"python": "3.12"}),
        "env": [*(f"{name}={value}" for name, value in sorted(job.variables.items())), *(["HF_TOKEN"] if job.needs_token else [])],
        "commands": [*install, f"exec {shlex.quote(job.python)} {' '.join(torchrun)} {options} {' '.join(worker)}"],
        "resources": {**({"gpu": gpu} if gpu else {}), "shm_size": _SHARED_MEMORY},
        "volumes": [f"{job.volume}:{job.at}"],
        "retry": {"on_events": ["no-capacity", "interruption", "error"], "duration": "1d"},
        **({"max_duration": f"{job.hours}h"} if job.hours else {}),
    }
    return LaunchDocument(file_name=FILE, text=yaml_text.text(content, job.comments(START)))
