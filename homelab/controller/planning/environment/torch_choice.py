"""The build of torch that all nodes of a cluster get: the same one everywhere, with code for every card, and run by every driver. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.models import Value
from homelab.controller.base.torch_builds import BUILDS, FROM_TURING, TORCH, Build, Capability
from homelab.controller.base.units import listed
from homelab.controller.facts import card_generation
from homelab.controller.facts.node import Facts

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


class TorchChoice(Value):
    """`index`: the address for pip's --extra-index-url; None where PyPI alone has the build. `because`: what decided, for a person."""

    release: str
    tag: str  # "cu130", "cpu"
    index: str | None
    because: str

    @property
    def requirement(self) -> str:
        """The pin as pip reads it. PyPI's own build has no local part in its version."""
        return f"torch=={self.release}" + (f"+{self.tag}" if self.index else "")


def capabilities(facts: Facts) -> list[Capability]:
    """Compute capabilities of the node's cards, as driver or torch report them, else by their names; unknown (new) cards are left out."""
    known = (card_generation.of_card(card, facts.gpu) for card in facts.gpu.cards)
    return [capability for capability in known if capability is not None]


def fleet_build(facts: Mapping[str, Facts]) -> TorchChoice:
    """The newest release with one build for all of these nodes (by name). A node without NVIDIA cards takes any build.

    Raises HomelabError, which names drivers and cards, where there is none.
    """
    with_cards = {name: of_node for name, of_node in facts.items() if of_node.gpu.cards}
    if not with_cards:
        return TorchChoice(release=TORCH, tag="cpu", index=CPU_INDEX, because="no node has an NVIDIA card")
    cards = sorted({capability for of_node in with_cards.values() for capability in capabilities(of_node)})
    drivers = {name: driver for name, of_node in with_cards.items() if (driver := _driver(of_node)) is not None}
    oldest = min(drivers.values(), default=None)
    for release, builds in sorted(_releases().items(), key=lambda item: _numbers(item[0]), reverse=True):
        for build in builds:
            if build.runs_on(cards) and (oldest is None or oldest >= build.driver):
                return _choice(release, build, cards, drivers)
    raise _refusal(with_cards, cards, drivers)


def _releases() -> dict[str, tuple[Build, ...]]:
    """The newest patch of the release that is pinned, and x.y.0 of the others."""
    pinned = _numbers(TORCH)[:2]
    return {TORCH if pair == pinned else f"{pair[0]}.{pair[1]}.0": builds for pair, builds in BUILDS.items()}


def _choice(release: str, build: Build, cards: list[Capability], drivers: Mapping[str, int]) -> TorchChoice:
    from_pypi = release == TORCH and build == FROM_TURING
    because = f"it has code for {_architectures(cards)}" if cards else "no compute capability is known"
    if drivers:
        oldest = min(drivers, key=lambda name: drivers[name])
        because += f", and driver {drivers[oldest]} ({oldest}) runs CUDA {build.cuda}"
    newer = next((other for other in _releases()[TORCH] if other.runs_on(cards)), None)
    if release != TORCH and newer is not None:
        late = [name for name, driver in drivers.items() if driver < newer.driver]
        because += f"; torch {TORCH} needs driver {newer.driver} or newer on {listed(late)}"
    return TorchChoice(release=release, tag=build.tag, index=None if from_pypi else build.index, because=because)


def _refusal(with_cards: Mapping[str, Facts], cards: list[Capability], drivers: Mapping[str, int]) -> HomelabError:
    where = "; ".join(
        f"node {name}: driver {of_node.gpu.driver_version or 'not known'}, {listed(dict.fromkeys(card.name for card in of_node.gpu.cards))}"
        for name, of_node in with_cards.items()
    )
    # Of the builds with code for all cards, the one that asks for the oldest driver.
    fit = [build for builds in BUILDS.values() for build in builds if build.runs_on(cards)]
    if fit:
        needed = min(build.driver for build in fit)
        late = [name for name, driver in drivers.items() if driver < needed]
        return HomelabError(
            f"no build of torch runs with the driver of {listed(late)}", where=where,
            hint=Hint("install driver {} or newer on {}; then: {}", str(needed), listed(late), homelab("setup --check")),
        )  # fmt: skip
    return HomelabError(
        f"no build of torch has code for {_architectures(cards)} at once", where=where,
        hint=Hint("write a cluster file for each kind of card, then for each: {}", homelab("setup --check --cluster FILE")),
    )  # fmt: skip


def _architectures(cards: list[Capability]) -> str:
    return listed(f"sm_{major}{minor}" for major, minor in cards)


def _driver(facts: Facts) -> int | None:
    found = re.match(r"\d{1,9}", facts.gpu.driver_version or "")
    return int(found[0]) if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d{1,9}", version))
