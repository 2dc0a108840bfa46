"""What autograd keeps of a forward pass, and what one layer needs while it computes, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from homelab.controller.planning.model.adapters import adapted_linears
from homelab.controller.planning.model.architecture import Architecture
from homelab.shared.recipe import Method, Train


@dataclass(frozen=True)
class Attention:
    """How attention computes: in which precision, with a mask or without, and whether it repeats keys for grouped queries."""

    precision: str
    masked: bool
    repeats_keys: bool


def copies_inputs(method: Method, precision: str, device: str) -> bool:
    """Whether every trained or adapted linear keeps a 16-bit copy of its input for itself: autocast makes one from the fp32 that full training
    has, or that PEFT makes for an adapter. Beside a quantised matrix PEFT makes none where CUDA's autocast is on (peft/tuners/lora/bnb.py), and the
    readers of one tensor share it."""
    return precision != "fp32" and not (method.quantisation and device == "cuda")


def width(precision: str) -> int:
    """Bytes of an activation."""
    assert precision in ("fp32", "bf16", "fp16")
    return 4 if precision == "fp32" else 2


def activation_bytes(
    architecture: Architecture, method: Method, train: Train, attention: Attention, tokens: int, *, copies: bool
) -> tuple[int, int]:
    """(saved between forward and backward, one layer's working set).

    With checkpointing a layer keeps its input only (T x h, in b bytes; 4 where full training runs under autocast, for then
    the residual stream is fp32) and is computed again: the working set is all one layer saves plus the temporaries of its
    backward. Without, every layer keeps what it saves, and the temporaries alone are the working set. After the last layer
    8 h more per token stay (final norm in fp32, its output). `copies` as `copies_inputs` says.
    """
    each, hidden = width(attention.precision), architecture.hidden
    residual = 4 if method.kind == "full" else each
    per_layer = _saved_by_one_layer_per_token(architecture, method, attention, train.seq_len, copies)
    temporaries = _temporaries_per_token(architecture, method, each, copies)
    if train.gradient_checkpointing:
        return tokens * hidden * (residual * architecture.layers + 8), tokens * (per_layer + temporaries)
    return tokens * (architecture.layers * per_layer + 8 * hidden), tokens * temporaries


def _temporaries_per_token(architecture: Architecture, method: Method, each: int, copies: bool) -> int:
    """What the backward pass of one layer makes for itself: measured, 3 b I + 6 h in 16 bit with `copies`, 2 b I + 6 h in fp32 (I:
    intermediate size). In 16 bit without copies 3 b I + 2 h, and where down_proj is adapted b I less: its input is gone by then.
    """
    hidden, wide = architecture.hidden, each * architecture.intermediate
    if copies:
        return 3 * wide + 6 * hidden
    if each == 4:
        return 2 * wide + 6 * hidden
    is_adapted = any(linear.name == "down_proj" for linear, _ in adapted_linears(architecture, method.targets))
    return (2 if is_adapted else 3) * wide + 2 * hidden


def _saved_by_one_layer_per_token(architecture: Architecture, method: Method, attention: Attention, seq_len: int, copies: bool) -> int:
    """Bytes per token that autograd keeps of one layer.

    Norms: the input in fp32, and for trained norms the normalised input too. Attention: q, k and v (with a mask, or
    on a card that cannot do without, k and v are repeated for grouped queries), the output, the log-sum-exp, one row of the mask. MLP:
    gate, its activation, up. Linears: a trained or adapted one keeps its input; with `copies` each reader has its own, without the readers
    of one tensor share it. A frozen linear keeps nothing. Adapters: r per adapted linear.
    """
    each, full = width(attention.precision), method.kind == "full"
    query, key = architecture.query_width, architecture.key_width
    if full:
        trained = {linear.name: linear for linear in architecture.block}
    else:
        block = {linear.name for linear in architecture.block}
        adapted = adapted_linears(architecture, method.targets)
        trained = {linear.name: linear for linear, _ in adapted if linear.name in block}
    norms = architecture.norms_per_layer * architecture.hidden + (query + key if architecture.query_key_norm else 0)
    total = 4 * norms * (2 if full else 1)
    # In the mixed LoRA case the adapter's copy of the attention output is beside the one that attention itself keeps.
    output_apart = (copies and not full) or "o_proj" not in trained
    total += each * query * (2 if output_apart else 1) + 2 * each * (query if attention.repeats_keys else key) + 4 * architecture.heads
    total += each * seq_len if attention.masked else 0
    total += 3 * each * architecture.intermediate
    inputs: dict[str, int] = {}
    for name, linear in trained.items():
        source = name if copies or name in ("o_proj", "down_proj") else "mlp" if name.startswith(("gate", "up")) else "attention"
        inputs[source] = linear.inputs
    total += each * sum(inputs.values())
    return total + (0 if full else each * method.rank * len(trained))
