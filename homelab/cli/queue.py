"""`homelab queue`: recipes that are trained one after the other, in the night and on the nodes that they name."""

from __future__ import annotations

import functools
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common, completion, terminal

if TYPE_CHECKING:
    from homelab.controller.features.queue.queue_folder import QueueFolder
    from homelab.controller.features.queue.queue_list import QueueList

app = typer.Typer(help="Train recipes one after the other: add them, see when each begins and ends, run them.")
COMMANDS = ("add", "move", "remove", "pause", "resume", "run", "install")

NumberArgument = Annotated[int, typer.Argument(min=1, help="The number of the job.", show_default=False, autocompletion=completion.jobs)]


def command(
    context: typer.Context,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """List the jobs: what trains, what waits and until when, what is over. Without another word."""
    if context.invoked_subcommand is not None:
        _refuse_options_before(context)
        return 0
    shown = _shown(cluster, runs_dir)
    if as_json:
        common.print_json(shown.as_dict())
        return 0
    from homelab.cli.clean_console import CleanConsole

    console = CleanConsole(highlight=False)
    console.print(shown.first_line, style="bold", soft_wrap=not console.is_terminal)
    if shown.listing.jobs:
        for line in shown.table(console.width):
            console.print(line, soft_wrap=True)
    for reason in shown.reasons():
        console.print(reason, soft_wrap=not console.is_terminal)
    terminal.echo(f"Next: homelab {_following(shown)}{common.same_options(cluster, runs_dir)}")
    return 0


def _refuse_options_before(context: typer.Context) -> None:
    """Raises InputError for an option that stands before `add`, `run` ...: they would not see it."""
    from homelab.controller.base.errors import InputError
    from homelab.controller.base.hint import Hint, homelab

    for name, option in (("cluster", "--cluster"), ("runs_dir", "--runs-dir"), ("as_json", "--json")):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            word = context.invoked_subcommand
            raise InputError(
                f"{option} stands before {word}", where=f"homelab queue {option} {word}", hint=Hint("put it behind: {}", homelab(f"queue {word} {option} ..."))
            )  # fmt: skip


def _shown(cluster: Path, runs_dir: Path) -> QueueList:
    from homelab.controller.features.queue.queue_folder import QueueFolder
    from homelab.controller.features.queue.queue_list import QueueList
    from homelab.controller.features.queue.turns import Clock

    queue = QueueFolder(runs_dir)
    every = tuple(node.name for node in common.described_cluster(cluster).nodes)
    # A run of another queue is asked for by the runner; here nobody connects to a node.
    return QueueList(queue.listing(), Clock(time.time(), every, lambda run: False), queue.has_runner())


def _following(shown: QueueList) -> str:
    listing = shown.listing
    if listing.is_paused:
        return "queue resume"
    if listing.waiting and not shown.has_runner:
        return "queue run"
    if listing.running:
        return f"status {listing.running[0].run}".rstrip()
    return f"why {listing.failed[-1].run}" if listing.failed and listing.failed[-1].run and not listing.waiting else "queue add RECIPE"


def add(
    recipes: Annotated[
        list[Path], typer.Argument(metavar="RECIPE...", help="The recipe files.", show_default=False, autocompletion=completion.recipes)
    ],
    after: Annotated[
        str, typer.Option("--after", metavar="RUN|JOB", help="Begin when this run, or the job of this number, is over.", show_default=False)
    ] = "",
    not_before: Annotated[
        str, typer.Option("--not-before", metavar="HH:MM", help="Begin at this time of day, or later.", show_default=False)
    ] = "",
    stop_at: Annotated[
        str,
        typer.Option(
            "--stop-at",
            metavar="HH:MM",
            help="Stop at this time of day, at a checkpoint, and go on at --not-before (default: the time now).",
            show_default=False,
        ),
    ] = "",
    settings: Annotated[
        list[str], typer.Option("--set", metavar="KEY=V1,V2", help="One job for each value: train.learning_rate=1e-4,2e-4 (repeatable).")
    ] = [],  # noqa: B006
    nodes: common.NodesOption = "",
    skip: common.SkipOption = [],  # noqa: B006
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """Put recipes into the queue, as they are now. Each is planned first; what cannot fit is refused."""
    from homelab.controller.base.units import listed
    from homelab.controller.checks import registry
    from homelab.controller.features.queue import add_jobs
    from homelab.controller.features.queue.queue_folder import QueueFolder

    registry.skipped(only=[], skip=skip)
    loaded = common.load_cluster(cluster, nodes)
    queue = QueueFolder(runs_dir)
    named = [node.name for node in loaded.nodes] if nodes else []
    with common.progress(as_json) as say:
        request = add_jobs.AddRequest(recipes, named, skip, _after(after, queue), not_before, stop_at, settings)
        found = add_jobs.planned(request, loaded, time.time(), say)
    jobs = add_jobs.add(queue, found)
    if as_json:
        common.print_json({"added": [job.number for job in jobs]})
        return 0
    numbers = f"{'job' if len(jobs) == 1 else 'jobs'} {listed(str(job.number) for job in jobs)}"
    terminal.echo(f"Added {numbers}.")
    told: set[str] = set()
    for job, one in zip(jobs, (one for group in found for one in group), strict=True):
        terminal.echo(f"{job.number}  {Path(job.recipe).name}{f', {job.settings}' if job.settings else ''}: {one.answer}")
        for note in one.notes:
            if note not in told:  # all jobs of a sweep have the same
                terminal.echo(f"   note: {note}")
            told.add(note)
    word = "queue" if queue.has_runner() else "queue run"
    terminal.echo(f"Next: homelab {word}{common.same_options(cluster, runs_dir)}")
    return 0


def _after(word: str, queue: QueueFolder) -> str:
    """A number of this queue, or the whole name of a run. Raises InputError."""
    from homelab.controller.base.errors import InputError
    from homelab.controller.base.hint import Hint, homelab
    from homelab.controller.run import run_names, store

    if re.fullmatch(r"[0-9]{1,9}", word):
        numbers = [job.number for job in queue.listing().jobs]
        if int(word) not in numbers:
            raise InputError(
                f"no job has number {word}", where=f"--after {word}; the queue has {', '.join(map(str, numbers)) or 'no job'}",
                hint=Hint("{} lists the jobs", homelab("queue")),
            )  # fmt: skip
        return str(int(word))
    if not word:
        return ""
    runs = [paths.name for paths in store.runs_in(queue.runs_dir)]
    chosen = run_names.choose(word, runs)
    if chosen is None:
        error = run_names.unknown(word, runs)
        error.where = f"--after {word}; the runs in {queue.runs_dir}, and the numbers of the queue"
        raise error
    return chosen


def move(
    number: NumberArgument,
    place: Annotated[int, typer.Argument(help="Its place among those that wait: 1 is next.", show_default=False)],
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
) -> int:
    """Give a job that waits another place."""
    from homelab.controller.features.queue.queue_folder import QueueFolder

    queue = QueueFolder(runs_dir)
    queue.move(number, place)
    order = ", ".join(str(job.number) for job in queue.listing().waiting)
    terminal.echo(f"The order is now {order}. Next: homelab queue{common.same_options(cluster, runs_dir)}")
    return 0


def remove(
    numbers: Annotated[
        list[int],
        typer.Argument(metavar="NUMBER...", min=1, help="The numbers of the jobs.", show_default=False, autocompletion=completion.jobs),
    ],
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
) -> int:
    """Take jobs out. A run that one has had stays."""
    from homelab.controller.features.queue.queue_folder import QueueFolder

    for job in QueueFolder(runs_dir).remove(numbers):
        terminal.echo(f"Removed job {job.number}, {Path(job.recipe).name}.{f' Its run stays: {job.run}.' if job.run else ''}")
    terminal.echo(f"Next: homelab queue{common.same_options(cluster, runs_dir)}")
    return 0


def pause(cluster: common.ClusterOption = common.DEFAULT_CLUSTER, runs_dir: common.RunsOption = common.DEFAULT_RUNS) -> int:
    """Start nothing more. What trains goes on."""
    from homelab.controller.features.queue.queue_folder import QueueFolder

    queue = QueueFolder(runs_dir)
    queue.pause(time.time(), is_paused=True)
    trains = queue.listing().running
    terminal.echo(f"Paused: nothing more is started.{f' Job {trains[0].number} goes on to its end.' if trains else ''}")
    terminal.echo(f"Next: homelab queue resume{common.same_options(cluster, runs_dir)}")
    return 0


def resume(cluster: common.ClusterOption = common.DEFAULT_CLUSTER, runs_dir: common.RunsOption = common.DEFAULT_RUNS) -> int:
    """Go on after a pause, and use again the nodes that have failed."""
    from homelab.controller.features.queue.queue_folder import QueueFolder

    queue = QueueFolder(runs_dir)
    queue.pause(time.time(), is_paused=False)
    word = "queue" if queue.has_runner() else "queue run"
    terminal.echo(f"The queue goes on. Next: homelab {word}{common.same_options(cluster, runs_dir)}")
    return 0


def run(
    stay: Annotated[bool, typer.Option("--stay", help="Wait for more jobs when the queue is empty.")] = False,
    supervise: common.SuperviseOption = "here",
    no_supervise: common.NoSuperviseOption = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
) -> int:
    """Train what waits, in this terminal. Ctrl-C ends the runner alone: a run goes on, and the next runner goes on with it."""
    from homelab.controller.features.queue import job_work, queue_list, queue_notices, queue_run
    from homelab.controller.features.queue.queue_folder import QueueFolder

    common.load_cluster(cluster)
    where = common.supervise_where(supervise, no_supervise)

    def say(text: str) -> None:
        terminal.echo(f"{time.strftime('%H:%M:%S')} {text}")

    queue, notices = QueueFolder(runs_dir, functools.cache(lambda text: say(f"waits: {text}"))), queue_notices.QueueNotices(cluster, say)

    def swept(runs: tuple[str, ...]) -> None:
        from homelab.cli import compare
        from homelab.controller.base.errors import HomelabError

        say(f"the sweep is over: homelab compare {' '.join(runs)}{common.same_options(cluster, runs_dir)}")
        try:
            compare.command(list(runs), 2, cluster, runs_dir, as_json=False)
        except HomelabError as error:
            say(f"it cannot be compared now: {error.message}")

    work = job_work.JobWork(cluster, runs_dir, where, say)
    with queue.runner():
        listing = queue.listing()
        left = len(listing.running) + len(listing.waiting)
        say(f"{left} {'job' if left == 1 else 'jobs'}; homelab queue shows when each begins and ends")
        if listing.is_paused:
            say(f"the queue is paused, so nothing begins before: homelab queue resume{common.same_options(cluster, runs_dir)}")
        try:
            queue_run.QueueRun(queue, work, say, swept, notices.tell, is_supervised=where != "no").go(stays=stay)
        except KeyboardInterrupt:
            say(f"the runner ends; what trains goes on. To go on with the queue: homelab queue run{common.same_options(cluster, runs_dir)}")
            raise
        finally:
            work.close()
            notices.close()
    today = sorted((after := queue.listing()).over - listing.over)  # those too that were added meanwhile
    say(f"nothing waits any more: {queue_list.ended(after, today)}. Next: homelab queue{common.same_options(cluster, runs_dir)}")
    return 1 if any(job.number in today for job in after.failed) else 0


def install(
    supervise: common.SuperviseOption = "here",
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
) -> int:
    """Write a unit of your own systemd that runs the queue, or show a line for cron. It enables nothing."""
    from homelab.controller.features.queue import service

    common.load_cluster(cluster)
    installed = service.install(service.command(cluster, runs_dir, supervise))
    if installed.unit is None:
        terminal.echo("This machine has no systemd. Nothing was written; this line for `crontab -e` keeps a runner at work:")
        terminal.echo(installed.cron)
        terminal.echo(f"Next: homelab queue add RECIPE{common.same_options(cluster, runs_dir)}")
        return 0
    terminal.echo(f"Wrote {installed.unit}. Nothing is started or enabled yet.")
    terminal.echo(
        f"  to start it, now and after each login:  systemctl --user daemon-reload && systemctl --user enable --now {service.NAME}"
    )
    terminal.echo("  also while you are not logged in:       loginctl enable-linger")
    terminal.echo(f"  to read what it says:                   journalctl --user -u {service.NAME}")
    terminal.echo("A key that only an SSH agent has is not known to it: name a key file in cluster.toml (identity_file).")
    terminal.echo(f"Next: systemctl --user daemon-reload && systemctl --user enable --now {service.NAME}")
    return 0
