"""The first line of a plan: does it fit, how long, how fast. Pure."""

from __future__ import annotations

from homelab.controller.planning.render.time_table import duration, rate
from homelab.controller.planning.types import Plan, TimeEstimate
from homelab.controller.planning.verdict import Verdict

_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def of(plan: Plan, judged: Verdict) -> str:
    """In one line: "It fits. About 5.2 h (4 to 6.5 h), 1200 tokens/s, 97 % of the three cards together." """
    if judged.runs is not True:
        return f"{judged.title}: {judged.seen}"
    is_tight = any(rank.memory is not None and rank.memory.is_tight for rank in plan.ranks)
    starts = "It can run." if not plan.fits else "It fits, but barely." if is_tight else "It fits."  # None: nobody knows what is free
    return f"{starts} {_time(plan, plan.time)}" if plan.time is not None else f"{starts} How long it takes is not known before it runs."


def _time(plan: Plan, time: TimeEstimate) -> str:
    parts = []
    if time.hours is not None:
        about = "" if time.is_measured else "about "
        guess = (
            f" ({duration(time.hours_low * 3600, 2)} to {duration(time.hours_high * 3600, 2)})"
            if time.hours_low and time.hours_high
            else ""
        )
        parts.append(f"{about}{duration(time.hours * 3600, 2)}{guess}")
    parts.append(rate(time.tokens_per_s))
    if len(plan.ranks) > 1:
        count = _NUMBERS[len(plan.ranks)] if len(plan.ranks) < len(_NUMBERS) else str(len(plan.ranks))
        parts.append(f"{time.efficiency:.0%} of the {count} {'cards' if plan.device == 'cuda' else 'machines'} together")
    text = ", ".join(parts)
    return f"{text[0].upper()}{text[1:]}."
