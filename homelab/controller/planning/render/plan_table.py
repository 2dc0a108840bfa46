"""A plan for people: tables on a terminal, the same text in plan.txt."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from homelab.controller.base.secrets import masked
from homelab.controller.base.shell import quote_torchrun
from homelab.controller.base.units import gigabytes, megabytes
from homelab.controller.planning.machines.cards import short
from homelab.controller.planning.memory_estimate import MemoryEstimate
from homelab.controller.planning.render import time_table
from homelab.controller.planning.types import Plan
from homelab.shared.protocol.memory_items import HELD


def table(plan: Plan, *, why: bool = False, commands: bool = False) -> RenderableType:
    """Who does what, and how long it takes. `why`: memory by item, all strategies, and the reason of each choice, too; `commands`: what is executed."""
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
    streamed = [Text(f"rank {rank.rank}: {rank.streaming.text}", style="dim") for rank in plan.ranks if rank.streaming is not None]
    parts: list[RenderableType] = [head, Text(), _ranks(plan), *streamed, *spare]
    if why or all(rank.memory is None for rank in plan.ranks):
        parts += [Text(), _memory(plan)]
    parts += [Text(), *([time_table.of_plan(plan)] if why or plan.time is None else (Text(f"- {line}") for line in plan.time.verdict))]
    if why and plan.strategies and len(plan.nodes) > 1:
        parts += [Text(), time_table.of_strategies(plan)]
    parts += [Text(f"! {warning}", style="yellow") for warning in plan.warnings]
    if commands and plan.document is None:
        parts += [Text(), *_commands(plan)]
    if why:
        parts += [Text(), _choices(plan)]
    unsaid = [] if why else ["--why (memory by item, strategies, reasons)"]
    unsaid += [] if commands or plan.document is not None else ["--commands (what is executed)"]
    if unsaid:
        parts += [Text(), Text(f"More: homelab plan RECIPE {' or '.join(unsaid)}", style="dim")]
    return Group(*parts)


def text(plan: Plan) -> str:
    """plan.txt: everything, without colours, 120 columns."""
    console = Console(file=io.StringIO(), width=120, color_system=None, force_terminal=False, markup=False, emoji=False)
    console.print(table(plan, why=True, commands=True))
    stream = console.file
    assert isinstance(stream, io.StringIO)
    return stream.getvalue()


def _commands(plan: Plan) -> Iterator[RenderableType]:
    yield Text("Commands on each node", style="bold")
    for node in plan.nodes:
        yield Text(f"{node.name} ({node.lan_address} on {node.interface}), in {node.run_dir}")
        environment = " ".join(f"{key}={value}" for key, value in sorted(masked(node.environment).items()))
        yield Padding(Text(environment, style="dim"), (0, 0, 0, 2))
        yield Padding(Text(quote_torchrun(node.command), overflow="fold"), (0, 0, 0, 2))


def _ranks(plan: Plan) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    table.add_column("node")
    table.add_column("device")
    for heading in ("share", "rows a\npass", "free memory", "busy"):
        table.add_column(heading, justify="right", no_wrap=heading in ("share", "busy"))
    total = sum(rank.share for rank in plan.ranks)
    busy = {rank.rank: time_table.duration(rank.busy_s) for rank in plan.time.ranks} if plan.time is not None else {}
    for rank in plan.ranks:
        table.add_row(
            str(rank.rank), rank.node, rank.device_name, rank.work_text(total), str(rank.micro_batch) if total else "", _fit(rank.memory),
            busy.get(rank.rank, ""),
        )  # fmt: skip
    return table


def _fit(memory: MemoryEstimate | None) -> Text:
    if memory is None:
        return Text("not known", style="dim")
    if memory.available_bytes is None:
        return Text(f"{gigabytes(memory.total_bytes)} GB")
    # What others hold is an item of the estimate, and no part of what is free.
    held_bytes = sum(item.size_bytes for item in memory.items if item.name == HELD)
    room = (memory.available_bytes - memory.total_bytes) / 1e9
    text = f"{gigabytes(memory.total_bytes - held_bytes)} of {gigabytes(memory.available_bytes - held_bytes)} GB"
    if memory.is_tight:
        return Text(f"{text}: TIGHT, {room:.1f} GB left, and up to {memory.margin:.0%} may come", style="yellow")
    if memory.fits:
        return Text(text, no_wrap=True)
    return Text(f"{text}: {-room:.1f} GB too little, does NOT fit", style="red")


def _dry_runs(plan: Plan) -> list[Text]:
    """A line for every rank with a dry run, beside what the formulas say."""
    lines = []
    for rank in plan.ranks:
        if rank.memory and rank.memory.dry_run:
            run = rank.memory.dry_run
            lines.append(
                Text(
                    f"rank {rank.rank}: dry run: {gigabytes(run.peak_bytes, '.2f')} GB at op {run.at}, analytic {gigabytes(run.analytic_bytes, '.2f')} GB "
                    f"(items of the model, without the context of CUDA; {run.seconds:.0f} s on {run.node})",
                    style="dim",
                )
            )
        elif rank.memory and rank.memory.dry_run_scaled:
            lines.append(Text(f"rank {rank.rank}: by formulas, times {rank.memory.dry_run_scaled:.2f} by the nearest dry run", style="dim"))
    return lines


def _memory(plan: Plan) -> RenderableType:
    estimated = [rank for rank in plan.ranks if rank.memory is not None]
    if not estimated:
        return Text("Memory: the model's shape is not known here, so there is no estimate.", style="dim")
    table = Table(title="Memory at the peak, estimated", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("")
    for rank in estimated:
        table.add_column(f"rank {rank.rank}", justify="right")
    names = dict.fromkeys(item.name for rank in estimated if rank.memory for item in rank.memory.items)
    for name in names:
        sizes = []
        for rank in estimated:
            assert rank.memory is not None
            size = sum(item.size_bytes for item in rank.memory.items if item.name == name)
            sizes.append(f"{gigabytes(size, '.2f')} GB" if size >= 1e7 else f"{megabytes(size)} MB")
        table.add_row(name, *sizes)
    return Group(table, *_dry_runs(plan))


def _choices(plan: Plan) -> Table:
    table = Table(title="Why", title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading in ("choice", "value", "because"):
        table.add_column(heading, overflow="fold")
    for choice in plan.choices:
        table.add_row(choice.subject, choice.value, choice.because)
    return table
