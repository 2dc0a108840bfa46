"""A plan for people: tables on a terminal, the same text in plan.txt."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from homelab.planning import time_report
from homelab.planning.cards import short
from homelab.planning.command import masked, quote_words
from homelab.planning.memory import HELD
from homelab.planning.model import MemoryEstimate, Plan

_GB = 1e9


def table(plan: Plan, *, why: bool) -> RenderableType:
    """Ranks, memory, commands; with `why` the environment and the reason of every choice too."""
    head = Text.assemble(
        (f"{plan.run}", "bold"), f"  attempt {plan.attempt}: {plan.world_size} rank{'s' if plan.world_size > 1 else ''} on "
        f"{len(plan.nodes)} node{'s' if len(plan.nodes) > 1 else ''}, {plan.strategy} over {plan.backend}, {plan.precision} on {plan.device}; "
        f"head {plan.head} ({plan.master_address}:{plan.master_port})",
    )  # fmt: skip
    spare = [
        Text(f"GPU {card.index} of {node.name} ({short(card.name)}) is left out: cluster.toml names other cards", style="dim")
        for node in plan.nodes
        for card in node.spare_cards
    ]
    parts: list[RenderableType] = [head, Text(), _ranks(plan), *spare, Text(), _memory(plan), Text(), time_report.of_plan(plan)]
    for warning in plan.warnings:
        parts.append(Text(f"! {warning}", style="yellow"))
    parts += [Text(), Text("What is executed on each node", style="bold")]
    for node in plan.nodes:
        parts.append(Text(f"{node.name} ({node.lan_address} on {node.interface}), in {node.run_dir}"))
        if why:
            environment = " ".join(f"{key}={value}" for key, value in sorted(masked(node.environment).items()))
            parts.append(Padding(Text(environment, style="dim"), (0, 0, 0, 2)))
        parts.append(Padding(Text(quote_words(node.command), overflow="fold"), (0, 0, 0, 2)))
    parts += [
        Text(),
        _choices(plan) if why else Text("The reason of each choice: homelab plan RECIPE --why", style="dim"),
    ]
    return Group(*parts)


def text(plan: Plan) -> str:
    """plan.txt: everything, without colours, 120 columns."""
    console = Console(file=io.StringIO(), width=120, color_system=None, force_terminal=False)
    console.print(table(plan, why=True))
    stream = console.file
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def _ranks(plan: Plan) -> Table:
    found = Table(box=None, pad_edge=False)
    for heading, justify in (
        ("rank", "right"),
        ("node", "left"),
        ("device", "left"),
        ("share", "right"),
        ("micro-batch", "right"),
        ("of free memory", "right"),
    ):
        found.add_column(heading, justify=justify)  # type: ignore[arg-type]
    total = sum(rank.share for rank in plan.ranks)
    for rank in plan.ranks:
        found.add_row(
            str(rank.rank),
            rank.node,
            rank.device_name,
            f"{rank.share} of {total}" if total else "its own",
            str(rank.micro_batch) if total else "",
            _fit(rank.memory),
        )
    return found


def _fit(memory: MemoryEstimate | None) -> Text:
    if memory is None:
        return Text("not known", style="dim")
    if memory.available_bytes is None:
        return Text(f"{memory.total_bytes / _GB:.1f} GB")
    # What others hold is an item of the estimate, and no part of what is free.
    held = sum(item.size_bytes for item in memory.items if item.name == HELD)
    room = (memory.available_bytes - memory.total_bytes) / _GB
    text = f"{(memory.total_bytes - held) / _GB:.1f} of {(memory.available_bytes - held) / _GB:.1f} GB"
    if memory.fits:
        return Text(f"{text}, {room:.1f} left")
    return Text(f"{text}: {-room:.1f} GB too little, does NOT fit", style="red")


def _dry_runs(plan: Plan) -> list[Text]:
    """A line for every rank with a dry run, beside what the formulas say."""
    lines = []
    for rank in plan.ranks:
        if rank.memory and rank.memory.dry_run:
            run = rank.memory.dry_run
            lines.append(
                Text(
                    f"rank {rank.rank}: dry run: {run.peak_bytes / _GB:.2f} GB at op {run.at}, analytic {run.analytic_bytes / _GB:.2f} GB "
                    f"(the model's own items, no context; {run.seconds:.0f} s on {run.node})",
                    style="dim",
                )
            )
        elif rank.memory and rank.memory.dry_run_scaled:
            lines.append(
                Text(
                    f"rank {rank.rank}: by formulas, times {rank.memory.dry_run_scaled:.2f} as the nearest dry run says",
                    style="dim",
                )
            )
    return lines


def _memory(plan: Plan) -> RenderableType:
    known = [rank for rank in plan.ranks if rank.memory is not None]
    if not known:
        return Text("Memory: the model's shape is not known here, so there is no estimate.", style="dim")
    found = Table(
        title="Memory at the peak, estimated", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    found.add_column("")
    for rank in known:
        found.add_column(f"rank {rank.rank}", justify="right")
    names = dict.fromkeys(item.name for rank in known if rank.memory for item in rank.memory.items)
    for name in names:
        sizes = []
        for rank in known:
            assert rank.memory is not None
            size = sum(item.size_bytes for item in rank.memory.items if item.name == name)
            sizes.append(f"{size / _GB:.2f} GB" if size >= 1e7 else f"{size / 1e6:.1f} MB")
        found.add_row(name, *sizes)
    return Group(found, *_dry_runs(plan))


def _choices(plan: Plan) -> Table:
    found = Table(title="Why", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("choice", "value", "because"):
        found.add_column(heading, overflow="fold")
    for choice in plan.choices:
        found.add_row(choice.subject, choice.value, choice.because)
    return found
