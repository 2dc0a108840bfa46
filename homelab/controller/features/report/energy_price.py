"""The energy of a run, its price and its tokens per kWh, from what each node measured of its cards in each attempt. Pure.

Source of the unit: 1 kWh = 3.6 MJ. What a card does not tell is unknown, and what is unknown is never counted as 0.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from homelab.controller.config.cluster import EnergyPrice
from homelab.controller.features.report.run_report import CardEnergyRow, Energy
from homelab.controller.planning.types import Plan, RankPlan
from homelab.shared.protocol.run_messages import CardJoules

JOULES_PER_KWH = 3.6e6
Place = tuple[int, str]
"""An attempt and a node."""


@dataclass
class _Card:
    """What is added up of one card."""

    node: str
    name: str
    joules: float = 0.0
    is_told: bool = False
    measured_s: float = 0.0
    unmeasured_s: float = 0.0
    tokens: int = 0
    measured_tokens: int = 0
    has_tokens: bool = False
    because: list[str] = field(default_factory=list)


def energy(
    plans: Mapping[int, Plan], measured: Mapping[Place, Sequence[CardJoules]], tokens: Mapping[tuple[int, int], int], price: EnergyPrice
) -> Energy:
    """`measured`: attempt and node -> its cards; `tokens`: attempt and rank -> tokens of the steps that count: what was
    done in vain costs energy, and is no token of the training."""
    cards: dict[tuple[str, str], _Card] = {}
    for attempt, plan in sorted(plans.items()):
        ranks_of: dict[str, list[RankPlan]] = defaultdict(list)
        for rank in plan.ranks:
            ranks_of[rank.node].append(rank)
        for node, ranks in ranks_of.items():
            for rank in ranks:
                told = _card_of(rank, ranks, measured.get((attempt, node), ()))
                key = (node, (told.uuid if told else None) or rank.card or f"{rank.local_rank} {rank.device_name}")
                _add(
                    cards.setdefault(key, _Card(node, rank.device_name)),
                    told,
                    attempt,
                    tokens.get((attempt, rank.rank)),
                    is_cpu=plan.device != "cuda",
                )
    rows = tuple(_row(card) for card in cards.values())
    kwh = sum(row.kwh for row in rows if row.kwh is not None) if any(row.kwh is not None for row in rows) else None
    is_complete = bool(rows) and all(row.kwh is not None and not row.because for row in rows)
    counted = sum(card.measured_tokens for card in cards.values())
    return Energy(
        cards=rows, kwh=kwh, is_complete=is_complete, price_per_kwh=price.price_per_kwh, currency=price.currency,
        cost=price.cost(kwh),
        tokens_per_kwh=counted / kwh if kwh and counted and is_complete else None,
    )  # fmt: skip


def _card_of(rank: RankPlan, ranks: Sequence[RankPlan], cards: Sequence[CardJoules]) -> CardJoules | None:
    """The card of a rank: by its uuid, else by its number, where the node has as many cards as ranks."""
    if rank.card:
        return next((card for card in cards if card.uuid == rank.card), None)
    in_order = sorted(cards, key=lambda card: card.index)
    return in_order[rank.local_rank] if len(in_order) == len(ranks) and rank.local_rank < len(in_order) else None


def _add(card: _Card, told: CardJoules | None, attempt: int, tokens: int | None, *, is_cpu: bool) -> None:
    if tokens is not None:
        card.tokens, card.has_tokens = card.tokens + tokens, True
    if is_cpu:
        card.because.append("a processor: only graphics cards report their power")
    elif told is None:
        card.because.append(f"attempt {attempt} did not measure it")
    elif told.joules is None:
        card.because.append("the card does not report its power")
    else:
        card.joules, card.is_told = card.joules + told.joules, True
        card.measured_s, card.unmeasured_s = card.measured_s + told.measured_s, card.unmeasured_s + told.unmeasured_s
        card.measured_tokens += tokens or 0


def _row(card: _Card) -> CardEnergyRow:
    because = list(dict.fromkeys(card.because))
    if card.unmeasured_s >= max(1.0, 0.02 * card.measured_s) and card.is_told:
        because.append(f"{card.unmeasured_s:.0f} s without a measurement are not counted")
    kwh = card.joules / JOULES_PER_KWH if card.is_told and card.measured_s > 0 else None
    if card.is_told and kwh is None:
        because.append("too short to be measured")
    return CardEnergyRow(
        node=card.node, card=card.name, kwh=kwh, measured_s=card.measured_s, unmeasured_s=card.unmeasured_s,
        tokens=card.tokens if card.has_tokens else None, tokens_per_kwh=card.measured_tokens / kwh if kwh and card.measured_tokens else None,
        because="; ".join(because),
    )  # fmt: skip
