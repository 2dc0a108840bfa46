"""All misconfigurations, sorted by the checks that find them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.lab.lab import Lab
from scripts.practice.misconfigurations import cables, cards, clock, login, network, packages, power, resources, training_files
from scripts.practice.misconfigurations.misconfiguration import REGISTERED, Misconfiguration

MODULES = (cables, cards, clock, login, network, packages, power, resources, training_files)  # importing them fills REGISTERED


def all_misconfigurations() -> tuple[Misconfiguration, ...]:
    """Every one there is."""
    return tuple(sorted(REGISTERED.values(), key=lambda entry: entry.checks[0]))


def find(name: str) -> Misconfiguration:
    """The one of this name. Raises InputError with the nearest name."""
    if name not in REGISTERED:
        raise InputError(
            f'no misconfiguration "{name}".{did_you_mean(name, REGISTERED)}',
            where="its name",
            hint="python -m scripts.practice.misconfigurations --list",
        )
    return REGISTERED[name]


@contextlib.contextmanager
def injected(lab: Lab, node: str, misconfiguration: Misconfiguration) -> Iterator[None]:
    """`node` has it meanwhile, and a card before where it needs one. Raises NotInjectable."""
    with contextlib.ExitStack() as stack:
        if "card" in misconfiguration.needs:
            stack.enter_context(cards.healthy(lab, node))
        stack.enter_context(misconfiguration.inject(lab, node))
        yield
