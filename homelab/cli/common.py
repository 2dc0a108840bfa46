"""What the commands share: options, the places of files, and the display of progress."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from homelab.cli import completion, places, terminal
from homelab.controller.base.hint import Hint, Options, for_recipe, homelab, with_options

if TYPE_CHECKING:
    from homelab.controller.attempt.placement import Where
    from homelab.controller.base.errors import HomelabError
    from homelab.controller.base.say import Say
    from homelab.controller.checks.evidence import Finding
    from homelab.controller.config.cluster import Cluster
    from homelab.controller.remote.fanout import Fleet
    from homelab.controller.run.paths import RunPaths

RecipeArgument = Annotated[Path, typer.Argument(help="The recipe file.", show_default=False, autocompletion=completion.recipes)]
ClusterOption = Annotated[
    Path,
    typer.Option(
        "--cluster",
        "-c",
        envvar="HOMELAB_CLUSTER",
        callback=places.cluster_option,
        show_default=False,
        help="The cluster file. Default: cluster.toml here, in a folder above, or in ~/.config/homelab.",
    ),
]
NodesOption = Annotated[str, typer.Option("--nodes", help="Only these nodes, by name: tower,laptop", autocompletion=completion.node_list)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RunsOption = Annotated[
    Path,
    typer.Option(
        "--runs-dir",
        envvar="HOMELAB_RUNS",
        callback=places.runs_option,
        show_default=False,
        help="Where runs are kept on this machine. Default: runs/ beside the cluster file; of the one in ~/.config, ~/.local/share/homelab/runs.",
    ),
]
WaitOption = Annotated[bool, typer.Option("--wait", help="Stay, show the dashboard, and end with the run's exit code.")]
SkipOption = Annotated[
    list[str],
    typer.Option("--skip", help="Skip this check (repeatable). The run records that it was skipped.", autocompletion=completion.checks),
]
SuperviseOption = Annotated[
    str,
    typer.Option(
        "--supervise",
        envvar="HOMELAB_SUPERVISE",
        metavar="here|head",
        parser=lambda text: _supervised(text),
        autocompletion=completion.supervisor_places,
        help="Where the supervisor is left that recovers the run by itself: on this machine, or on the head node (for a machine that sleeps; "
        "the head then needs our packages and a key to the other nodes; if the head dies, `homelab recover` goes on).",
    ),
]
NoSuperviseOption = Annotated[bool, typer.Option("--no-supervise", help="Leave no supervisor; recover by hand.")]
RunArgument = Annotated[
    str | None,
    typer.Argument(
        help="The run's name, or its beginning or end. Default: the one that is running, else the newest.",
        show_default=False,
        autocompletion=completion.runs,
    ),
]

_SUPERVISED = {"here": "here", "head": "head"} | dict.fromkeys(("true", "yes", "1"), "here") | dict.fromkeys(("no", "false", "0"), "no")


def _supervised(text: str) -> str:
    """Of the option or HOMELAB_SUPERVISE: here, head or no."""
    if text.lower() not in _SUPERVISED:
        raise typer.BadParameter(f"{text!r}; allowed: here, head (HOMELAB_SUPERVISE: no, too)")
    return _SUPERVISED[text.lower()]


def supervise_where(place: str, no_supervise: bool) -> Where:
    """Of --supervise and --no-supervise."""
    return "no" if no_supervise else cast("Where", place)


DEFAULT_CLUSTER, DEFAULT_RUNS = places.CLUSTER, places.RUNS


def load_cluster(path: Path, nodes: str = "") -> Cluster:
    """`described_cluster` for a command that contacts the machines. Raises InputError for the shipped example too: its addresses may be a stranger's."""
    from homelab.controller.base.errors import InputError
    from homelab.controller.config.example import is_example

    if path != DEFAULT_CLUSTER and path == places.cluster():
        terminal.echo(f". the machines of {path}", err=True)
    cluster = described_cluster(path, nodes)
    if is_example(path.read_bytes()):
        raise InputError(
            "this is the example file of homelab: its machines are not yours, so none is asked", where=str(path),
            hint=Hint("{} finds your machines and replaces it; to plan without machines: {}", homelab("init"), homelab("plan RECIPE --offline")),
        )  # fmt: skip
    return cluster


@contextmanager
def fleet_of_run(run: str | None, cluster: Path, runs_dir: Path, as_json: bool) -> Iterator[tuple[Fleet, RunPaths, Say]]:
    """The connections, the run that is meant, and how progress is shown: for a command about one run."""
    from homelab.controller.remote.fanout import Fleet
    from homelab.controller.run import run_lookup

    with Fleet(load_cluster(cluster)) as fleet, progress(as_json) as say:
        yield fleet, run_lookup.run(fleet, runs_dir, run, say), say


def described_cluster(path: Path, nodes: str = "") -> Cluster:
    """The cluster as the file says it, or the part of it named by --nodes, for a command that contacts no machine. Raises InputError."""
    from homelab.controller.base.errors import InputError, did_you_mean
    from homelab.controller.config.load import load_cluster as load

    cluster = load(path)
    names = tuple(name.strip() for name in nodes.split(",") if name.strip())
    all_names = [node.name for node in cluster.nodes]
    if nodes and not names:
        raise InputError(
            "no node is named", where=f"--nodes {nodes!r}; {path} has {', '.join(all_names)}", hint=f"--nodes {','.join(all_names)}"
        )
    for name in names:
        if name not in all_names:
            raise InputError(
                f'no node is called "{name}".{did_you_mean(name, all_names)}',
                where=f"the nodes named: {nodes!r}; {path} has {', '.join(all_names)}",
                hint=homelab("preflight --nodes", all_names[0]),
            )
    return cluster.only(names) if names else cluster


def refuse_practice_nodes(command: str) -> None:
    """Raises InputError on a machine that cannot hold practice nodes: their sshd, namespaces and processes are those of Linux."""
    from homelab.controller.base import own_machine
    from homelab.controller.base.errors import InputError

    if not own_machine.is_linux():
        raise InputError(
            f"practice nodes need Linux, and this machine runs {own_machine.system()}", where=command,
            hint=Hint("run it on a Linux machine (on Windows: in WSL2); real nodes are used from here: {}", homelab("init HOST")),
        )  # fmt: skip


def raise_first(errors: Iterable[HomelabError]) -> None:
    """Raise the first of the errors of several nodes, after a line on stderr for each of the others."""
    listed = list(errors)
    for other in listed[1:]:
        terminal.echo(f"{other.where}: {other.message}", err=True)
    if listed:
        raise listed[0]


def print_json(value: Any) -> None:
    """One JSON document on stdout. What could not be written down meanwhile is its `warnings`; without any there is no such key."""
    from homelab.controller.run import store

    if store.UNWRITTEN and isinstance(value, dict):
        value = {**value, "warnings": [error.as_dict() for error in store.UNWRITTEN.values()]}
    terminal.document(value)


def checked_output(file: Path) -> Path:
    """The file of --output, before hours of work are done for it. Raises InputError for a folder, HomelabError where nothing can be written."""
    import errno
    import shlex

    from homelab.controller.base.errors import InputError
    from homelab.controller.run import store

    if file.is_dir():
        inside = shlex.quote(str(file / "FILE"))
        raise InputError("this is a folder", where=f"--output {file}", hint=f"name a file in it: --output {inside}")
    folder = next(parent for parent in file.absolute().parents if os.path.lexists(parent))
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder", where=f"--output {file}", hint="name a file in a folder: --output FILE")
    with store.disk_errors_as_hints(file):
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return file


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A `say(text)`: a spinner line on a terminal, plain lines elsewhere, nothing when `quiet`. Always on stderr."""
    if quiet or os.environ.get("HOMELAB_QUIET"):
        yield lambda text: None
    elif sys.stderr.isatty():
        from rich.text import Text

        from homelab.cli.clean_console import CleanConsole

        with CleanConsole(stderr=True).status("starting") as status:
            yield lambda text: status.update(Text(text))  # a plain text is markup there, whatever the console says
    else:
        yield lambda text: terminal.echo(f". {text}", err=True)


def same_options(cluster: Path, runs_dir: Path | None = None, nodes: str = "") -> str:
    """The options a follow-up command needs to mean the same files and nodes, as shell text; empty where the environment or the defaults say it.

    Without `runs_dir` it is for a command that has no --runs-dir, or comes from one that has none: then the next one finds the
    folder by itself, by HOMELAB_RUNS or the default.
    """
    import shlex

    text = ""
    if cluster != Path(os.environ.get("HOMELAB_CLUSTER") or places.cluster()):
        text += f" --cluster {shlex.quote(str(cluster))}"
    if runs_dir is not None and runs_dir != Path(os.environ.get("HOMELAB_RUNS") or places.runs()):
        text += f" --runs-dir {shlex.quote(str(runs_dir))}"
    return f"{text} --nodes {shlex.quote(nodes)}" if nodes else text


def options_of(cluster: Path, runs_dir: Path | None = None) -> Options:
    """`same_options` for each command of ours by its name: those that the command has."""
    import importlib
    import inspect

    def options(name: str) -> str:
        group, _, verb = name.partition(" ")
        module = importlib.import_module(f"homelab.cli.{group}")
        command = getattr(module, verb or "command", None)  # `lab` has several
        has = inspect.signature(command).parameters if command else ()
        return same_options(cluster, runs_dir if "runs_dir" in has else None) if "cluster" in has else ""

    return options


def for_same_files(findings: Iterable[Finding], cluster: Path, runs_dir: Path | None = None, recipe: Path | None = None) -> list[Finding]:
    """The same findings, in which commands of ours name the recipe, and the files that are not the default ones."""
    options = options_of(cluster, runs_dir)
    named = "RECIPE" if recipe is None else str(recipe)
    return [
        replace(
            finding, hint=for_recipe(with_options(finding.hint, options), named), fix=finding.fix.with_options(options).for_recipe(named)
        )
        for finding in findings
    ]


def with_hints_for_same_files(command: Callable[..., int]) -> Callable[..., int]:
    """The command, where the hints of its errors name the files that it was given. What raises them need not know the options."""
    import functools

    from homelab.controller.base.errors import HomelabError

    @functools.wraps(command)
    def run(**options: Any) -> int:
        try:
            return command(**options)
        except HomelabError as error:
            if isinstance(options.get("recipe"), Path):
                from homelab.controller.config.load import in_file

                error.where = in_file(error.where, options["recipe"])
                error.hint = for_recipe(error.hint, str(options["recipe"]))
            if "cluster" in options:
                error.hint = with_options(error.hint, options_of(options["cluster"], options.get("runs_dir")))
            raise
        except KeyboardInterrupt as stopped:
            for text in stopped.args[:1]:  # what goes on without this command; typer makes a plain exit code of the interrupt
                terminal.echo(with_options(text, options_of(options["cluster"])) if "cluster" in options else text, err=True)
            raise

    return run
