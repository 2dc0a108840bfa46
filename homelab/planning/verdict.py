"""How to train on these machines, in words and with their numbers: together or alone, whole or sharded, at which precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from homelab.config.recipe import Recipe
from homelab.planning import memory, network
from homelab.planning.architecture import Architecture
from homelab.planning.model import RankPlan, TimeEstimate
from homelab.planning.network import Wire

WIRE_PART = 0.10  # of a step on the wire: more than this is worth doing something about


def lines(
    recipe: Recipe, shape: Architecture | None, precision: str, ranks: Sequence[RankPlan], found: TimeEstimate, wire: Wire
) -> tuple[str, ...]:  # fmt: skip
    """The decisions of a person who knows the figures, one sentence each."""
    nodes = list(dict.fromkeys(rank.node for rank in ranks))
    return (
        *_together(recipe, shape, precision, ranks, nodes, found, wire),
        *_who(nodes, found),
        *_smaller(recipe, shape, precision, ranks),
    )


def _together(
    recipe: Recipe, shape: Architecture | None, precision: str, ranks: Sequence[RankPlan], nodes: list[str], found: TimeEstimate, wire: Wire
) -> Iterator[str]:  # fmt: skip
    assert recipe.method is not None and recipe.train is not None
    if len(nodes) == 1:
        yield (
            f"one machine: nothing goes over the LAN; its {len(ranks)} cards share the batch"
            if len(ranks) > 1
            else "one machine, one rank: nothing goes over the LAN"
        )
        return
    part = found.wire_s / found.step_s
    yield f"ddp on {len(nodes)} machines: {found.wire_s:.2g} s of every {found.step_s:.3g} s step are on the wire ({part:.0%})"
    if part > WIRE_PART:
        ways = ["a larger global_batch (global_batch_max lets the launch raise it)"]
        if recipe.parallel.compress == "none":
            ways.append('compress = "bf16" (half the bytes, and no longer the same curve to the last digits)')
        yield f"the wire takes more than {WIRE_PART:.0%} of a step; what helps: {', or '.join(ways)}"
    if shape is not None:
        yield f"{network.price_of_sharding('fsdp', shape, recipe.method, precision, len(ranks), wire)} Not on this wire"


def _who(nodes: list[str], found: TimeEstimate) -> Iterator[str]:
    """Whoever costs more than they give. Looked at: all, all but the worst, and the best machine alone."""
    if len(nodes) < 2:
        return
    best, worst = (
        max(found.gains, key=lambda gain: gain.alone_tokens_per_s),
        min(found.gains, key=lambda gain: gain.gain),
    )
    without = found.tokens_per_s / (1 + worst.gain)
    if max(best.alone_tokens_per_s, without) <= found.tokens_per_s:
        return
    others = ",".join(name for name in nodes if name != worst.node)
    if without >= best.alone_tokens_per_s and others != best.node:
        yield f"leave {worst.node} out: it costs more than it gives ({without:.0f} tokens/s without it, {found.tokens_per_s:.0f} with it): --nodes {others}"
    else:
        yield f"stay on {best.node}: alone it does {best.alone_tokens_per_s:.0f} tokens/s, all together {found.tokens_per_s:.0f}: --nodes {best.node}"


def _smaller(recipe: Recipe, shape: Architecture | None, precision: str, ranks: Sequence[RankPlan]) -> Iterator[str]:
    """What to do about ranks that the model does not fit on."""
    short = list(dict.fromkeys(rank.node for rank in ranks if rank.memory is not None and rank.memory.fits is False))
    if not short or shape is None:
        return
    assert recipe.method is not None
    now = memory.base_weight_bytes(shape, recipe.method, precision)
    if recipe.method.kind == "qlora":
        yield f"it does not fit on {', '.join(short)} even in 4 bits ({now / 1e9:.2g} GB of weights): a shorter seq_len, a smaller model, or leave it out"
        return
    packed = memory.base_weight_bytes(shape, recipe.method.model_copy(update={"kind": "qlora"}), precision)
    yield f'quantise harder: it does not fit on {", ".join(short)}; kind = "qlora" holds the weights in {packed / 1e9:.2g} GB instead of {now / 1e9:.2g}'
