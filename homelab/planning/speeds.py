"""How fast every rank is believed to be before anything runs, and where that comes from.

In this order: measured by an earlier run of the same model and method; the owner's `speed` keys; a roofline of each card's data sheet
(a guess); equal. Where only some nodes have been measured, the others' guess is scaled by what was measured. Speeds decide who
computes how much, never the training, and the worker corrects them while it trains.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from homelab.config.cluster import Node
from homelab.config.recipe import Recipe
from homelab.facts import Facts
from homelab.hardware import Card, lookup
from homelab.planning.architecture import Architecture
from homelab.planning.measured import Measured
from homelab.planning.model import Choice
from homelab.planning.roofline import roofline
from homelab.worker.speed import Speed

MEASURED, SCALED, OWNER, DATA_SHEET, EQUAL = "measured", "scaled", "owner", "data sheet", "equal"
PerRank = dict[str, tuple[float, ...]]
Speeds = dict[str, tuple[Speed, ...]]


@dataclass(frozen=True)
class Belief:
    """What is believed of every node's ranks. `speeds` has all ranks or is None: relative `weights` (rows per time) always are there.

    `sources` says for each node where its speed comes from; `files` are the measurements that can be used.
    """

    weights: PerRank
    speeds: Speeds | None
    sources: Mapping[str, str]
    choice: Choice
    files: Mapping[str, Measured]


def believe(
    recipe: Recipe, nodes: Sequence[Node], facts: Mapping[str, Facts], device: str, precision: str,
    shape: Architecture | None, row_tokens: float, files: Mapping[str, Measured],
) -> Belief:  # fmt: skip
    """A speed for every rank of every node. One rank per card on "cuda" (as many as the node says, else its owner), one per node on "cpu".

    `row_tokens` is the mean length of a row, at which speeds are compared; `files` are the measurements that can be used.
    """
    assert nodes and device in ("cuda", "cpu")
    cards = {node.name: _cards(node, facts.get(node.name)) if device == "cuda" else [None] for node in nodes}
    known: Speeds = {name: tuple(rank.speed for rank in file.ranks) for name, file in files.items()}
    basis = _roofline(recipe, cards, precision, shape)
    owned = {node.name: _owned(node, cards[node.name]) for node in nodes if node.speed is not None}
    everybody_owned = len(owned) == len(nodes)

    def belief(speeds: Speeds, sources: Mapping[str, str], because: str) -> Belief:
        weights = {name: tuple(1 / row_s(speed, row_tokens) for speed in per_rank) for name, per_rank in speeds.items()}
        together = sum(sum(rates) for rates in weights.values())
        shown = [(name, f"{sum(rates) / together:.0%}") for name, rates in weights.items()]
        choice = Choice(subject="speeds", value=_list(shown), because=because)
        return Belief(weights, speeds, sources, choice, files)

    if len(known) == len(nodes):
        return belief({node.name: known[node.name] for node in nodes}, dict.fromkeys(known, MEASURED), _runs(files))
    silent = [node.name for node in nodes if node.name not in known]
    if known and (basis or everybody_owned):
        guess = basis or _like_measured(known, owned)
        pairs = [(speed, guess[name][rank]) for name in known for rank, speed in enumerate(known[name])]
        ratio = statistics.median(row_s(was, row_tokens) / row_s(guessed, row_tokens) for was, guessed in pairs)
        speeds = {
            node.name: known.get(node.name) or tuple(speed.slower(ratio) for speed in guess[node.name])
            for node in nodes
        }
        basis_name = "data sheets" if basis else "`speed` keys"
        because = f"{_runs(files)}; {', '.join(silent)}: not measured, guessed from the {basis_name} and the same ratio"
        return belief(speeds, {node.name: MEASURED if node.name in known else SCALED for node in nodes}, because)
    beside = f"; not used, because {', '.join(silent)} has none: speeds measured on {', '.join(known)}" if known else ""
    if everybody_owned:
        because = f"`speed` in cluster.toml, until speeds are measured{beside}"
        sources = dict.fromkeys(owned, OWNER)
        if basis:
            return belief(_in_proportion(basis, owned, row_tokens), sources, because)
        choice = Choice(subject="speeds", value=_list((n.name, f"{n.speed:g}") for n in nodes), because=because)
        return Belief(owned, None, sources, choice, files)
    without = [node.name for node in nodes if node.speed is None]
    beside += f"; `speed` is ignored because {', '.join(without)} has none" if owned else ""
    if basis:
        because = f"a guess from the cards' data sheets, until speeds are measured{beside}"
        return belief(basis, dict.fromkeys(basis, DATA_SHEET), because)
    unknown = [name for name, found in cards.items() if not all(found)]
    if device == "cuda" and not unknown:
        table = {name: tuple(card.peak_flops for card in found if card) for name, found in cards.items()}
        shown = _list((name, f"{sum(peaks) / 1e12:.0f} TFLOPS") for name, peaks in table.items())
        because = f"16-bit peak from the cards' data sheets, until speeds are measured{beside}"
        return Belief(
            table, None, dict.fromkeys(table, DATA_SHEET), Choice(subject="speeds", value=shown, because=because), files
        )
    reason = (
        f"no data sheet here for the card of {', '.join(unknown)}"
        if device == "cuda"
        else "nothing is known of the CPUs"
    )
    equal = {node.name: (1.0,) * len(cards[node.name]) for node in nodes}
    because = f"{reason} until the first run has measured them; `speed` of every node in cluster.toml says more{beside}"
    return Belief(
        equal, None, dict.fromkeys(equal, EQUAL), Choice(subject="speeds", value="equal", because=because), files
    )


def row_s(speed: Speed, row_tokens: float) -> float:
    """Seconds of one row in a pass of its own, without the fixed part of a step."""
    return speed.micro_batch_s + speed.token_s * row_tokens


def _cards(node: Node, facts: Facts | None) -> list[Card | None]:
    """A card per rank: as the node names them, or offline as the owner does; None for unknown ones."""
    names = [gpu.name for gpu in facts.gpus] if facts is not None else [gpu.model for gpu in node.gpus]
    assert names, f"{node.name} has no card and was not left out"
    return [lookup(name) for name in names]


def _roofline(
    recipe: Recipe, cards: Mapping[str, Sequence[Card | None]], precision: str, shape: Architecture | None
) -> Speeds | None:
    """A guess for every rank, or None where a single card (or the model's shape) is not known: unlike units are not mixed."""
    if shape is None or recipe.method is None or recipe.train is None:
        return None
    found: Speeds = {}
    for name, of_node in cards.items():
        known = [card for card in of_node if card is not None]
        if len(known) < len(of_node):
            return None
        found[name] = tuple(roofline(card, shape, recipe.method, recipe.train, precision) for card in known)
    return found


def _owned(node: Node, cards: Sequence[Card | None]) -> tuple[float, ...]:
    """The owner's `speed` of the whole node, divided over its cards by their data sheets."""
    assert node.speed is not None
    peaks = [card.peak_flops if card else 0.0 for card in cards]
    parts = [peak / sum(peaks) for peak in peaks] if all(peaks) else [1 / len(peaks)] * len(peaks)
    return tuple(node.speed * part for part in parts)


def _like_measured(known: Speeds, owned: PerRank) -> Speeds:
    """A Speed per rank in the owner's proportions, with the division into fixed and per-token cost of the first measured rank."""
    name = next(iter(known))
    model, weight = known[name][0], owned[name][0]
    return {node: tuple(model.slower(weight / own) for own in weights) for node, weights in owned.items()}


def _in_proportion(basis: Speeds, owned: PerRank, row_tokens: float) -> Speeds:
    """The guess for all ranks together, divided as the owner says."""
    rate = sum(1 / row_s(speed, row_tokens) for speeds in basis.values() for speed in speeds)
    total = sum(weight for weights in owned.values() for weight in weights)
    found = {}
    for name, speeds in basis.items():
        wanted = [rate * weight / total for weight in owned[name]]
        found[name] = tuple(
            speed.slower(1 / (own * row_s(speed, row_tokens))) for speed, own in zip(speeds, wanted, strict=True)
        )
    return found


def _runs(files: Mapping[str, Measured]) -> str:
    runs = list(dict.fromkeys(file.run for file in files.values() if file.run))
    return f"measured on {', '.join(files)}" + (f" by {', '.join(runs)}" if runs else "")


def _list(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{name} {value}" for name, value in pairs)
