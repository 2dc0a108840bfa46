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
    str | None, typer.Argument(help="The run's name, or its beginning or end. Default: the newest.", show_default=False)
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
        sys.stderr.write(f"warning: {error.message}\nwhere:   {error.where}\nfix:     {error.hint}\n")
        return ""


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
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


def for_cluster(findings: Iterable[Finding], cluster: Path) -> list[Finding]:
    """The same findings, where commands of ours name the cluster file: `homelab trust tower --cluster FILE`."""
    options = same_options(cluster)

    def named(text: str) -> str:
        return re.sub(r"\bhomelab (?:trust|stop|doctor|preflight)\b(?: [\w.,-]+)*", lambda found: found[0] + options, text)

    return [replace(finding, hint=named(finding.hint), fix=named(finding.fix)) for finding in findings]


def same_options(cluster: Path, runs_dir: Path = DEFAULT_RUNS) -> str:
    """The options a follow-up command needs to mean the same files, as shell text; empty for the defaults."""
    import shlex

    text = ""
    if str(cluster) != os.environ.get("HOMELAB_CLUSTER", str(DEFAULT_CLUSTER)):
        text += f" --cluster {shlex.quote(str(cluster))}"
    if str(runs_dir) != os.environ.get("HOMELAB_RUNS", str(DEFAULT_RUNS)):
        text += f" --runs-dir {shlex.quote(str(runs_dir))}"
    return text
