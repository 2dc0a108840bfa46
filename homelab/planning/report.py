"""A plan for people: tables on a terminal, the same text in plan.txt."""

from __future__ import annotations

import io

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from homelab.planning.command import masked, quote_words
from homelab.planning.model import MemoryEstimate, Plan

_GB = 1e9


def table(plan: Plan, *, why: bool) -> RenderableType:
    """Ranks, memory, commands; with `why` the environment and the reason of every choice too."""
    head = Text.assemble(
        (f"{plan.run}", "bold"), f"  attempt {plan.attempt}: {plan.world_size} rank{'s' if plan.world_size > 1 else ''} on "
        f"{len(plan.nodes)} node{'s' if len(plan.nodes) > 1 else ''}, {plan.strategy} over {plan.backend}, {plan.precision} on {plan.device}; "
        f"head {plan.head} ({plan.master_address}:{plan.master_port})",
    )  # fmt: skip
    parts: list[RenderableType] = [head, Text(), _ranks(plan), Text(), _memory(plan)]
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
        ("memory", "right"),
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
    style = "" if memory.fits else "red"
    return Text(
        f"{memory.total_bytes / _GB:.1f} of {memory.available_bytes / _GB:.1f} GB{'' if memory.fits else ': does NOT fit'}",
        style=style,
    )


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
    return found


def _choices(plan: Plan) -> Table:
    found = Table(title="Why", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("choice", "value", "because"):
        found.add_column(heading, overflow="fold")
    for choice in plan.choices:
        found.add_row(choice.subject, choice.value, choice.because)
    return found
