"""Which part of its data sheet's peak a card reaches in a training step, by class of card. Pure.

One number for all cards is wrong by two to three between product lines. GeForce cards of the RTX 30, 40 and 50 series add up 16-bit products
in 32 bits at half of their tensor cores' rate, which is the peak that `homelab.controller.base.hardware` has, and reach most of it. Cards with the full rate,
and above all those that do it with 70 to 300 W, are held back by power and memory long before.

Evidence, as published by others (scripts/benchmarks/published: rows of full sequences, transformers or torchtune; `lambda_list`: Lambda's
training benchmark in fp16, relative to an RTX 3090). None was measured by us. Fitted on 31 rows: the median is off by a factor of 1.12.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from homelab.controller.base.hardware import Card


@dataclass(frozen=True)
class _Class:
    """`names`: a pattern of the names of its cards, without what is said behind them (memory size, PCIe, Laptop). `of_peak`: the part of the
    peak that 16-bit products of a whole step reach."""

    names: str
    of_peak: float


_CLASSES = (
    _Class(r"GTX .*|TITAN Xp?|P40?|P[2-6]\d00|M[46]0|K80|MX450|T\d{3,4}", 0.75),  # no tensor cores. 1080 Ti: .82 by Lambda
    _Class(r"T4G?|A2|L[24]", 0.165),  # 70 W. T4: .11 to .18 in eight rows; the others by analogy
    _Class(r"A100|A800|A30|G?V100S?|TITAN V|P100", 0.43),  # HBM. A100: .39 to .50 in 18 rows; V100: .34 by Lambda
    # an H100 has three times the peak of an A100 at 1.7 times its power: .23 by Lambda
    _Class(r"G?[HB][1-9]00|GH200|H20|GB[23]00", 0.25),
    _Class(r"GB10|(AGX )?(Orin|Thor)", 0.30),  # GB10: .35 in one report; the others by analogy
    _Class(r"A10G", 0.45),  # half rate like a GeForce card, at 150 W
    _Class(r"A10|A16|A40", 0.28),  # A10: .28 by Lambda
    _Class(r"L20|L40[SG]?|RTX \d+ (SFF )?Ada", 0.23),  # L40S: .24; RTX 6000 Ada: .21 by Lambda
    _Class(r"RTX A\d+|RTX PRO \d+", 0.38),  # A6000: .37 by Lambda, A4000: .45 in one report; RTX PRO by analogy
    _Class(r"RTX [3-8]000|TITAN RTX", 0.25),  # Quadro RTX: .22 to .32 by Lambda
    _Class(r"RTX 20\d\d", 0.38),  # 2080 Ti: .36, 2080 Laptop: .34, 2070 Laptop: .46 by Lambda
    _Class(r"RTX [3-5]0\d\d", 0.62),  # GeForce. 3090: .67, 4090: .56 to .82 in six rows
)
_OTHERS = 0.35
# Products of 4-bit weights are those of 16-bit ones, in pieces as they come out of the dequantisation: 0.85 to 1.0 in rows that have both.
NF4_PART = 0.9


def of_peak(card: Card) -> float:
    """The part of `card.peak_flops` that the products of a training step reach in 16 bits."""
    return next((one.of_peak for one in _CLASSES if re.match(rf"({one.names})( |$)", card.name)), _OTHERS)
