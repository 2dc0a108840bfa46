"""The schedulers that `homelab export --to` knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.features.export import dstack, kubernetes, slurm
from homelab.controller.features.export.scheduled_job import ScheduledJob
from homelab.controller.planning.types import LaunchDocument


@dataclass(frozen=True)
class Scheduler:
    """One way to start an exported job. `at`: where its machines see the folder when nobody says; None: where it is written."""

    name: str
    document: Callable[[ScheduledJob], LaunchDocument]
    start: str
    python: str
    at: str | None
    takes_image: bool = True
    needs_image: bool = False


SCHEDULERS: Mapping[str, Scheduler] = {
    scheduler.name: scheduler
    for scheduler in (
        Scheduler("slurm", slurm.document, slurm.START, "python3", None, takes_image=False),
        Scheduler("trainjob", kubernetes.trainjob, f"kubectl apply -f {kubernetes.TRAINJOB}", "python", "/homelab", needs_image=True),
        Scheduler("pytorchjob", kubernetes.pytorchjob, f"kubectl apply -f {kubernetes.PYTORCHJOB}", "python", "/homelab", needs_image=True),
        Scheduler("dstack", dstack.document, dstack.START, "python", "/homelab"),
    )
}


def scheduler_named(name: str) -> Scheduler:
    """The scheduler of this name. Raises InputError for one that is not known."""
    if name not in SCHEDULERS:
        raise InputError(
            f'no scheduler is named "{name}".{did_you_mean(name, list(SCHEDULERS))}',
            where="--to",
            hint=f"the schedulers are: {', '.join(SCHEDULERS)}",
        )
    return SCHEDULERS[name]
