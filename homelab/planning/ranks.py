"""The processes of a plan: one per card, each with its share, its micro-batch and what it will hold in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from homelab.config.cluster import Node
from homelab.config.recipe import Recipe
from homelab.facts import Facts
from homelab.planning import architecture, fit, memory, shares
from homelab.planning.architecture import Architecture
from homelab.planning.fit import Place, Situation
from homelab.planning.model import Choice, MemoryEstimate, RankPlan, RankSpeed
from homelab.planning.outlook import Outlook
from homelab.planning.speeds import Belief

_CPU_MICRO_BATCH = 4  # on a CPU larger batches gain little (measured: 135M parameters, two cores) and cost memory


def card_count(node: Node, facts: Mapping[str, Facts]) -> int:
    """CUDA cards of a node: as it says itself, or offline as its owner does."""
    return len(facts[node.name].gpus) if node.name in facts else len(node.gpus)


def rank_count(node: Node, facts: Mapping[str, Facts], device: str) -> int:
    """Processes of a node: one per card, one for a CPU."""
    return card_count(node, facts) if device == "cuda" else 1


def plan_ranks(
    absent: Collection[str], recipe: Recipe, nodes: list[Node], facts: Mapping[str, Facts], device: str, precision: str,
    shape: Architecture | None, outlook: Outlook | None, choices: list[Choice], warnings: list[str],
) -> list[RankPlan]:  # fmt: skip
    """Every process of the plan in rank order. Adds its reasons to `choices` and what a person should know to `warnings`."""
    slots = [(node, local) for node in nodes for local in range(rank_count(node, facts, device))]
    if recipe.train is None or recipe.method is None or recipe.model is None or outlook is None:
        return [
            RankPlan(
                rank=rank,
                node=node.name,
                local_rank=local,
                device_name=_device_name(node, local, facts, device),
                share=0,
                micro_batch=0,
                card=_card(node, local, facts, device),
            )
            for rank, (node, local) in enumerate(slots)
        ]
    counts, share_choices = shares.decide(recipe, outlook.belief, outlook.rows, device, absent)
    choices += share_choices
    found = []
    situation = situation_of(shape, slots, facts, precision, device)
    caps = _token_caps(recipe, situation, len(slots), warnings) if situation else {}
    for rank, (node, local) in enumerate(slots):
        available, held = _room(node, local, facts, device)
        micro_batch, because = _micro_batch(recipe, shape, precision, device, counts[rank], len(slots), available, held)
        estimate = None
        if shape is not None:
            items = memory.estimate(
                shape,
                recipe.method,
                recipe.train.model_copy(update={"seq_len": caps.get(rank) or recipe.train.seq_len}),
                precision=precision,
                device=device,
                micro_batch=micro_batch,
                world_size=len(slots),
                masked=_masked(recipe, micro_batch),
                compress=recipe.parallel.compress,
                held_by_others_bytes=held,
            )
            estimate = MemoryEstimate(items=items, available_bytes=available)
            if estimate.fits is False:
                short = estimate.total_bytes - (available or 0)
                mend = (
                    "leave it out with --nodes, or homelab plan RECIPE --fit"
                    if rank in caps
                    else "homelab plan RECIPE --fit, or a smaller micro_batch"
                )
                warnings.append(
                    f"rank {rank} on {node.name} needs about {(estimate.total_bytes - held) / 1e9:.1f} GB, "
                    f"{((available or 0) - held) / 1e9:.1f} GB are free, {short / 1e9:.1f} GB too little: {mend}"
                )
        choices.append(Choice(subject=f"micro-batch of rank {rank}", value=str(micro_batch), because=because))
        name = _device_name(node, local, facts, device)
        found.append(
            RankPlan(
                rank=rank,
                node=node.name,
                local_rank=local,
                device_name=name,
                share=counts[rank],
                micro_batch=micro_batch,
                memory=estimate,
                speed=_speed(outlook.belief, node.name, local),
                token_cap=caps.get(rank),
                card=_card(node, local, facts, device),
            )
        )
    return found


def situation_of(
    shape: Architecture | None, slots: list[tuple[Node, int]], facts: Mapping[str, Facts], precision: str, device: str
) -> Situation | None:
    """What every rank's memory depends on, with the ranks whose memory is known; None where nothing is."""
    rooms = [(rank, node.name, *_room(node, local, facts, device)) for rank, (node, local) in enumerate(slots)]
    places = tuple(Place(rank, name, available, held) for rank, name, available, held in rooms if available is not None)
    return Situation(shape, precision, device, len(slots), places) if shape is not None and places else None


def _token_caps(recipe: Recipe, situation: Situation, world_size: int, warnings: list[str]) -> dict[int, int]:
    """The longest row of every rank that has no room for one of seq_len. Raises DoesNotFit when no rank has."""
    assert recipe.train is not None
    caps = {
        place.rank: cap for place in situation.places if (cap := fit.token_cap(recipe, situation, place)) is not None
    }
    if len(caps) == world_size:
        raise fit.impossible(recipe, situation)
    for place in situation.places:
        if caps.get(place.rank):
            short = fit.needed_bytes(recipe, situation, place, tokens=recipe.train.seq_len) - place.available_bytes
            warnings.append(
                f"rank {place.rank} on {place.node} has room for rows of up to {caps[place.rank]} tokens of {recipe.train.seq_len}: longer ones "
                f"go to other ranks; for all of them it lacks {short / 1e9:.1f} GB: homelab plan RECIPE --fit"
            )
    return caps


def _masked(recipe: Recipe, micro_batch: int) -> bool:
    """Whether attention needs a mask: rows that are packed, or of different length beside each other."""
    return micro_batch > 1 or (recipe.data is not None and recipe.data.packing)


def _speed(belief: Belief, node: str, local: int) -> RankSpeed | None:
    """What is believed of a rank's speed, as data; None where nothing is."""
    if belief.speeds is None:
        return None
    speed = belief.speeds[node][local]
    return RankSpeed(step_s=speed.step_s, micro_batch_s=speed.micro_batch_s, token_s=speed.token_s)


def shape_of(name: str, facts: Mapping[str, Facts]) -> Architecture | None:
    """The model's shape: from its config.json as a node has it, else from what is known of the name."""
    for node in facts.values():
        if node.model and node.model.config:
            return architecture.from_config(node.model.config)
    return architecture.known(name)


def _room(node: Node, local: int, facts: Mapping[str, Facts], device: str) -> tuple[int | None, int]:
    """(memory of the card or machine, what others hold of it now), in bytes."""
    known = facts.get(node.name)
    if device == "cpu":
        if known is None or known.memory_total_bytes is None:
            return None, 0
        return known.memory_total_bytes, known.memory_total_bytes - (known.memory_available_bytes or 0)
    if known is None:
        return int(node.gpus[local].vram_gb * 2**30), 0
    card = known.gpus[local]
    return card.memory_total_bytes, card.memory_used_bytes or 0


def _micro_batch(
    recipe: Recipe,
    shape: Architecture | None,
    precision: str,
    device: str,
    share: int,
    world_size: int,
    available: int | None,
    held: int,
) -> tuple[int, str]:
    assert recipe.method is not None and recipe.train is not None
    asked = recipe.parallel.micro_batch
    if asked != "auto":
        return min(
            asked, share
        ), "the recipe says so" if asked <= share else f"the recipe says {asked}, its share is {share}"
    if shape is None or available is None:
        return min(share, _CPU_MICRO_BATCH if device == "cpu" else 1), "the memory is not known here: a careful start"
    most = memory.largest_micro_batch(
        shape, recipe.method, recipe.train, precision=precision, device=device, share=share, world_size=world_size,
        available_bytes=available, held_by_others_bytes=held, masked=True if _masked(recipe, 1) else None,
        compress=recipe.parallel.compress,
    )  # fmt: skip
    if device == "cpu":
        return max(1, min(most, _CPU_MICRO_BATCH, share)), "what fits in memory; on a CPU more than 4 rows gain little"
    return max(
        1, most
    ), "the largest that fits in the card's free memory" if most else "not even one row fits by the estimate"


def _card(node: Node, local: int, facts: Mapping[str, Facts], device: str) -> str | None:
    return facts[node.name].gpus[local].uuid if device == "cuda" and node.name in facts else None


def _device_name(node: Node, local: int, facts: Mapping[str, Facts], device: str) -> str:
    if device == "cpu":
        return (
            f"CPU, {facts[node.name].cpu_count} core{'s' if facts[node.name].cpu_count > 1 else ''}"
            if node.name in facts
            else "CPU"
        )
    return facts[node.name].gpus[local].name if node.name in facts else node.gpus[local].model
