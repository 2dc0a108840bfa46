"""How much slower a card computes that may not draw the power of its data sheet. Pure.

A laptop's maker chooses between a third and all of the power for which the data sheet gives the boost clock; an owner lowers a desktop card's
limit for less heat. Memory keeps its clock. Where nvidia-smi tells no limit ("N/A", most laptops of before 2022), nothing is said.
"""

from __future__ import annotations

from dataclasses import replace

from homelab.controller.base.data_sheets import LAPTOP_W
from homelab.controller.base.hardware import Card

# Speed goes with this power of the watts. RTX 4070 Laptop, boost by its data sheet: 1230 MHz at 35 W, 2175 MHz at 115 W (0.48); 60 W versions get
# 70 % in one published benchmark (0.55). Desktop: RTX 3090 at 280 of 350 W over 95 % of the training speed (Puget Systems, 0.23), another at 230 of
# 480 W 80 % (0.30). None was measured by us.
LAPTOP, DESKTOP = 0.5, 0.3
_LEAST = 0.3  # a limit of a few watts is a reading that errs


def limited(card: Card, limit_w: float | None, default_w: float | None) -> Card:
    """The card at this limit, in watts. A laptop part is compared with the most that its data sheet allows, a desktop one with the driver's default."""
    most = most_w(card, default_w)
    if not limit_w or not most or not 0 < limit_w < most:
        return card
    return replace(card, peak_flops=card.peak_flops * max(_LEAST, limit_w / most) ** (LAPTOP if card.laptop else DESKTOP))


def most_w(card: Card, default_w: float | None) -> float | None:
    """The watts for which the data sheet's speed is meant; None where nobody says."""
    return LAPTOP_W.get(card.name) if card.laptop else default_w
