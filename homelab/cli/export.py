"""`homelab export`: the same training as a job of Slurm, Kubeflow or dstack."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common, completion, terminal

if TYPE_CHECKING:
    from homelab.controller.config.recipe import TrainRecipe
    from homelab.controller.features.export.neutral_plan import RequestedMachines
    from homelab.controller.features.export.schedulers import Scheduler
    from homelab.controller.planning.types import Plan

_PLAIN = re.compile(r"/[^\x00-\x1f\x7f]*")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def command(
    recipe: common.RecipeArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="SCHEDULER",
            help="slurm, trainjob, pytorchjob or dstack.",
            show_default=False,
            autocompletion=completion.schedulers,
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="The job's folder. Default: jobs/RUN-SCHEDULER.", show_default=False),
    ] = None,
    at: Annotated[
        str,
        typer.Option(
            "--at",
            metavar="PATH",
            help="The path of the folder on the machines. Default: the same for slurm, else /homelab.",
            show_default=False,
        ),
    ] = "",
    machines: Annotated[
        int, typer.Option("--machines", min=0, max=1024, help="The number of machines. Default: those of cluster.toml.", show_default=False)
    ] = 0,
    gpus: Annotated[int, typer.Option("--gpus", min=0, max=16, help="With --machines: cards of each machine; 0 for CPUs.")] = 1,
    vram: Annotated[float, typer.Option("--vram", min=1, max=1024, help="With --machines: memory of the smallest card in GB.")] = 24.0,
    python: Annotated[
        str, typer.Option("--python", help="The Python on the machines, with requirements.txt installed.", show_default=False)
    ] = "",
    image: Annotated[str, typer.Option("--image", help="The container's image.", show_default=False)] = "",
    volume: Annotated[
        str, typer.Option("--volume", help="The volume (claim) that holds the folder, for Kubernetes and dstack.")
    ] = "homelab",
    partition: Annotated[str, typer.Option("--partition", help="Slurm's partition.", show_default=False)] = "",
    hours: Annotated[int, typer.Option("--hours", min=0, max=100000, help="The time limit; 0: the scheduler's own limit.")] = 0,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    nodes: common.NodesOption = "",
    as_json: common.JsonOption = False,
) -> int:
    """Write a folder from which a scheduler runs this training, with the same steps and the same loss. It asks no node and starts nothing."""
    from homelab.controller.config.load import load_recipe
    from homelab.controller.features.export import job_folder, neutral_plan
    from homelab.controller.features.export.scheduled_job import ScheduledJob
    from homelab.controller.features.export.schedulers import scheduler_named
    from homelab.controller.run import store

    scheduler = scheduler_named(to)
    _refuse(scheduler, python=python, image=image, volume=volume, partition=partition)
    training = load_recipe(recipe)
    asked, note = _machines(machines, gpus, vram, cluster, nodes)
    run = store.new_name(recipe.stem, time.time(), set())
    folder = (output or Path("jobs") / f"{run}-{to}").absolute()
    job_folder.refuse_taken(folder)
    place = _place(at or scheduler.at or str(folder))
    settled, plan, items, notes = neutral_plan.make(training, recipe, asked, run)
    job = ScheduledJob(
        name=_name(recipe.stem, run), run=run, nodes=asked.count, ranks_per_node=asked.ranks_each, vram_gb=asked.vram_gb, at=place,
        python=python or scheduler.python, image=image or None, environment=_environment(plan, settled, place), needs_token=_needs_token(plan),
        hours=hours or None, partition=partition or None, volume=volume, port=plan.master_port, notes=(*notes, *([note] if note else [])),
    )  # fmt: skip
    document = scheduler.document(job)
    job_folder.write(folder, document, settled, recipe, plan, items, place)
    file = folder / document.file_name
    if as_json:
        figures = {"machines": asked.count, "ranks": plan.world_size}
        common.print_json(
            {"folder": str(folder), "file": str(file), "run": run, "to": to, "at": place, **figures, "notes": list(job.notes)}
        )
        return 0
    for text in job.notes:
        terminal.echo(f"note: {text}")
    terminal.echo(f"wrote {folder}: {run} for {to}, {job.shape}; the model will be in {place}/runs/{run}/final")
    there = "" if place == str(folder) else f" (first copy the folder's content to {place} of the job's machines)"
    terminal.echo(f"Next: cd {shlex.quote(str(folder))} && {scheduler.start}{there}")
    return 0


def _machines(count: int, gpus: int, vram: float, cluster: Path, nodes: str) -> tuple[RequestedMachines, str]:
    from homelab.controller.config.cluster import Gpu
    from homelab.controller.features.export import neutral_plan

    if not count:
        return neutral_plan.machines_of(common.described_cluster(cluster, nodes))
    return neutral_plan.RequestedMachines(count, (Gpu(model="GPU", vram_gb=vram),) * gpus), ""


def _refuse(scheduler: Scheduler, **words: str) -> None:
    """Raises InputError for what the scheduler does not take, or would read as something else."""
    from homelab.controller.base.errors import InputError

    if scheduler.needs_image and not words["image"]:
        raise InputError(
            f"a {scheduler.name} needs the image of its containers",
            where="--image",
            hint="an image with the packages of [worker]: --image registry/homelab:1",
        )
    if words["image"] and not scheduler.takes_image:
        raise InputError(
            f"{scheduler.name} starts no container here", where="--image", hint="name the Python instead: --python /shared/env/bin/python"
        )
    python = words["python"]
    if python.startswith("~") and re.fullmatch(r"[\w./~-]+", python):  # anything else is refused below
        raise InputError(
            "a scheduler does not replace ~ by a home folder",
            where=f"--python {python}",
            hint=f"give its whole path, which this command says on a machine of the job: echo {python}",
        )
    for option, value in words.items():
        is_path = option in ("python", "image")
        if value and not (re.fullmatch(r"[\w./:@+~-]+", value) and not value.startswith("-") if is_path else _WORD.fullmatch(value)):
            raise InputError(
                f"{value!r} would be read there as something else", where=f"--{option}", hint="letters, digits, dot, dash and underscore"
            )


def _place(at: str) -> str:
    from homelab.controller.base.errors import InputError

    if not _PLAIN.fullmatch(at):
        raise InputError(
            f"{at!r} is not an absolute path",
            where="--at",
            hint="give the path of the folder on the machines of the job: --at /shared/homelab/job",
        )
    return at.rstrip("/") or "/"


def _name(stem: str, run: str) -> str:
    """A name for all schedulers: Kubernetes takes lower-case letters, digits and dashes, and puts words behind it.

    It ends with the moment of `run`: under one name, the scheduler would take a second export for a change of the first one's job.
    """
    moment = re.sub(r"[^0-9]", "", run[: len("2026-11-29-2144")])
    words = re.sub(r"[^a-z0-9]+", "-", f"homelab-{stem}".lower()).strip("-")
    return f"{words[: 40 - 1 - len(moment)].rstrip('-')}-{moment}"


def _environment(plan: Plan, recipe: TrainRecipe, at: str) -> dict[str, str]:
    """The variables that do not depend on a machine: not the network's interface, and nothing that is meant for a home network."""
    from homelab.controller.planning.environment.cuda import ALLOCATOR

    assert plan.launch is not None, "it has what is started"
    allocator = {name: value for name, value in plan.nodes[0].environment.items() if name in ALLOCATOR}
    general = {name: value for name, value in plan.launch.environment.items() if name not in ("HOMELAB_RUN", "HOMELAB_ATTEMPT")}
    return {**general, **allocator, **recipe.environment, "PYTHONPATH": f"{at}/{plan.launch.code}"}


def _needs_token(plan: Plan) -> bool:
    assert plan.launch is not None, "it has what is started"
    return "HF_HUB_OFFLINE" not in plan.launch.environment
