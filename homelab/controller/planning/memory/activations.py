"""What autograd keeps of a forward pass, and what one layer needs while it computes, in bytes."""

from __future__ import annotations

from dataclasses import dataclass

from homelab.controller.planning.memory.part_activations import Routed, made_by_delta, saved_by_delta
from homelab.controller.planning.model.adapters import WITH_EXPERTS, adapted_linears
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.model.layers import DeltaRule, Experts, Linear
from homelab.shared.protocol.quantisation import NF4
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


@dataclass(frozen=True)
class _Layer:
    """So many layers of one kind: the model as if all attended like them, their nn.Linear, the width of their MLP, their routed experts, and what they have in
    place of attention."""

    count: int
    model: Architecture
    linears: tuple[Linear, ...]
    wide: int
    experts: Experts | None = None
    delta: DeltaRule | None = None


def activation_bytes(
    architecture: Architecture, method: Method, train: Train, attention: Attention, tokens: int, *, device: str
) -> tuple[int, int]:
    """(saved between forward and backward, one layer's working set).

    With checkpointing a layer keeps its input only (T x h, in b bytes; 4 where full training runs under autocast, for then
    the residual stream is fp32) and is computed again: the working set is all one layer saves plus the temporaries of its
    backward. Without, every layer keeps what it saves, and the temporaries alone are the working set. After the last layer
    8 h more per token stay (final norm in fp32, its output).
    """
    each, hidden = width(attention.precision), architecture.hidden
    residual = 4 if method.kind == "full" else each
    copies = copies_inputs(method, attention.precision, device)
    every, most, working = 0, 0, 0
    for layer in _layers(architecture):
        saved = tokens * _saved_by_one_layer_per_token(architecture, layer, method, attention, train.seq_len, copies)
        made = tokens * _temporaries_per_token(architecture, layer, method, each, copies)
        if layer.experts is not None:
            routed = _routed(layer.experts, hidden, method, attention.precision, device)
            saved, made = saved + tokens * routed.saved(), max(made if layer.wide else 0, routed.working(tokens))
        if architecture.sinks:  # the gradient of the weights of all keys
            made = max(made, tokens * each * architecture.heads * train.seq_len)
        every, most, working = every + layer.count * saved, max(most, saved + made), max(working, made)
    ends = 8 * hidden + (2 * each * train.seq_len if architecture.sinks else 0)  # with sinks, two masks for all layers
    if train.gradient_checkpointing:
        return tokens * (hidden * residual * architecture.layers + ends), most
    return every + tokens * ends, working


def _layers(architecture: Architecture) -> tuple[_Layer, ...]:
    """The kinds of layers that the model has."""
    experts, wide, delta = architecture.experts, architecture.intermediate, architecture.delta
    mixers: list[tuple[int, Architecture, tuple[Linear, ...], DeltaRule | None]] = [
        (architecture.attention_layers, architecture, architecture.attention, None)
    ]
    if delta is not None:
        mixers.append((delta.layers, architecture, delta.block(architecture.hidden), delta))
    if architecture.wide is not None:
        mixers.append((len(architecture.wide.places), architecture.all_wide, architecture.all_wide.attention, None))
    kinds, dense_left = [], architecture.dense_layers
    for count, model, linears, rule in mixers:  # config.json may have the dense layers elsewhere; a model with both has few of them
        dense = min(count, dense_left)
        dense_left -= dense
        width = experts.shared_width if experts else wide
        kinds.append(_Layer(count - dense, model, (*linears, *architecture.mlp(width)), width, experts, rule))
        kinds.append(_Layer(dense, model, (*linears, *architecture.mlp(wide)), wide, None, rule))
    return tuple(kind for kind in kinds if kind.count)


def _routed(experts: Experts, hidden: int, method: Method, precision: str, device: str) -> Routed:
    """Trained experts are multiplied in the fp32 that they are held in. Of frozen ones in 16 or 32 bits, a card that computes no bf16 makes
    the gradient all the same (transformers, integrations/moe.py)."""
    if method.kind == "full":
        return Routed(experts, hidden, 4, grows=True)
    rank = method.rank if method.targets == WITH_EXPERTS else 0
    if rank or (experts.is_stored and method.backend != "unsloth") or (experts.packs and method.quantisation == NF4):
        return Routed(experts, hidden, width(precision), rank=rank)
    return Routed(experts, hidden, width(precision), grows=device == "cuda" and precision != "bf16")


def _temporaries_per_token(architecture: Architecture, layer: _Layer, method: Method, each: int, copies: bool) -> int:
    """What the backward pass of one layer makes for itself: measured, 3 b I + 6 h in 16 bit with `copies`, 2 b I + 6 h in fp32 (I:
    intermediate size), and 4 h more where norms compute in fp32 to their end. In 16 bit without copies 3 b I + 2 h, and where down_proj is adapted b I less:
    its input is gone by then. A delta rule needs its own after what the MLP has saved is gone.
    """
    hidden, wide = architecture.hidden, each * layer.wide
    if copies:
        most = 3 * wide + (10 if architecture.gated_output else 6) * hidden
    elif each == 4:
        most = 2 * wide + 6 * hidden
    else:
        is_adapted = any(linear.name == "down_proj" for linear, _ in adapted_linears(architecture, method.targets))
        most = (2 if is_adapted else 3) * wide + 2 * hidden
    if layer.delta is None:
        return most
    return max(most, made_by_delta(layer.delta, each) + 2 * hidden - 4 * wide)


def _saved_by_one_layer_per_token(
    architecture: Architecture, layer: _Layer, method: Method, attention: Attention, seq_len: int, copies: bool
) -> int:
    """Bytes per token that autograd keeps of one layer, without its routed experts.

    Norms: the input in fp32, and for trained norms the normalised input too. MLP: gate, its activation, up. Linears: a trained or adapted one keeps its
    input; with `copies` each reader has its own, without the readers of one tensor share it. A frozen linear keeps nothing. Adapters: r per adapted
    linear.
    """
    each, full = width(attention.precision), method.kind == "full"
    adapted = (
        {linear.name for linear in layer.linears} if full else {linear.name for linear, _ in adapted_linears(architecture, method.targets)}
    )
    trained = {linear.name: linear for linear in layer.linears if linear.name in adapted}
    total = 4 * architecture.norms_per_layer * architecture.hidden * (2 if full else 1)
    if layer.delta is not None:
        total += saved_by_delta(layer.delta, each, full=full)
    else:
        # In the mixed LoRA case the adapter's copy of the attention output is beside the one that attention itself keeps.
        output_apart = (copies and not full) or "o_proj" not in trained
        total += _saved_by_attention(layer.model, attention, seq_len, full=full, output_apart=output_apart)
    total += 3 * each * layer.wide
    inputs: dict[str, int] = {}
    for name, linear in trained.items():
        is_own = copies or name in ("o_proj", "out_proj", "down_proj")
        source = name if is_own else "mlp" if name.startswith(("gate", "up")) else "attention"
        inputs[source] = linear.inputs
    total += each * sum(inputs.values())
    return total + (0 if full else each * method.rank * len(trained))


def _saved_by_attention(architecture: Architecture, attention: Attention, seq_len: int, *, full: bool, output_apart: bool) -> int:
    """Bytes per token between forward and backward: norms of queries and keys as above, q, k and v (with a mask, or on a card that cannot do
    without, k and v are repeated for grouped queries), the output, the log-sum-exp, one row of the mask. Of a gated output the gate and what it
    multiplies, too.
    """
    each = width(attention.precision)
    query, key, value = architecture.query_width, architecture.key_width, architecture.value_width
    total = 4 * architecture.normed_width * (2 if full else 1)
    repeats = architecture.sinks or (attention.repeats_keys and not architecture.latent)
    total += each * (query + (2 * query if repeats else key + value))
    if architecture.value_norm:
        total += 4 * value * (2 if full else 1)
    if architecture.gated_output:
        total += (3 if each == 4 else 1) * each * query
    if architecture.sinks:  # no kernel: the weights of all keys
        return total + each * architecture.heads * seq_len
    total += each * (architecture.output_width if output_apart else 0) + 4 * architecture.heads
    return total + (each * seq_len if attention.masked else 0)
