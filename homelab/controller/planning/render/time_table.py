"""The time of a plan for people, and two plans side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from homelab.controller.base.units import gigabytes
from homelab.controller.planning.memory.scenario import DoesNotFit
from homelab.controller.planning.time.network_cost import bytes_text
from homelab.controller.planning.types import Plan, TimeEstimate

# What stands behind a speed; all but "measured" are guesses.
_SOURCES = {"measured": "measured", "scaled": "guess (scaled)", "owner": "guess (`speed`)", "data sheet": "guess (data sheet)"}


def of_plan(plan: Plan) -> RenderableType:
    """Who is busy for how long in a step, the step, the hours, what each node adds, and what follows from it."""
    time = plan.time
    if time is None:
        because = next((choice.because for choice in plan.choices if choice.subject == "time"), "the recipe brings its own program")
        return Text(f"Time: not known ({because}).", style="dim")
    table = Table(title=_title(time), title_justify="left", title_style="bold", box=None, pad_edge=False)
    for heading, justify in (
        ("rank", "right"), ("node", "left"), ("alone", "right"), ("tokens per step", "right"), ("busy", "right"), ("node adds", "right"), ("", "left"),
    ):  # fmt: skip
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    gains = {gain.node: f"{gain.gain:+.0%}" for gain in time.gains}
    for rank in time.ranks:
        table.add_row(
            str(rank.rank), rank.node, rate(rank.alone_tokens_per_s), str(rank.tokens), duration(rank.busy_s),
            gains.pop(rank.node, ""), Text(_SOURCES.get(rank.source, rank.source), style="dim"),
        )  # fmt: skip
    speed = _range(time.tokens_per_s_low, time.tokens_per_s_high, lambda guess: rate(float(f"{guess:.2g}"))) or rate(time.tokens_per_s)
    lines = [
        f"step    {duration(time.step_s)}: {duration(time.compute_s)} computing, {duration(time.wire_s)} on the network ({time.wire_because}){_waiting(time)}",
        f"speed   {speed}, {time.efficiency:.0%} of the sum of all ranks alone; "
        f"with equal shares {duration(time.equal_step_s)} a step and {time.equal_efficiency:.0%}",
        f"start   {duration(time.start_s, 2)} ({duration(time.start_s_low, 2)} to {duration(time.start_s_high, 2)}): {_start(time)}",
        f"total   {_total(plan, time)}",
    ]
    return Group(table, *(Text(line) for line in lines), *(Text(f"- {line}") for line in time.verdict))


def of_strategies(plan: Plan) -> RenderableType:
    """What each strategy would cost on these machines; the plan's own is marked. Below stands why others cannot be."""
    table = Table(
        title="Strategies: the same training, divided in other ways", title_justify="left", title_style="bold", box=None, pad_edge=False
    )
    table.add_column("")
    table.add_column("")
    for heading in ("state", "sent", "on the wire", "step", "tokens/s"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for price in plan.strategies:
        room = "refused" if price.refused else f"no room on {', '.join(price.without_room)}" if price.without_room else ""
        table.add_row(
            "*" if price.name == plan.strategy else "", price.name,
            "" if price.state_bytes is None else f"{gigabytes(price.state_bytes, '.2f')} GB",
            "" if price.sent_bytes is None else bytes_text(price.sent_bytes),
            "" if price.wire_s is None else duration(price.wire_s), "" if price.step_s is None else duration(price.step_s),
            "" if price.tokens_per_s is None else rate(price.tokens_per_s).split()[0], Text(room, style="dim"),
        )  # fmt: skip
    refusals = (Text(f"- {price.name}: {price.refused}", style="dim") for price in plan.strategies if price.refused)
    return Group(
        table,
        Text("state: weights, gradient and optimizer of the rank with the most; sent: by each rank in a step", style="dim"),
        *refusals,
    )


def before_and_after(before: Plan | DoesNotFit, after: Plan, names: Sequence[str]) -> RenderableType:
    """The same recipe on two sets of machines; `names` are the headings of the two columns."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")

    def row(name: str, show: Callable[[TimeEstimate], str]) -> None:
        times = [side.time if isinstance(side, Plan) else None for side in (before, after)]
        table.add_row(name, *("not known" if time is None else show(time) for time in times))

    table.add_row("ranks", *(str(side.world_size) if isinstance(side, Plan) else "" for side in (before, after)))
    row("step", lambda time: duration(time.step_s))
    row("  on the wire", lambda time: duration(time.wire_s))
    row("tokens/s", lambda time: rate(time.tokens_per_s).split()[0])
    row("to the end", lambda time: "not known" if time.hours is None else duration(time.hours * 3600))
    row("efficiency", lambda time: f"{time.efficiency:.0%}")
    table.add_row("fits", *(_fits(side) for side in (before, after)))
    if isinstance(before, Plan) and before.time and after.time:
        change = after.time.tokens_per_s / before.time.tokens_per_s - 1
        guessed = not (before.time.is_measured and after.time.is_measured)
        words = " (speeds are partly guessed: see `homelab plan`)" if guessed else ""
        return Group(table, Text(f"{change:+.0%} tokens/s{words}"))
    return table


def as_json(side: Plan | DoesNotFit) -> dict[str, Any]:
    """One side of a comparison: {"nodes", "fits", "time", "error"}; `time` as in `homelab plan --json`, None where no speed is known.

    A recipe that fits nowhere has no nodes, and `error` says by how much.
    """
    if not isinstance(side, Plan):
        return {"nodes": [], "fits": False, "time": None, "error": side.message}
    time = side.time.model_dump(mode="json") if side.time else None
    return {"nodes": [node.name for node in side.nodes], "fits": side.fits, "time": time, "error": None}


def duration(seconds: float, digits: int = 3) -> str:
    """Seconds as people say them: 40 ms, 1.3 s, 12 min, 3.4 h, 2.1 days, 7 years."""
    for limit, scale, unit in ((1, 0.001, "ms"), (120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{_rounded(seconds / scale, digits)} {unit}"
    days = seconds / 86_400
    return f"{_rounded(days, digits)} days" if days < 730 else f"{days / 365.25:,.0f} years"


def _rounded(value: float, digits: int) -> str:
    """So many digits, and never an exponent."""
    text = f"{value:.{digits}g}"
    return f"{float(text):.0f}" if "e" in text and value >= 1 else text


def rate(tokens_per_s: float) -> str:
    """Three digits, and never an exponent."""
    return f"{tokens_per_s:.0f} tokens/s" if tokens_per_s >= 100 else f"{tokens_per_s:.3g} tokens/s"


def _waiting(time: TimeEstimate) -> str:
    parts = [(time.wait_s, "because the speed of a rank varies"), (time.fill_s, "while the stages fill and drain")]
    return "".join(f", {duration(seconds)} {why}" for seconds, why in parts if seconds > 0.01 * time.step_s)


def _title(time: TimeEstimate) -> str:
    return "Time, from measured speeds" if time.is_measured else "Time, a guess (9 of 10 in the range), until the first run measures it"


def _start(time: TimeEstimate) -> str:
    return ", ".join(f"{part.name} {duration(part.seconds, 2)}" for part in time.start)


def _range(low: float | None, high: float | None, said: Callable[[float], str]) -> str:
    """ "890 to 1700 tokens/s", in two digits; "" where the figure is no guess."""
    if low is None or high is None:
        return ""
    first, last = said(low), said(high)
    words = first.rsplit(" ", 1)
    return f"{words[0] if last.endswith(f' {words[-1]}') else first} to {last}"


def _total(plan: Plan, time: TimeEstimate) -> str:
    if time.hours is None or time.steps is None:
        return time.rows_because
    start_text = f" from step {plan.resume_step} on" if plan.resume_step else ""
    extra = f", saves of {duration(time.save_s)}" + (f", evaluations of {duration(time.evaluate_s)}" if time.evaluate_s else "")
    hours = _range(time.hours_low, time.hours_high, lambda guess: duration(guess * 3600, 2)) or duration(time.hours * 3600)
    return f"{hours} for the start and {time.steps} steps{start_text}{extra}; rows of {time.row_tokens:.0f} tokens ({time.rows_because})"


def _fits(side: Plan | DoesNotFit) -> str:
    if not isinstance(side, Plan):
        return "nowhere"
    answer = side.fits
    short = list(dict.fromkeys(rank.node for rank in side.ranks if rank.memory and rank.memory.fits is False))
    return "not known" if answer is None else "yes" if answer else f"not on {', '.join(short)}"
