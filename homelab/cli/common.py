"""What the commands share: their options, where files are looked for, and how progress is said."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from homelab.checks.evidence import Finding
    from homelab.config.cluster import Cluster
    from homelab.control.detach import Supervision
    from homelab.remote.fanout import Fleet
    from homelab.runs.paths import RunPaths

ClusterOption = Annotated[
    Path, typer.Option("--cluster", "-c", envvar="HOMELAB_CLUSTER", help="The cluster file.", show_default=True)
]
NodesOption = Annotated[str, typer.Option("--nodes", help="Only these nodes, by name: tower,laptop")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
RunsOption = Annotated[
    Path, typer.Option("--runs-dir", envvar="HOMELAB_RUNS", help="Where runs are kept on this machine.")
]
SkipOption = Annotated[list[str], typer.Option("--skip", help="Do not judge this check (repeatable); it is recorded.")]
SuperviseOption = Annotated[
    str,
    typer.Option(
        "--supervise", envvar="HOMELAB_SUPERVISE", metavar="here|head", parser=lambda text: _supervised(text),
        help="Where the supervisor is left that recovers the run by itself: on this machine, or on the head node (for a machine that sleeps; "
        "the head then needs our packages and a key to the other nodes; if the head dies, `homelab recover` goes on).",
    ),
]
NoSuperviseOption = Annotated[bool, typer.Option("--no-supervise", help="Leave no supervisor; recover by hand.")]
RunArgument = Annotated[
    str | None, typer.Argument(help="The run's name, or its beginning or end. Default: the one that lives, else the newest.", show_default=False)
]

_SUPERVISED = {"here": "here", "head": "head"} | dict.fromkeys(("true", "yes", "1"), "here") | dict.fromkeys(("no", "false", "0"), "no")


def _supervised(text: str) -> str:
    """Of the option or HOMELAB_SUPERVISE: here, head or no."""
    if text.lower() not in _SUPERVISED:
        raise typer.BadParameter(f"{text!r}; allowed: here, head (HOMELAB_SUPERVISE: no, too)")
    return _SUPERVISED[text.lower()]


DEFAULT_CLUSTER = Path("cluster.toml")
DEFAULT_RUNS = Path("runs")


def load_cluster(path: Path, nodes: str = "") -> Cluster:
    """The cluster, or the part of it named by --nodes. Raises InputError."""
    from homelab.config.load import load_cluster as load
    from homelab.errors import InputError, did_you_mean

    cluster = load(path)
    names = tuple(name.strip() for name in nodes.split(",") if name.strip())
    known = [node.name for node in cluster.nodes]
    if nodes and not names:
        raise InputError(
            "no node is named", where=f"--nodes {nodes!r}; {path} has {', '.join(known)}", hint=f"--nodes {','.join(known)}"
        )
    for name in names:
        if name not in known:
            raise InputError(
                f'no node is called "{name}".{did_you_mean(name, known)}',
                where=f"the nodes named: {nodes!r}; {path} has {', '.join(known)}",
                hint=f"homelab preflight --nodes {known[0]}",
            )
    return cluster.only(names) if names else cluster


def leave_supervisor(
    supervision: Supervision, fleet: Fleet, paths: RunPaths, cluster: Path, nodes: Collection[str], say: Callable[[str], None]
) -> str:
    """Start the run's supervisor; what to tell of it. Where that fails the run is under way all the same: a warning on stderr, not an error."""
    from homelab.errors import HomelabError

    try:
        return supervision.leave(fleet, paths, cluster, nodes, say)
    except HomelabError as error:
        hint = for_same_files(error.hint, cluster, paths.root.parent)
        sys.stderr.write(f"warning: {error.message}\nwhere:   {error.where}\nfix:     {hint}\n")
        return ""


def print_json(value: Any) -> None:
    """One JSON document on stdout. What could not be written down meanwhile is its `warnings`; without any there is no such key."""
    from homelab.runs import store

    if store.UNTOLD and isinstance(value, dict):
        value = {**value, "warnings": [error.as_dict() for error in store.UNTOLD.values()]}
    sys.stdout.write(json.dumps(value, indent=1, ensure_ascii=False) + "\n")


@contextmanager
def progress(quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A `say(text)`: a spinner line on a terminal, plain lines elsewhere, nothing when `quiet`. Always on stderr."""
    if quiet or os.environ.get("HOMELAB_QUIET"):
        yield lambda text: None
    elif sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("starting") as status:
            yield lambda text: status.update(text)
    else:
        yield lambda text: (sys.stderr.write(f". {text}\n"), sys.stderr.flush(), None)[2]


# Which commands have --cluster, and which of them --runs-dir too: `test_hints` holds this against the commands themselves.
_WITH_CLUSTER = ("preflight", "doctor", "plan", "trust")
_WITH_RUNS = ("launch", "status", "logs", "stop", "recover", "why", "runs", "chat", "supervise")
# Not "the user that homelab logs in with".
_OURS = re.compile(rf"(?<![\w./-])homelab ({'|'.join((*_WITH_CLUSTER, *_WITH_RUNS))})\b(?!-)(?! in with)")


def same_options(cluster: Path, runs_dir: Path | None = None) -> str:
    """The options a follow-up command needs to mean the same files, as shell text; empty where the environment or the defaults say it.

    Without `runs_dir` it is for a command that has no --runs-dir, or comes from one that has none: then the next one finds the
    folder by itself, by HOMELAB_RUNS or the default.
    """
    import shlex

    text = ""
    if cluster != Path(os.environ.get("HOMELAB_CLUSTER") or DEFAULT_CLUSTER):
        text += f" --cluster {shlex.quote(str(cluster))}"
    if runs_dir is not None and runs_dir != Path(os.environ.get("HOMELAB_RUNS") or DEFAULT_RUNS):
        text += f" --runs-dir {shlex.quote(str(runs_dir))}"
    return text


def for_same_files(text: str, cluster: Path, runs_dir: Path | None = None) -> str:
    """A hint whose commands of ours mean the same files, each by options that it has: `homelab trust --cluster FILE tower`.

    The options stand right behind the command's name: what else belongs to the command, and where prose goes on, is not to be told there.
    """

    def named(found: re.Match[str]) -> str:
        options = same_options(cluster, runs_dir if found[1] in _WITH_RUNS else None)
        rest = text[found.end() :].partition("homelab ")[0]
        return found[0] if options.strip() in rest else found[0] + options

    return _OURS.sub(named, text)


def for_cluster(findings: Iterable[Finding], cluster: Path, runs_dir: Path | None = None) -> list[Finding]:
    """The same findings, where commands of ours name the files that are not the default ones."""
    return [
        replace(finding, hint=for_same_files(finding.hint, cluster, runs_dir), fix=for_same_files(finding.fix, cluster, runs_dir))
        for finding in findings
    ]


def with_hints_for_same_files(command: Callable[..., int]) -> Callable[..., int]:
    """The command, where the hints of its errors name the files that it was given. Whoever raises them need not know of options."""
    import functools

    from homelab.errors import HomelabError

    @functools.wraps(command)
    def run(**given: Any) -> int:
        try:
            return command(**given)
        except HomelabError as error:
            if isinstance(given.get("recipe"), Path):
                from homelab.config.load import in_file

                error.where = in_file(error.where, given["recipe"])
            if "cluster" in given:
                error.hint = for_same_files(error.hint, given["cluster"], given.get("runs_dir"))
            raise

    return run
