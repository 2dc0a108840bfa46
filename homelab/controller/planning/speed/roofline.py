"""A guess of a card's training speed from its data sheet: floating-point work at the part of the peak that its class reaches, what is read
and written once a pass at its bandwidth, and the host's time to start its kernels.

Three things bound a pass (Williams, Waterman and Patterson 2009, for the first two): the arithmetic of its tokens, the weights that have to be
read whatever it holds, and the start of some hundred kernels per layer. A guess only: `scripts/bench foresight` compares it with what others
measured. One measured run replaces it.
"""

from __future__ import annotations

import re

from homelab.controller.base.hardware import Card
from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.model.adapters import WITH_EXPERTS, computed_parameters
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.types import TimeEstimate
from homelab.shared.law.speed import Speed
from homelab.shared.protocol import quantisation
from homelab.shared.recipe import Method, Train

# Which part of its data sheet's peak the 16-bit products of a whole step reach, by the names of cards, without what is said behind a name (memory
# size, PCIe, Laptop). One number for all cards is wrong by two to three between product lines. GeForce cards of the RTX 30, 40 and 50 series add up
# 16-bit products in 32 bits at half of their tensor cores' rate, which is the peak that `homelab.controller.base.hardware` has, and reach most of it.
# Cards with the full rate, and above all those that do it with 70 to 300 W, are held back by power and memory long before.
# Evidence, as published by others (scripts/benchmarks/published: rows of full sequences, transformers or torchtune; `lambda_list`: Lambda's
# training benchmark in fp16, relative to an RTX 3090). None was measured by us. Fitted on 31 rows: the median is off by a factor of 1.12.
_PARTS_OF_PEAK = {
    r"GTX .*|TITAN Xp?|P40?|P[2-6]\d00|M[46]0|K80|MX450|T\d{3,4}": 0.75,  # no tensor cores. 1080 Ti: .82 by Lambda
    r"T4G?|A2|L[24]": 0.165,  # 70 W. T4: .11 to .18 in eight rows; the others by analogy
    r"A100|A800|A30|G?V100S?|TITAN V|P100": 0.43,  # HBM. A100: .39 to .50 in 18 rows; V100: .34 by Lambda
    # an H100 has three times the peak of an A100 at 1.7 times its power: .23 by Lambda
    r"G?[HB][1-9]00|GH200|H20|GB[23]00": 0.25,
    r"GB10|(AGX )?(Orin|Thor)": 0.30,  # GB10: .35 in one report; the others by analogy
    r"A10G": 0.45,  # half rate like a GeForce card, at 150 W
    r"A10|A16|A40": 0.28,  # A10: .28 by Lambda
    r"L20|L40[SG]?|RTX \d+ (SFF )?Ada": 0.23,  # L40S: .24; RTX 6000 Ada: .21 by Lambda
    r"RTX A\d+|RTX PRO \d+": 0.38,  # A6000: .37 by Lambda, A4000: .45 in one report; RTX PRO by analogy
    r"RTX [3-8]000|TITAN RTX": 0.25,  # Quadro RTX: .22 to .32 by Lambda
    r"RTX 20\d\d": 0.38,  # 2080 Ti: .36, 2080 Laptop: .34, 2070 Laptop: .46 by Lambda
    r"RTX [3-5]0\d\d": 0.62,  # GeForce. 3090: .67, 4090: .56 to .82 in six rows
}
_OTHERS = 0.35
# Products of 4-bit weights are those of 16-bit ones, in pieces as they come out of the dequantisation: 0.85 to 1.0 in rows that have both. Experts in
# MXFP4 were not measured; they come in pieces, too.
NF4_PART = 0.9
# A quantised weight is read packed, written as a 16-bit one, and that is read by the product. Of MXFP4 the codes are written and read as int32, of two weights each.
_PACKED_BYTES = {None: 0.0, quantisation.INT8: 1.0 + 4, quantisation.NF4: quantisation.NF4_BYTES + 4, quantisation.MXFP4: 0.5 + 4 + 4}
# What the host needs to start the kernels of one layer, forward, again (checkpointing) and backward: passes of 256 and 512 tokens take the same
# 5.2 ms per layer (1.8B on an A100, published), 4.4 to 5.0 at 7B and 14B, 7.6 on an RTX 5090 in one report. NF4 starts more of them.
LAUNCH_S_PER_LAYER = {None: 0.0050, quantisation.INT8: 0.0060, quantisation.NF4: 0.0065, quantisation.MXFP4: 0.0050}
# Experts in 4 bits or with adapters are computed some at a time (`homelab.worker.model.fused_experts`), others all at once. Of one expert in the three rounds
# of a pass, measured on an H200 with a layer of Qwen3-30B-A3B and a product for each expert: 0.40 ms with 256 tokens, 0.41 with 2,048. One product for
# several experts, from Ampere on, has not been measured, and neither have adapters on them.
LAUNCH_S_PER_EXPERT = 0.0004
# Long rows are less slow than their products of attention at the layers' pace: flash attention stays in the card's caches. Of 8,192 to 32,768
# tokens, published for an A100: 1.4 to 1.7.
ATTENTION_OVER_LAYERS = 1.5
# Of 45 published rows (32 that the constants were fitted on, and 13 that they were not) nine in ten lie within this factor of the guess.
GUESS_FACTOR = 1.4
FP32_PART = 0.5  # of the 16-bit peak with 32-bit accumulation: GeForce cards compute fp32 at half of it
# AdamW reads weight, gradient and two moments in fp32 and writes weight and moments.
_OPTIMIZER_BYTES = 7 * 4


def flops_per_token(architecture: Architecture, method: Method, train: Train) -> float:
    """Floating-point operations of one trained token: forward 2 P, backward 2 P for activations and 2 P_trainable for weights.

    P are the weights that take part in products: the linears, of a mixture the experts that a token takes, and the head, tied or not. Checkpointing computes the blocks'
    forward again. Attention's own products stand in `attention_flops_per_token`.
    """
    head = architecture.vocabulary * architecture.hidden
    products = architecture.active_parameters + head
    trainable = products if method.kind == "full" else computed_parameters(architecture, method.rank, method.targets)
    again = 2 * architecture.active_parameters if train.gradient_checkpointing else 0
    return float(4 * products + 2 * trainable + again)


def attention_flops_per_token(architecture: Architecture, train: Train) -> float:
    """Products of queries with keys and of weights with values, of rows of seq_len tokens under a causal mask: 2 x seq_len x width forward,
    2.5 times that backward (flash attention computes the weights again), and the forward once more with checkpointing.
    """
    width = architecture.query_width * architecture.attention_layers
    if architecture.wide is not None:
        width += architecture.all_wide.query_width * len(architecture.wide.places)
    return (4.5 if train.gradient_checkpointing else 3.5) * 2 * train.seq_len * width


def roofline(card: Card, architecture: Architecture, method: Method, train: Train, precision: str) -> Speed:
    """The guessed Speed of one rank on this card."""
    quantised, rounds = architecture.held(method), 3 if train.gradient_checkpointing else 2
    reached = part_of_peak(card) * (NF4_PART if quantised in (quantisation.NF4, quantisation.MXFP4) else 1.0)
    peak = card.peak_flops * reached * (FP32_PART if precision == "fp32" else 1.0)
    few_bits = architecture.quantised_parameters(quantised)
    packed = _PACKED_BYTES[quantised]
    read_s = rounds * architecture.block_parameters * (4 if precision == "fp32" else 2) / card.bandwidth_bytes_per_s
    trainable = rank_memory.trainable_parameters(architecture, method)
    launch_s = LAUNCH_S_PER_LAYER[quantised] * architecture.layers
    in_turn = quantised == quantisation.NF4 or (method.kind != "full" and method.targets == WITH_EXPERTS)
    if architecture.experts is not None and ((architecture.experts.packs and in_turn) or quantised == quantisation.MXFP4):
        launch_s += LAUNCH_S_PER_EXPERT * architecture.experts.count * architecture.expert_layers
    return Speed(
        step_s=_OPTIMIZER_BYTES * trainable / card.bandwidth_bytes_per_s,
        micro_batch_s=rounds * few_bits * packed / card.bandwidth_bytes_per_s,
        token_s=(flops_per_token(architecture, method, train) + attention_flops_per_token(architecture, train) / ATTENTION_OVER_LAYERS)
        / peak,
        floor_s=max(rounds / 3 * launch_s, read_s),
    )


def interval(time: TimeEstimate) -> TimeEstimate:
    """With the figures between which the truth lies in nine of ten cases; as it is where speeds were measured."""
    if time.is_measured:
        return time
    low, high = (None, None) if time.hours is None else (time.hours / GUESS_FACTOR, time.hours * GUESS_FACTOR)
    rates = {"tokens_per_s_low": time.tokens_per_s / GUESS_FACTOR, "tokens_per_s_high": time.tokens_per_s * GUESS_FACTOR}
    return time.model_copy(update={**rates, "hours_low": low, "hours_high": high})


def part_of_peak(card: Card) -> float:
    """The part of `card.peak_flops` that the products of a training step reach in 16 bits."""
    return next((part for names, part in _PARTS_OF_PEAK.items() if re.match(rf"({names})( |$)", card.name)), _OTHERS)
