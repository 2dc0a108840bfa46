"""How fast every rank is before anything runs, as an estimate, and where that comes from.

In this order: measured by an earlier run of the same model and method; the owner's `speed` keys; a roofline of each card's data sheet
(a guess), moved by what others have measured on such a card; equal. Where only some nodes have been measured, the others' guess is scaled by what was measured. Speeds decide who
computes how much, never the training, and the worker corrects them while it trains.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from homelab.controller.base.hardware import Card
from homelab.controller.config.cluster import Node
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.planning.machines import card_guess
from homelab.controller.planning.machines.machines import Machines
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.speed import measured_cards, measured_speed
from homelab.controller.planning.speed.measured_cards import MeasuredCard, Moved
from homelab.controller.planning.speed.roofline import roofline
from homelab.controller.planning.speed.speed_profiles import SpeedProfile
from homelab.controller.planning.types import Choice
from homelab.shared.law.speed import Speed

MEASURED, SCALED, OWNER, DATA_SHEET, EQUAL = "measured", "scaled", "owner", "data sheet", "equal"
PerRank = dict[str, tuple[float, ...]]
Speeds = dict[str, tuple[Speed, ...]]


@dataclass(frozen=True)
class SpeedEstimate:
    """The speed of every node's ranks. `speeds` has all ranks or is None: relative `weights` (rows per time) always are there.

    `sources` says for each node where its speed comes from; `files` are the measurements that can be used.
    """

    weights: PerRank
    speeds: Speeds | None
    sources: Mapping[str, str]
    choice: Choice
    files: Mapping[str, SpeedProfile]
    row_tokens: float = 1.0

    def slowdown(self, strategy: str, ranks: int) -> float:
        """How many times as long the passes take with this strategy on so many ranks, as earlier runs have measured it; 1 where none has."""
        runs = [rank.runs for file in self.files.values() for rank in file.ranks]
        return measured_speed.slowdown(runs, strategy, ranks, self.row_tokens)


def estimate_speeds(
    recipe: TrainRecipe, machines: Machines, guessing: Guessing, row_tokens: float, files: Mapping[str, SpeedProfile]
) -> SpeedEstimate:
    """A speed for every rank of every node.

    `row_tokens` is the mean length of a row, at which speeds are compared; `files` are the measurements that can be used.
    """
    nodes = machines.nodes
    assert nodes
    cards = card_guess.sheets(machines) if machines.device == "cuda" else {node.name: [None] for node in nodes}
    owned = {node.name: _owned(node, cards[node.name]) for node in nodes if node.speed is not None}
    by_others = _by_others(recipe, cards, guessing)
    basis = _Basis(nodes, cards, _roofline(recipe, cards, guessing, by_others), owned, row_tokens, files)
    measured: Speeds = {name: tuple(rank.speed for rank in file.ranks) for name, file in files.items()}
    if len(measured) == len(nodes):
        return basis.estimate({node.name: measured[node.name] for node in nodes}, dict.fromkeys(measured, MEASURED), _runs(files))
    if measured and (basis.roofline or basis.all_owned):
        return _partly_measured(basis, measured)
    silent = [node.name for node in nodes if node.name not in measured]
    unused = f"; not used, because {', '.join(silent)} has none: speeds measured on {', '.join(measured)}" if measured else ""
    if basis.all_owned:
        return _from_owner(basis, f"`speed` in cluster.toml, until speeds are measured{unused}")
    without = [node.name for node in nodes if node.speed is None]
    unused += f"; `speed` is ignored because {', '.join(without)} has none" if owned else ""
    if basis.roofline:
        because = f"a guess from the cards' data sheets{_told(by_others)}, until speeds are measured{unused}"
        return basis.estimate(basis.roofline, _sources(cards, by_others), because)
    return _weights_alone(basis, machines.device, unused)


def is_measured(sources: Iterable[str]) -> bool:
    """Whether speeds from these sources were measured on these machines, all of them or all that the others are scaled by."""
    return set(sources) <= {MEASURED, SCALED}


@dataclass(frozen=True)
class Guessing:
    """What a speed is guessed from: the precision, the model's shape (None: not known), and what others have measured."""

    precision: str
    shape: Architecture | None
    measured_cards: Sequence[MeasuredCard] = ()


@dataclass(frozen=True)
class _Basis:
    """What an estimate rests on. `roofline` is None on CPUs, and where the model's shape is not known."""

    nodes: Sequence[Node]
    cards: Mapping[str, Sequence[Card | None]]
    roofline: Speeds | None
    owned: PerRank
    row_tokens: float
    files: Mapping[str, SpeedProfile]

    @property
    def all_owned(self) -> bool:
        """True where cluster.toml gives the speed of every node."""
        return len(self.owned) == len(self.nodes)

    def estimate(self, speeds: Speeds, sources: Mapping[str, str], because: str) -> SpeedEstimate:
        """The estimate with these speeds."""
        weights = {name: tuple(1 / speed.pass_s(self.row_tokens) for speed in per_rank) for name, per_rank in speeds.items()}
        together = sum(sum(rates) for rates in weights.values())
        portions = [(name, f"{sum(rates) / together:.0%}") for name, rates in weights.items()]
        return SpeedEstimate(
            weights, speeds, sources, Choice(subject="speeds", value=_list(portions), because=because), self.files, self.row_tokens
        )

    def relative(self, weights: PerRank, source: str, value: str, because: str) -> SpeedEstimate:
        """The estimate where relative weights are all that is known."""
        choice = Choice(subject="speeds", value=value, because=because)
        return SpeedEstimate(weights, None, dict.fromkeys(weights, source), choice, self.files, self.row_tokens)


def _partly_measured(basis: _Basis, measured: Speeds) -> SpeedEstimate:
    """The measured speeds, and for the other nodes the guess times the ratio that was measured."""
    silent = [node.name for node in basis.nodes if node.name not in measured]
    guess = basis.roofline or _like_measured(measured, basis.owned)
    pairs = [(speed, guess[name][rank]) for name in measured for rank, speed in enumerate(measured[name])]
    ratio = statistics.median(was.pass_s(basis.row_tokens) / guessed.pass_s(basis.row_tokens) for was, guessed in pairs)
    speeds = {node.name: measured.get(node.name) or tuple(speed.slower(ratio) for speed in guess[node.name]) for node in basis.nodes}
    basis_name = "data sheets" if basis.roofline else "`speed` keys"
    because = f"{_runs(basis.files)}; {', '.join(silent)}: not measured, guessed from the {basis_name} and the same ratio"
    return basis.estimate(speeds, {node.name: MEASURED if node.name in measured else SCALED for node in basis.nodes}, because)


def _from_owner(basis: _Basis, because: str) -> SpeedEstimate:
    if basis.roofline:
        return basis.estimate(_in_proportion(basis.roofline, basis.owned, basis.row_tokens), dict.fromkeys(basis.owned, OWNER), because)
    return basis.relative(basis.owned, OWNER, _list((node.name, f"{node.speed:g}") for node in basis.nodes), because)


def _weights_alone(basis: _Basis, device: str, unused: str) -> SpeedEstimate:
    """Where no seconds are known: the cards' peaks, or equal weights."""
    if device == "cuda":
        peaks = {name: tuple(card.peak_flops for card in cards if card) for name, cards in basis.cards.items()}
        peaks_text = _list((name, f"{sum(per_rank) / 1e12:.0f} TFLOPS") for name, per_rank in peaks.items())
        return basis.relative(peaks, DATA_SHEET, peaks_text, f"16-bit peak from the cards' data sheets, until speeds are measured{unused}")
    equal = {name: (1.0,) * len(cards) for name, cards in basis.cards.items()}
    because = f"the speed of the CPUs is not known until the first run measures it; or set `speed` of every node in cluster.toml{unused}"
    return basis.relative(equal, EQUAL, "equal", because)


def _roofline(
    recipe: TrainRecipe, cards: Mapping[str, Sequence[Card | None]], guessing: Guessing, by_others: Mapping[str, Moved]
) -> Speeds | None:
    """A guess for every rank; None on CPUs, and where the model's shape is not known."""
    shape = guessing.shape
    if shape is None:
        return None

    def guess(card: Card) -> Speed:
        speed = roofline(card, shape, recipe.method, recipe.train, guessing.precision)
        return by_others[card.name].speed(speed) if card.name in by_others else speed

    speeds: Speeds = {}
    for name, of_node in cards.items():
        sheets = [card for card in of_node if card is not None]
        if len(sheets) < len(of_node):
            return None
        speeds[name] = tuple(map(guess, sheets))
    return speeds


def _by_others(recipe: TrainRecipe, cards: Mapping[str, Sequence[Card | None]], guessing: Guessing) -> dict[str, Moved]:
    """Card -> what others have measured on it, for the cards of these machines that somebody has measured."""
    kinds = {card.name: card for of_node in cards.values() for card in of_node if card is not None}
    found = {name: measured_cards.moved(guessing.measured_cards, card, recipe.method, guessing.precision) for name, card in kinds.items()}
    return {name: moved for name, moved in found.items() if moved is not None}


def _sources(cards: Mapping[str, Sequence[Card | None]], by_others: Mapping[str, Moved]) -> dict[str, str]:
    """Node -> where the guess of its cards comes from: others' figures only where all of its cards have some."""
    found = {name: [by_others.get(card.name) if card else None for card in of_node] for name, of_node in cards.items()}
    return {
        name: measured_cards.words([moved for moved in of_node if moved]) if all(of_node) else DATA_SHEET for name, of_node in found.items()
    }


def _told(by_others: Mapping[str, Moved]) -> str:
    """Which cards others have measured, and who they are."""
    return "".join(
        f"; {name} {measured_cards.words([moved])} ({moved.ratio:.2f} of the data sheet's guess)" for name, moved in by_others.items()
    )


def _owned(node: Node, cards: Sequence[Card | None]) -> tuple[float, ...]:
    """The owner's `speed` of the whole node, divided over its cards by their data sheets."""
    assert node.speed is not None
    peaks = [card.peak_flops if card else 0.0 for card in cards]
    parts = [peak / sum(peaks) for peak in peaks] if all(peaks) else [1 / len(peaks)] * len(peaks)
    return tuple(node.speed * part for part in parts)


def _like_measured(measured: Speeds, owned: PerRank) -> Speeds:
    """A Speed per rank in the owner's proportions, with the division into fixed and per-token cost of the first measured rank."""
    name = next(iter(measured))
    model, weight = measured[name][0], owned[name][0]
    return {node: tuple(model.slower(weight / own) for own in weights) for node, weights in owned.items()}


def _in_proportion(basis: Speeds, owned: PerRank, row_tokens: float) -> Speeds:
    """The guess for all ranks together, divided as the owner says."""
    rate = sum(1 / speed.pass_s(row_tokens) for speeds in basis.values() for speed in speeds)
    total = sum(weight for weights in owned.values() for weight in weights)
    speeds_of = {}
    for name, speeds in basis.items():
        rates = [rate * weight / total for weight in owned[name]]
        speeds_of[name] = tuple(speed.slower(1 / (own * speed.pass_s(row_tokens))) for speed, own in zip(speeds, rates, strict=True))
    return speeds_of


def _runs(files: Mapping[str, SpeedProfile]) -> str:
    runs = list(dict.fromkeys(file.run for file in files.values() if file.run))
    return f"measured on {', '.join(files)}" + (f" by {', '.join(runs)}" if runs else "")


def _list(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in pairs)
