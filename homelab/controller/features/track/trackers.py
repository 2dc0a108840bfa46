"""The trackers, each behind one small protocol. Their packages are imported here, in the forwarder's process on the controller, and nowhere else.

A tracker finds its key and its server as it always does (its own login file, its own environment variables): homelab has none of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from homelab.controller.features.track.points import TrackedPoint

PROJECT = "homelab"


@dataclass(frozen=True)
class TrackerJob:
    """What is sent where. `known_as`: the tracker's own name of the run, as the first opening gave it; empty before."""

    name: str
    known_as: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # the recipe's sections that decide the training


@dataclass(frozen=True)
class Sink:
    """An opened tracker. `send` and `close` raise whatever the tracker raises."""

    send: Callable[[TrackedPoint], object]
    close: Callable[[], object]
    known_as: str = ""


@dataclass(frozen=True)
class TrackerKind:
    """`requirement`: what pip is asked for. `login`: the command after which it takes the key. `look`: the command that shows its curves."""

    module: str
    requirement: str
    open: Callable[[TrackerJob], Sink]
    login: str
    look: str

    @property
    def package(self) -> tuple[str, str]:
        """The module, and what pip is asked for."""
        return self.module, self.requirement


def _trackio(job: TrackerJob) -> Sink:
    import trackio

    run = trackio.init(
        project=PROJECT, name=job.name, config=dict(job.settings), resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False
    )  # fmt: skip
    return Sink(lambda point: run.log(dict(point.values), step=point.step), trackio.finish)


def _wandb(job: TrackerJob) -> Sink:
    import wandb

    settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True)
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    run = wandb.init(
        project=project, id=job.name, name=job.name, config=dict(job.settings), resume="allow", save_code=False, settings=settings
    )
    run.define_metric("step")
    run.define_metric("*", step_metric="step")  # W&B's own step only ever grows
    return Sink(lambda point: run.log({"step": point.step, **point.values}), run.finish)


def _mlflow(job: TrackerJob) -> Sink:
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the forwarder itself tries again
    from mlflow import MlflowClient
    from mlflow.entities import Metric

    client, name = MlflowClient(), os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    known_as = job.known_as
    if not known_as:
        experiment = client.get_experiment_by_name(name)
        known_as = client.create_run(
            experiment.experiment_id if experiment else client.create_experiment(name), run_name=job.name
        ).info.run_id
        for key, value in job.settings.items():
            client.set_tag(known_as, f"recipe.{key}", str(value)[:5000])

    def send(point: TrackedPoint) -> None:
        client.log_batch(known_as, [Metric(tag, value, int(point.time * 1000), point.step) for tag, value in point.values.items()])

    return Sink(send, lambda: client.set_terminated(known_as), known_as)


def _aim(job: TrackerJob) -> Sink:
    from aim import Run

    run = Run(
        run_hash=job.known_as or None,
        experiment=PROJECT,
        system_tracking_interval=None,
        log_system_params=False,
        capture_terminal_logs=False,
    )
    run.name, run["recipe"] = job.name, dict(job.settings)

    def send(point: TrackedPoint) -> None:
        for tag, value in point.values.items():
            run.track(value, name=tag, step=point.step)

    return Sink(send, run.close, str(run.hash))


def _swanlab(job: TrackerJob) -> Sink:
    import swanlab

    known_as = job.known_as or hashlib.sha256(f"{job.name}{os.urandom(8).hex()}".encode()).hexdigest()[:21]
    swanlab.init(project=PROJECT, name=job.name, id=known_as, resume="allow", config=dict(job.settings))
    return Sink(lambda point: swanlab.log(dict(point.values), step=point.step), swanlab.finish, known_as)


TRACKERS: Mapping[str, TrackerKind] = {
    "trackio": TrackerKind("trackio", "trackio>=0.43", _trackio, "hf auth login", f"trackio show --project {PROJECT}"),
    "wandb": TrackerKind("wandb", "wandb>=0.20", _wandb, "wandb login", "wandb sync --sync-all uploads the runs that were written offline"),
    "mlflow": TrackerKind("mlflow", "mlflow>=3", _mlflow, "export MLFLOW_TRACKING_URI=...", "mlflow ui"),
    "aim": TrackerKind("aim", "aim>=3.29", _aim, "aim init", "aim up"),
    "swanlab": TrackerKind("swanlab", "swanlab[dashboard]>=0.7", _swanlab, "swanlab login", "swanlab watch"),
}
"""TensorBoard is none of them: its event files can be changed afterwards (`homelab.controller.features.track.event_files`)."""
