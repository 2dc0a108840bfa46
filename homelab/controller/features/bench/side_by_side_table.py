"""A comparison for people: a table, and a sentence for each run that says whether it is the same training. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from homelab.controller.base.units import gibibytes
from homelab.controller.config.cluster import Price
from homelab.controller.features.bench.side_by_side import Comparison

_HEADINGS = ("run", "nodes", "strategy", "tokens/s", "speed-up", "efficiency", "step", "wire", "memory", "loss", "per 1M tokens")
_MOST_SHOWN = 4


def table(compared: Sequence[Comparison], price: Price) -> Table:
    """A row for each run; unknown figures are empty."""
    drawn = Table(box=None, pad_edge=False)
    for number, heading in enumerate(_HEADINGS):
        drawn.add_column(heading, justify="left" if number < 3 else "right", overflow="fold")
    for one in compared:
        drawn.add_row(*_row(one, price))
    return drawn


def sentences(compared: Sequence[Comparison]) -> list[str]:
    """What each run is to the first one."""
    return [_sentence(one, compared[0].side.run) for one in compared[1:]]


def _row(one: Comparison, price: Price) -> tuple[str, ...]:
    measured = one.side.measured
    last = one.side.losses[max(one.side.losses)] if one.side.losses else None
    figures = ("", "", "", "", "", "") if measured is None else (
        f"{measured.tokens_per_s:.0f}", "" if one.speed_up is None else f"{one.speed_up:.2f}x", "" if one.efficiency is None else f"{one.efficiency:.0%}",
        f"{measured.step_s:.3g} s", f"{measured.wire:.0%}", f"{gibibytes(max(measured.memory_bytes.values(), default=0)):.2f} GiB",
    )  # fmt: skip
    return (one.side.run, ", ".join(one.side.nodes), one.side.strategy, *figures, "" if last is None else f"{last:.4f}", _cost(one, price))


def _cost(one: Comparison, price: Price) -> str:
    used = one.side.kwh_per_million_tokens
    if used is None:
        return ""
    return f"{used:.3g} kWh" + (f", {used * price.price_per_kwh:.3g} {price.currency}".rstrip() if price.price_per_kwh is not None else "")


def _sentence(one: Comparison, first: str) -> str:
    if one.differs:
        more = f" and {len(one.differs) - _MOST_SHOWN} more" if len(one.differs) > _MOST_SHOWN else ""
        return f"{one.side.run} is another training than {first}: {'; '.join(one.differs[:_MOST_SHOWN])}{more}"
    if one.curve_difference is None:
        return f"{one.side.run} and {first} have no step in common yet"
    words = f"over {one.common_steps} common steps their losses differ by at most {one.curve_difference:.2g} of the loss"
    if one.is_same:
        return f"{one.side.run} is the same training as {first}: {words}, which is rounding"
    return f"{one.side.run} HAS ANOTHER CURVE than {first}: {words}, and the recipe is the same; that is more than rounding"
