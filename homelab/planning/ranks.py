"""The processes of a plan: one per card, each with its share, its micro-batch and what it will hold in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from homelab.config.cluster import Node
from homelab.config.recipe import Recipe
from homelab.facts import Facts, GpuFacts
from homelab.planning import architecture, fit, memory, shares
from homelab.planning.architecture import Architecture
from homelab.planning.attention import repeats_keys
from homelab.planning.fit import Place, Situation
from homelab.planning.measured import Measured
from homelab.planning.model import Choice, MemoryEstimate, RankPlan, RankSpeed
from homelab.planning.outlook import Outlook
from homelab.planning.speeds import Belief
from homelab.planning.wsl import without_paging

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
    situation = situation_of(shape, slots, facts, precision, device, outlook.belief.files)
    caps = _token_caps(recipe, situation, len(slots), warnings) if situation else {}
    for rank, (node, local) in enumerate(slots):
        available, held = _room(node, local, facts, device)
        name = _device_name(node, local, facts, device)
        repeats = repeats_keys(device, precision, name)
        beside = _beside_torch(outlook.belief.files.get(node.name), local)
        micro_batch, because = _micro_batch(
            recipe, shape, precision, device, counts[rank], len(slots), available, held, repeats, beside
        )
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
                repeats_keys=repeats,
                held_by_others_bytes=held,
                measured=beside,
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
    shape: Architecture | None, slots: list[tuple[Node, int]], facts: Mapping[str, Facts], precision: str, device: str,
    files: Mapping[str, Measured],
) -> Situation | None:  # fmt: skip
    """What every rank's memory depends on, with the ranks whose memory is known; None where nothing is."""
    places = []
    for rank, (node, local) in enumerate(slots):
        available, held = _room(node, local, facts, device)
        if available is not None:
            repeats = repeats_keys(device, precision, _device_name(node, local, facts, device))
            beside = _beside_torch(files.get(node.name), local)
            places.append(Place(rank, node.name, available, held, repeats, beside))
    pages = not without_paging((node.name for node, _ in slots), facts)
    return Situation(shape, precision, device, len(slots), tuple(places), pages) if shape is not None and places else None


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
    """(memory of the card or machine, what of it is not free now), in bytes: others hold it, or the driver keeps it."""
    known = facts.get(node.name)
    if device == "cpu":
        if known is None or known.memory_total_bytes is None:
            return None, 0
        return known.memory_total_bytes, known.memory_total_bytes - (known.memory_available_bytes or 0)
    if known is None:
        return int(node.gpus[local].vram_gb * 2**30), 0
    return _room_of_card(known.gpus[local])


def _room_of_card(card: GpuFacts) -> tuple[int | None, int]:
    """Of a card that MIG has split, its smallest instance: a process gets one of them, and which is CUDA's choice."""
    total, free = card.memory_total_bytes, card.free_bytes
    if card.mig and any(card.mig_bytes):
        index = min((i for i, size in enumerate(card.mig_bytes) if size), key=lambda i: card.mig_bytes[i])
        total, free = card.mig_bytes[index], (*card.mig_free_bytes, *[None] * len(card.mig_bytes))[index]
    return total, max(0, total - free) if total is not None and free is not None else 0


def _beside_torch(file: Measured | None, local: int) -> dict[str, int]:
    """What an earlier run has measured on the card beside torch's own memory, in place of the guesses; nothing where none has.

    What NCCL held is in it where that run had several ranks."""
    found = file.ranks[local].beside_torch_bytes if file is not None else None
    if file is None or found is None:
        return {}
    return {memory.CONTEXT: found} | ({memory.COMMUNICATOR: 0} if file.world_size > 1 else {})


def _micro_batch(
    recipe: Recipe,
    shape: Architecture | None,
    precision: str,
    device: str,
    share: int,
    world_size: int,
    available: int | None,
    held: int,
    repeats: bool,
    beside: Mapping[str, int],
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
        compress=recipe.parallel.compress, repeats_keys=repeats, measured=beside,
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
