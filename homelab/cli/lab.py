"""`homelab lab`: a practice cluster on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from homelab.cli import common, examples, terminal

if TYPE_CHECKING:
    from homelab.lab.lab_state import BackendName

app = typer.Typer(no_args_is_help=True, help="Run a practice cluster on this machine: several nodes with a real sshd, and faults to try.")

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The lab's folder.")]


@app.callback()
def check() -> None:
    """Refuse what cannot work here, before anything of it is imported."""
    common.refuse_practice_nodes("homelab lab")


@app.command(epilog=examples.epilog("lab up"))
def up(
    folder: Folder,
    nodes: Annotated[int, typer.Option(help="How many.")] = 3,
    names: Annotated[str | None, typer.Option(help="Their names, like tower,laptop,mini (instead of --nodes).")] = None,
    backend: Annotated[str | None, typer.Option(help="loopback or namespaces; default: namespaces as root.")] = None,
    cpu: Annotated[str | None, typer.Option(help="CPU limit in cores per node, like 0.9,0.5,0.3.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory limit in GB per node, like 1.5,1.2,1.2 (namespaces).")] = None,
    rate: Annotated[str | None, typer.Option(help="Speed of every cable, like 1gbit (namespaces).")] = None,
    share: Annotated[list[Path] | None, typer.Option(help="A folder below /tmp that all nodes share (repeatable).")] = None,
    python: Annotated[str | None, typer.Option(help="The nodes' Python; default: this one.")] = None,
    login: Annotated[
        list[str] | None, typer.Option(metavar="NODE=USER[:PORT]", help="Give a node its own account and port (namespaces, repeatable).")
    ] = None,
) -> None:
    """Start a lab and write its cluster.toml."""
    import shlex

    from homelab.cli.clean_console import CleanConsole
    from homelab.lab.lab import Lab

    console = CleanConsole(stderr=True, highlight=False)
    lab = Lab.up(
        folder, nodes, backend=cast("BackendName | None", backend), cpu=_numbers(cpu, "--cpu", "cores") if cpu is not None else None,
        memory=_numbers(memory, "--memory", "GB") if memory is not None else None, rate=rate, python=python,
        names=[name.strip() for name in names.split(",")] if names is not None else None, shared=share or (),
        logins=dict(entry.partition("=")[::2] for entry in login or ()),
        tell=lambda line: console.print(line, markup=False, soft_wrap=True),
    )  # fmt: skip
    for node in lab.nodes:
        terminal.echo(f"{node.name:12} {node.user}@{node.host}:{node.port}")
    terminal.echo(f"lab {lab.state.id} is up ({lab.state.backend}); its cluster file: {lab.cluster_file}")
    terminal.echo(f"Next: export HOMELAB_CLUSTER={shlex.quote(str(lab.cluster_file))} && homelab preflight")


@app.command(epilog=examples.epilog("lab down"))
def down(folder: Folder, keep_files: Annotated[bool, typer.Option("--keep-files", help="Keep the nodes' homes and logs.")] = False) -> None:
    """End a lab and verify that nothing of it is left."""
    from homelab.lab.lab import Lab

    teardown = Lab.open(folder).down(keep_files=keep_files)
    terminal.echo(f"lab {teardown.lab} is down; verified that none of its {', '.join(teardown.verified)} are left")
    if not teardown.folder_removed:
        terminal.echo(f"kept: {folder}")


@app.command(epilog=examples.epilog("lab status"))
def status(folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Show the state of the nodes, as the machine reports it."""
    import shlex

    from rich import box
    from rich.table import Column, Table

    from homelab.cli.clean_console import CleanConsole
    from homelab.lab.lab import Lab

    lab_status = Lab.open(folder).status()
    if as_json:
        terminal.document(lab_status)
        return
    rate = f", {lab_status['rate']}" if lab_status["rate"] else ""
    title = f"lab {lab_status['lab']} ({lab_status['backend']}, {lab_status['network']}{rate})"
    columns = [Column(name, no_wrap=True) for name in ("node", "address", "state", "ssh", "cable", "cores", "processes")]
    table = Table(*columns, title=title, box=box.SIMPLE, padding=(0, 1, 0, 0))
    nodes_of: dict[str, list[str]] = {}
    for node in lab_status["nodes"]:
        table.add_row(
            node["name"],
            f"{node['host']}{'' if node['port'] == 22 else ':' + str(node['port'])}",
            "off" if node["power"] == "off" else "frozen" if node["frozen"] else "on",
            "answers" if node["ssh"] else "silent",
            node["cable"],
            "all" if node["cpu_cores"] is None else f"{node['cpu_cores']:.2g}",
            str(node["processes"]),
        )
        for run in node["runs"]:
            nodes_of.setdefault(run, []).append(node["name"])
    CleanConsole(highlight=False).print(table)
    for run, nodes in nodes_of.items():  # a name is to be copied: it stands in a line of its own
        terminal.echo(f"run {run} on {', '.join(nodes)}")
    if lab_status["note"]:
        terminal.echo(f"not running: {lab_status['note']}. Take it down: homelab lab down {shlex.quote(lab_status['folder'])}")


# The names of homelab.lab.faults.FAULTS, spelled out: importing the lab for its help would make every --help slow.
_FAULT_HELP = "kill-worker, power-cut, power-on, pull-cable, plug-cable, freeze, thaw, throttle=0.3 (cores), throttle=off."


@app.command(epilog=examples.epilog("lab fault"))
def fault(
    folder: Folder,
    node: Annotated[str, typer.Argument(help="The node's name.")],
    fault_name: Annotated[str, typer.Argument(metavar="FAULT", help=_FAULT_HELP)],
    undo: Annotated[bool, typer.Option("--undo", help="Take the fault back.")] = False,
) -> None:
    """Inject a fault into a node, or undo one."""
    from homelab.controller.base.hint import homelab
    from homelab.lab import faults
    from homelab.lab.lab import Lab

    lab = Lab.open(folder)
    if undo:
        lab.fault(node, faults.undoing(fault_name, str(lab.folder)))
        terminal.echo(f"{node}: {fault_name} undone")
        return
    lab.fault(node, fault_name)
    terminal.echo(f"{node}: {fault_name} done")
    kind = fault_name.partition("=")[0]
    if kind in faults.UNDONE_BY and fault_name != faults.UNDONE_BY[kind]:
        terminal.echo(f"Undo: {homelab('lab fault', str(lab.folder), node, kind, '--undo')}")


@app.command(epilog=examples.epilog("lab faults"))
def faults(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """List every fault: what it does, and whether --undo takes it back."""

    from rich import box
    from rich.table import Column, Table

    from homelab.cli.clean_console import CleanConsole
    from homelab.lab import faults as known

    entries = known.entries()
    if as_json:
        terminal.document({"faults": entries})
        return
    columns = Column("fault", no_wrap=True), Column("what happens", overflow="fold"), Column("undo"), Column("needs")
    table = Table(*columns, box=box.SIMPLE, padding=(0, 1, 0, 0))
    for entry in entries:
        needs = ", ".join("root" if need == "namespaces" else need for need in entry["needs"])
        table.add_row(entry["name"], entry["title"], "yes" if entry["undo"] else "-", needs or "-")
    CleanConsole(highlight=False).print(table)
    terminal.echo("root: a lab that was started as root (backend namespaces)")
    terminal.echo("Next: homelab lab fault DIR NODE FAULT")


def _numbers(text: str, option: str, unit: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        from homelab.controller.base.errors import InputError

        raise InputError(f'got "{text}"; allowed: numbers of {unit}, one per node', where=option, hint=f"{option} 0.9,0.5,0.3") from None
