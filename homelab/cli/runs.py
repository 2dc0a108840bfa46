"""`homelab runs`: every run this controller and the reachable nodes know."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from homelab.cli import common, completion, terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from homelab.controller.base.errors import HomelabError
    from homelab.controller.config.cluster import Cluster
    from homelab.controller.run.pruning import PrunableRun


def command(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            help="With --prune: only these runs, by name, or its beginning or end.", show_default=False, autocompletion=completion.runs
        ),
    ] = None,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune", help="Remove finished runs, here and on the nodes. It lists them and asks first. A run that is running always stays."
        ),
    ] = False,
    keep: Annotated[int, typer.Option("--keep", min=0, help="With --prune and no names: this number of the newest runs stays.")] = 1,
    yes: Annotated[bool, typer.Option("--yes", help="With --prune: do not ask.")] = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    runs_dir: common.RunsOption = common.DEFAULT_RUNS,
    as_json: common.JsonOption = False,
) -> int:
    """List the runs, newest first. With --prune, remove finished ones."""
    from homelab.controller.base.errors import InputError
    from homelab.controller.base.hint import homelab

    loaded = common.load_cluster(cluster)
    if prune:
        return _prune(loaded, runs_dir, runs or [], keep, yes=yes, as_json=as_json, options=common.same_options(cluster, runs_dir))
    if runs or yes:
        raise InputError("names and --yes are for --prune", where="homelab runs", hint=homelab("runs --prune", *(runs or [])))
    return _list(loaded, runs_dir, common.same_options(cluster, runs_dir), as_json)


def _list(loaded: Cluster, runs_dir: Path, options: str, as_json: bool) -> int:
    import time

    from homelab.cli.clean_console import CleanConsole
    from homelab.controller.dashboard import run_list
    from homelab.controller.features.status import run_index
    from homelab.controller.remote.fanout import Fleet

    with Fleet(loaded) as fleet, common.progress(as_json) as say:
        index = run_index.all_runs(fleet, runs_dir, say)
    if as_json:
        common.print_json(
            {
                "runs": [row.as_dict() for row in index.rows],
                "unreachable": {name: error.as_dict() for name, error in index.unreachable.items()},
            }
        )
        return 0
    console = CleanConsole()
    if index.rows:
        for line in run_list.lines(index.rows, time.time(), console.width):
            console.print(line, soft_wrap=True)
    for name, error in index.unreachable.items():
        console.print(f"{name} could not be asked: {error.message}", style="yellow", markup=False, highlight=False)
    terminal.echo(
        f"Next: homelab status {index.rows[0].name}{options}" if index.rows else f"No runs yet. Next: homelab launch RECIPE{options}"
    )
    return 0


def _prune(loaded: Cluster, runs_dir: Path, words: Sequence[str], keep: int, *, yes: bool, as_json: bool, options: str) -> int:
    import sys

    from homelab.controller.base.errors import HomelabError, InputError
    from homelab.controller.base.hint import homelab
    from homelab.controller.features.stop import prune
    from homelab.controller.remote.fanout import Fleet
    from homelab.controller.run import pruning, run_names

    errors: dict[str, HomelabError] = {}
    removed: list[str] = []
    with Fleet(loaded) as fleet:
        with common.progress(as_json) as say:
            known, errors = prune.candidates(fleet, runs_dir, Path("models"), say)
        names = [run.name for run in known]
        named = [run_names.choose(word, names) or "" for word in words]
        if "" in named:
            raise run_names.unknown(words[named.index("")], names)
        going, staying = pruning.choose(known, named, keep)
        if not as_json:
            _show(going, staying, errors)
        if going and not yes:
            if as_json or not sys.stdin.isatty():
                raise InputError(
                    "there is no terminal to ask whether these runs may be removed",
                    where="standard input",
                    hint=homelab("runs --prune --yes", *words),
                )
            if not terminal.confirm("remove them?"):
                return 1
        with common.progress(as_json) as say:
            for run in going:
                try:
                    prune.remove(fleet, runs_dir, run, say)
                    removed.append(run.name)
                except HomelabError as error:
                    errors[run.name] = error
    failed = [run.name for run in going if run.name not in removed]
    if as_json:
        common.print_json({"removed": removed, "staying": staying, "errors": {name: error.as_dict() for name, error in errors.items()}})
        return errors[failed[0]].exit_code if failed else 0
    common.raise_first(errors[name] for name in failed)
    terminal.echo(f"Removed {len(removed)} run{'' if len(removed) == 1 else 's'}. Next: homelab runs{options}")
    return 0


def _show(going: Sequence[PrunableRun], staying: dict[str, str], silent: dict[str, HomelabError]) -> None:
    """What goes, with its sizes, and why each other run stays."""
    from homelab.controller.base.units import decimal_size

    for run in going:
        places = ", ".join(f"{decimal_size(size)} on {place}" for place, size in run.bytes_on.items())
        last = f"; its last checkpoint, of step {run.step}, goes, too" if run.step and run.state != "done" else ""
        result = f"; {run.only}: homelab fetch {run.name} saves it" if run.only else last
        terminal.echo(f"{run.name}  {run.state}  {places}{result}")
    for name, why in staying.items():
        terminal.echo(f"{name}  stays: {why}")
    for name, error in silent.items():
        terminal.echo(f"{name} could not be asked: {error.message}")
