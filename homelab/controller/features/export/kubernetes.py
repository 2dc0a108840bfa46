"""The same training for Kubeflow: a TrainJob (trainer.kubeflow.org/v1alpha1) or a PyTorchJob (kubeflow.org/v1).

Sources: kubeflow/trainer, pkg/apis/trainer/v1alpha1/trainjob_types.go and constants.go (2.3); kubeflow/training-operator, pkg/apis/kubeflow.org/v1
and pkg/controller.v1/pytorch/envvar.go (1.9). Both tell torchrun the machines by PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and their like.
"""

from __future__ import annotations

from homelab.controller.features.export import yaml_text
from homelab.controller.features.export.scheduled_job import MODULE, MOST_RETRIES, SECRETS, ScheduledJob
from homelab.controller.planning.types import LaunchDocument

TRAINJOB, PYTORCHJOB = "trainjob.yaml", "pytorchjob.yaml"
_VOLUME = "job"
# A container has 64 MB of it by itself, and NCCL exchanges between the cards of a pod there.
_SHARED_MEMORY = "shared-memory"


def trainjob(job: ScheduledJob) -> LaunchDocument:
    """A TrainJob on the runtime torch-distributed, which says how often a failed job starts again. Its own image has torch alone: the job needs one."""
    pod = {"containers": [{"name": "node", "volumeMounts": _mounts(job)}], "volumes": _volumes(job)}
    template = {"spec": {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": pod}}}}]}}
    content = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            **({"activeDeadlineSeconds": job.hours * 3600} if job.hours else {}),
            "runtimeRef": {"name": "torch-distributed"},
            "runtimePatches": [{"manager": "homelab.export/folder", "trainingRuntimeSpec": {"template": template}}],
            "trainer": {
                "image": job.image,
                "command": [job.python, *MODULE],
                "env": _environment(job),
                "numNodes": job.nodes,
                "numProcPerNode": job.ranks_per_node,
                **({"resourcesPerNode": _resources(job)} if job.vram_gb else {}),
            },
        },
    }
    return LaunchDocument(file_name=TRAINJOB, text=yaml_text.text(content, job.comments(f"kubectl apply -f {TRAINJOB}")))


def pytorchjob(job: ScheduledJob) -> LaunchDocument:
    """A PyTorchJob. The job needs an image (`Job.image`)."""
    container = {
        "name": "pytorch",  # the operator looks for this name
        "image": job.image,
        "command": [job.python, *MODULE],
        "env": _environment(job),
        **({"resources": _resources(job)} if job.vram_gb else {}),
        "volumeMounts": _mounts(job),
    }
    template = {"spec": {"containers": [container], "volumes": _volumes(job)}}
    replica = {"restartPolicy": "OnFailure", "template": template}
    workers = {"Worker": {"replicas": job.nodes - 1, **replica}} if job.nodes > 1 else {}
    content = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {
            "nprocPerNode": str(job.ranks_per_node),
            "runPolicy": {
                "backoffLimit": MOST_RETRIES * job.nodes,  # each pod that starts again counts
                "cleanPodPolicy": "Running",
                **({"activeDeadlineSeconds": job.hours * 3600} if job.hours else {}),
            },
            "pytorchReplicaSpecs": {"Master": {"replicas": 1, **replica}, **workers},
        },
    }
    return LaunchDocument(
        file_name=PYTORCHJOB, text=yaml_text.text(_without_aliases(content), job.comments(f"kubectl apply -f {PYTORCHJOB}"))
    )


def _without_aliases(content: object) -> object:
    """The same value in which nothing stands twice: YAML would write the second one as a reference to the first."""
    import copy

    if isinstance(content, dict):
        return {key: _without_aliases(value) for key, value in content.items()}
    return [_without_aliases(value) for value in content] if isinstance(content, list) else copy.copy(content)


def _environment(job: ScheduledJob) -> list[dict[str, object]]:
    token: dict[str, object] = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": SECRETS, "key": "HF_TOKEN", "optional": True}}}
    return [*yaml_text.named_values(job.variables), *([token] if job.needs_token else [])]


def _resources(job: ScheduledJob) -> dict[str, object]:
    return {"limits": {"nvidia.com/gpu": str(job.ranks_per_node)}}


def _mounts(job: ScheduledJob) -> list[dict[str, object]]:
    return [{"name": _VOLUME, "mountPath": job.at}, {"name": _SHARED_MEMORY, "mountPath": "/dev/shm"}]


def _volumes(job: ScheduledJob) -> list[dict[str, object]]:
    return [
        {"name": _VOLUME, "persistentVolumeClaim": {"claimName": job.volume}},
        {"name": _SHARED_MEMORY, "emptyDir": {"medium": "Memory"}},
    ]
