"""`homelab init`: find the machines, and write cluster.toml."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from homelab.cli import common, terminal
from homelab.controller.base.errors import EXIT_DONE, EXIT_UNREACHABLE

if TYPE_CHECKING:
    from pathlib import Path

    from homelab.controller.features.discover.initialise import InitResult


def command(
    hosts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="HOST",
            help="A machine as ssh names it: host, user@host or host:port. Default: search for machines.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", help="Ask nothing: use every default, and accept new host keys (you have compared them already).")
    ] = False,
    user: Annotated[str, typer.Option("--user", help="The user name on machines that refuse yours.")] = "",
    network: Annotated[str, typer.Option("--network", help="The LAN, if the nodes share several networks: 192.168.1.0/24.")] = "",
    this_machine: Annotated[
        bool | None, typer.Option("--this-machine/--no-this-machine", help="Whether this machine is a node, too.", show_default=False)
    ] = None,
    scan: Annotated[bool, typer.Option("--scan", help="Also try port 22 of every address of this machine's own /24.")] = False,
    cluster: common.ClusterOption = common.DEFAULT_CLUSTER,
    as_json: common.JsonOption = False,
) -> int:
    """Find machines, read what hardware they have, and write cluster.toml. Run again, it adds and updates nodes; comments stay."""
    from homelab.cli.questions import InitQuestions
    from homelab.controller.features.discover.initialise import initialise

    def say(text: str) -> None:
        if not as_json:
            terminal.echo(f". {text}", err=True)  # plain lines: a spinner would run over the questions

    notes: list[str] = []
    questions = InitQuestions(yes, user, network, this_machine)
    outcome = initialise(cluster, hosts or [], questions, scan=scan, say=say, note=notes.append)
    if as_json:
        common.print_json(_document(outcome, cluster, notes))
    else:
        _print(outcome, cluster, notes)
    return EXIT_UNREACHABLE if outcome.left_out else EXIT_DONE


def _print(outcome: InitResult, cluster: Path, notes: list[str]) -> None:
    from homelab.controller.features.discover import proposal
    from homelab.controller.planning.machines import cards

    for node in outcome.cluster.nodes:
        facts = outcome.facts.get(node.name)
        has = ", ".join(cards.short(card.name) for card in cards.everything(facts)) if facts else ""
        state = (
            "new"
            if node.name in outcome.added
            else f"updated: {', '.join(outcome.updated[node.name])}"
            if node.name in outcome.updated
            else "unchanged"
        )
        terminal.echo(f"{node.name}  {node.host}  {has}{', ' if has else ''}{proposal.about(facts) if facts else 'not asked'}  ({state})")
    for host, other in outcome.same.items():
        notes.append(f"{host} is {other} under another name")
    for note in notes:
        terminal.echo(f"note: {note}")
    for name, error in outcome.left_out.items():
        terminal.echo(f"{name}: {error.message}\n  where: {error.where}\n  fix:   {error.hint}", err=True)
    terminal.echo(f"{'wrote' if outcome.is_written else 'nothing to change in'} {cluster}")
    is_bare = any(not facts.python.packages.get("torch") for facts in outcome.facts.values())
    terminal.echo(f"Next: homelab {'setup' if is_bare else 'preflight'}" + common.same_options(cluster))


def _document(outcome: InitResult, cluster: Path, notes: list[str]) -> dict[str, Any]:
    """{"file", "written", "nodes": [{"name", "host", "state", "keys", "gpus", ...}], "found": [...], "same": {...}, "left_out": {...}, "notes": [...]}."""
    nodes = []
    for node in outcome.cluster.nodes:
        state = "added" if node.name in outcome.added else "updated" if node.name in outcome.updated else "unchanged"
        keys = node.model_dump(mode="json", include={"name", "host", "port", "user", "gpus"}, exclude_none=True)
        nodes.append({**keys, "state": state, "keys": list(outcome.updated.get(node.name, ())), "answered": node.name in outcome.facts})
    found = [
        {
            "host": greeting.candidate.host, "source": greeting.candidate.source, "address": greeting.address, "port": greeting.port,
            "fingerprint": greeting.fingerprint or None, "problem": greeting.problem or None,
        }
        for greeting in outcome.greetings
    ]  # fmt: skip
    return {
        "file": str(cluster), "written": outcome.is_written, "network": outcome.cluster.network, "nodes": nodes, "found": found, "same": outcome.same,
        "left_out": {name: error.as_dict() for name, error in outcome.left_out.items()}, "notes": notes,
    }  # fmt: skip
