"""How fast cards are against each other: Lambda's training benchmark (BERT and Transformer-XL in fp16, lambdal/deeplearning-benchmark), RTX 3090 = 1.

Older models and software than ours: it tells one product line from another, and no seconds.
"""

from __future__ import annotations

from homelab.controller.base.hardware import lookup
from homelab.controller.planning.speed import roofline

LAMBDA_LIST = {
    "RTX 6000 Ada": 1.65, "H100": 4.1, "H100 PCIe": 3.0, "A100 80GB": 2.39, "RTX A6000": 1.25, "A10": 0.75, "RTX 8000": 0.90, "TITAN RTX": 0.65, "Quadro RTX 6000": 0.63,
    "Quadro RTX 5000": 0.43, "V100": 0.93, "RTX 4090": 1.78, "RTX 2080 Ti": 0.42, "RTX 3080": 0.61, "RTX 2080 Laptop": 0.28, "RTX 2070 Laptop": 0.26, "GTX 1080 Ti": 0.20,
}  # fmt: skip


def factors() -> dict[str, float]:
    """Card -> our relative speed over the published one."""
    return {name: _rate(name) / _rate("RTX 3090") / published for name, published in LAMBDA_LIST.items()}


def _rate(name: str) -> float:
    card = lookup(name)
    assert card is not None, name
    return card.peak_flops * roofline.part_of_peak(card)
