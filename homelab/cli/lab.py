"""`homelab lab`: a practice cluster on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from homelab.lab.state import BackendName

app = typer.Typer(
    no_args_is_help=True, help="A practice cluster on this machine: several nodes with real sshd, and faults to try."
)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The lab's folder.")]


@app.command()
def up(
    folder: Folder,
    nodes: Annotated[int, typer.Option(help="How many.")] = 3,
    names: Annotated[str | None, typer.Option(help="Their names, like tower,laptop,mini (instead of --nodes).")] = None,
    backend: Annotated[str | None, typer.Option(help="loopback or namespaces; default: namespaces as root.")] = None,
    cpu: Annotated[str | None, typer.Option(help="CPU limit in cores per node, like 0.9,0.5,0.3.")] = None,
    rate: Annotated[str | None, typer.Option(help="Speed of every cable, like 1gbit (namespaces).")] = None,
    share: Annotated[
        list[Path] | None, typer.Option(help="A folder below /tmp that the nodes see all the same (repeatable).")
    ] = None,
    python: Annotated[str | None, typer.Option(help="The nodes' Python; default: this one.")] = None,
) -> None:
    """Start a lab and write its cluster.toml."""
    import shlex

    from rich.console import Console

    from homelab.lab.lab import Lab

    console = Console(stderr=True, highlight=False)
    lab = Lab.up(
        folder,
        nodes,
        backend=cast("BackendName | None", backend),
        cpu=_cores(cpu) if cpu is not None else None,
        rate=rate,
        names=[name.strip() for name in names.split(",")] if names is not None else None,
        python=python,
        shared=share or (),
        tell=lambda line: console.print(line, markup=False, soft_wrap=True),
    )
    for node in lab.nodes:
        typer.echo(f"{node.name:12} {node.user}@{node.host}:{node.port}")
    typer.echo(f"lab {lab.state.id} is up ({lab.state.backend}); its cluster file: {lab.cluster_file}")
    typer.echo(f"Next: export HOMELAB_CLUSTER={shlex.quote(str(lab.cluster_file))} && homelab preflight")


@app.command()
def down(
    folder: Folder,
    keep_files: Annotated[bool, typer.Option("--keep-files", help="Keep the nodes' homes and logs.")] = False,
) -> None:
    """End a lab and look that nothing of it is left."""
    from homelab.lab.lab import Lab

    done = Lab.open(folder).down(keep_files=keep_files)
    typer.echo(f"lab {done.lab} is down; verified that none of its {', '.join(done.verified)} are left")
    if not done.folder_removed:
        typer.echo(f"kept: {folder}")


@app.command()
def status(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """How the nodes are, asked of the machine itself."""
    import json
    import shlex

    from rich import box
    from rich.console import Console
    from rich.table import Column, Table

    from homelab.lab.lab import Lab

    found = Lab.open(folder).status()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    rate = f", {found['rate']}" if found["rate"] else ""
    title = f"lab {found['lab']} ({found['backend']}, {found['network']}{rate})"
    columns = [
        Column(name, no_wrap=True) for name in ("node", "address", "state", "ssh", "cable", "cores", "processes")
    ]
    table = Table(*columns, Column("runs", overflow="fold"), title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for node in found["nodes"]:
        table.add_row(
            node["name"],
            f"{node['host']}{'' if node['port'] == 22 else ':' + str(node['port'])}",
            "off" if node["power"] == "off" else "frozen" if node["frozen"] else "on",
            "answers" if node["ssh"] else "silent",
            node["cable"],
            "all" if node["cpu_cores"] is None else f"{node['cpu_cores']:.2g}",
            str(node["processes"]),
            ", ".join(node["runs"]) or "-",
        )
    Console(highlight=False).print(table)
    if found["note"]:
        typer.echo(f"not running: {found['note']}. Take it down: homelab lab down {shlex.quote(found['folder'])}")


# The names of homelab.lab.faults.FAULTS, spelled out: importing the lab for its help would make every --help slow.
_FAULT_HELP = "One of kill-worker, power-cut, power-on, pull-cable, plug-cable, freeze, thaw, throttle=0.3 (cores), throttle=off"


@app.command()
def fault(
    folder: Folder,
    node: Annotated[str, typer.Argument(help="The node's name.")],
    what: Annotated[str, typer.Argument(metavar="FAULT", help=_FAULT_HELP)],
) -> None:
    """Let something happen to a node."""
    from homelab.lab.lab import Lab

    Lab.open(folder).fault(node, what)
    typer.echo(f"{node}: {what} done")


def _cores(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        from homelab.errors import InputError

        raise InputError(
            f'got "{text}"; allowed: numbers of cores, one per node', where="--cpu", hint="--cpu 0.9,0.5,0.3"
        ) from None
