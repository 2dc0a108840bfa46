"""A guess of a card's training speed from its data sheet: floating-point work at an assumed utilisation, weights at its bandwidth.

Two lines bound a pass (Williams, Waterman and Patterson 2009): the arithmetic of its tokens, and the weights that have to be read
whatever it holds. A guess only: cooling, power limits and kernels move it by a factor of two, for all cards in the same direction
more than for one against another. One measured run replaces it.
"""

from __future__ import annotations

from homelab.config.recipe import Method, Train
from homelab.hardware import Card
from homelab.law.speed import Speed
from homelab.planning.memory import rank_memory
from homelab.planning.memory.architecture import Architecture
from homelab.protocol import quantisation

# Fraction of the data sheet's peak that a training step reaches (assumed: transformers without fused kernels reaches 0.3 to 0.45 in
# 16 bits). Quantised weights have to be turned into 16-bit ones before every product, which is less work for 8 bits than for NF4.
UTILISATION = {None: 0.35, quantisation.INT8: 0.3, quantisation.NF4: 0.25}
FP32_PART = 0.5  # of the 16-bit peak with 32-bit accumulation: GeForce cards compute fp32 at half of it
# AdamW reads weight, gradient and two moments in fp32 and writes weight and moments.
_OPTIMIZER_BYTES = 7 * 4


def flops_per_token(architecture: Architecture, method: Method, train: Train) -> float:
    """Floating-point operations of one trained token: forward 2 P, backward 2 P for activations and 2 P_trainable for weights.

    P are the weights that take part in products: the linears and the head, tied or not. Checkpointing computes the blocks'
    forward again. Attention's own products are left out: at 2048 tokens of a 7B model about 5 %.
    """
    head = architecture.vocabulary * architecture.hidden
    products = architecture.linear_parameters + head
    trainable = products if method.kind == "full" else rank_memory.trainable_parameters(architecture, method)
    again = 2 * architecture.linear_parameters if train.gradient_checkpointing else 0
    return float(4 * products + 2 * trainable + again)


def roofline(card: Card, architecture: Architecture, method: Method, train: Train, precision: str) -> Speed:
    """The guessed Speed of one rank on this card."""
    peak = card.peak_flops * (FP32_PART if precision == "fp32" else 1.0) * UTILISATION[method.quantisation]
    width = 4 if precision == "fp32" else 2
    rounds = 3 if train.gradient_checkpointing else 2
    linears = architecture.linear_parameters * width
    # A quantised weight is read packed, written as a 16-bit one, and that is read by the product.
    stored = {None: 0.0, quantisation.INT8: 1.0, quantisation.NF4: quantisation.NF4_BYTES}[method.quantisation]
    packed = architecture.linear_parameters * stored + linears if stored else 0.0
    moved = rounds * (linears + packed)
    trainable = rank_memory.trainable_parameters(architecture, method)
    return Speed(
        step_s=_OPTIMIZER_BYTES * trainable / card.bandwidth_bytes_per_s,
        micro_batch_s=moved / card.bandwidth_bytes_per_s,
        token_s=flops_per_token(architecture, method, train) / peak,
    )
