"""All flaws, grouped by what they are about."""

from __future__ import annotations

from homelab.errors import InputError, did_you_mean
from homelab.lab.flaws import cards, clock, material, network, packages, power, reach, room, wires
from homelab.lab.flaws.flaw import REGISTERED, Flaw

_MODULES = (network, wires, reach, clock, packages, room, power, cards, material)


def all_flaws() -> tuple[Flaw, ...]:
    """Every flaw there is."""
    places = [module.__name__ for module in _MODULES]
    return tuple(sorted(REGISTERED.values(), key=lambda flaw: places.index(flaw.module)))


def find(name: str) -> Flaw:
    """The flaw of this name. Raises InputError that lists what there is."""
    if name not in REGISTERED:
        raise InputError(
            f'no flaw "{name}".{did_you_mean(name, REGISTERED)}',
            where="the flaw",
            hint=f"there are: {', '.join(flaw.name for flaw in all_flaws())}",
        )
    return REGISTERED[name]
