"""What all stages hold together, on every rank: weights by name, and the optimizer's state in the numbering of one process.

A checkpoint is whole on every node, so that any other cut, any other strategy or one process goes on from it. Parameters stand in a stage in
the order in which the whole model has them, and stages stand in the order of their layers: the whole numbering is theirs put together,
group by group of the optimizer.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from homelab.worker.runtime import process_group
from homelab.worker.strategies.pipeline.shared_table import SharedTable

_PIECE_BYTES = 32 * 2**20  # on a card, beside all else


def gathered(own: dict[str, torch.Tensor], device: torch.device, *, is_kept: bool) -> dict[str, torch.Tensor]:
    """The tensors of all stages by name, in host memory. Collective; where it is not kept, of no use."""
    whole: dict[str, torch.Tensor] = {}
    for rank in range(dist.get_world_size()):
        whole |= _of_rank(rank, own, device, is_kept=is_kept)
    return whole


def _of_rank(rank: int, own: dict[str, torch.Tensor], device: torch.device, *, is_kept: bool) -> dict[str, torch.Tensor]:
    """What `rank` has, sent to everybody: what it is, then its bytes in pieces."""
    is_own = rank == dist.get_rank()
    listed = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in own.items()] if is_own else []
    text = json.dumps(listed).encode()
    length = int(process_group.gather([float(len(text))])[rank][0])
    header = torch.frombuffer(bytearray(text), dtype=torch.uint8) if is_own else torch.empty(length, dtype=torch.uint8)
    listed = json.loads(bytes(_broadcast(header, rank, device).tolist()).decode())
    whole: dict[str, torch.Tensor] = {}
    for together in _in_pieces(listed):
        tensors = {
            name: own[name].detach().contiguous().cpu() if is_own else torch.empty(shape, dtype=getattr(torch, dtype))
            for name, dtype, shape in together
        }
        flats = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()]
        # Many small tensors go as one: an adapter has hundreds, and each message costs a round of the network.
        bytes_of_all = flats[0] if len(flats) == 1 else torch.cat(flats)
        for piece in bytes_of_all.split(_PIECE_BYTES):
            received = _broadcast(piece, rank, device)
            if not is_own and is_kept:
                piece.copy_(received)
        if is_kept:
            if not is_own and len(flats) > 1:
                for flat, part in zip(flats, bytes_of_all.split([len(flat) for flat in flats]), strict=True):
                    flat.copy_(part)
            whole |= tensors
    return whole


def _in_pieces(listed: Iterable[tuple[str, str, list[int]]]) -> Iterator[list[tuple[str, str, list[int]]]]:
    """The tensors in their order, as many at once as have room in a piece; a larger one is alone."""
    together: list[tuple[str, str, list[int]]] = []
    size = 0
    for one in listed:
        own_size = math.prod(one[2]) * getattr(torch, one[1]).itemsize
        if together and size + own_size > _PIECE_BYTES:
            yield together
            together, size = [], 0
        together.append(one)
        size += own_size
    if together:
        yield together


def _broadcast(tensor: torch.Tensor, source: int, device: torch.device) -> torch.Tensor:
    if dist.get_backend() != "nccl":
        dist.broadcast(tensor, source)
        return tensor
    on_card = tensor.to(device)
    dist.broadcast(on_card, source)
    return on_card.cpu()


def numbers_of(groups: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """From the number of parameters in each group of each stage's optimizer: [stage][group] -> their numbers in an optimizer of the whole model."""
    sizes_of_groups = [sum(sizes) for sizes in zip(*groups, strict=True)]
    starts = [0, *itertools.accumulate(sizes_of_groups)]
    numbers: list[list[list[int]]] = []
    for stage, sizes in enumerate(groups):
        before = [sum(groups[earlier][group] for earlier in range(stage)) for group in range(len(sizes))]
        numbers.append(
            [list(range(starts[group] + before[group], starts[group] + before[group] + size)) for group, size in enumerate(sizes)]
        )
    return numbers


def group_numbers(optimizer: Any, stages: Sequence[int], table: SharedTable | None) -> list[list[list[int]]]:
    """`numbers_of` for the optimizers of all stages, whose ranks are `stages`. A second copy of a weight has no number of its own. Collective."""
    counts = process_group.gather([float(sum(not is_second for is_second in group)) for group in _second(optimizer, table)])
    return numbers_of([[int(count) for count in counts[rank]] for rank in stages])


def numbers_here(optimizer: Any, stages: Sequence[int], numbers: list[list[list[int]]], table: SharedTable | None) -> list[int]:
    """The number of each parameter of this rank's optimizer, in its order; of a second copy, that of the first stage's. Collective."""
    weights = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    places = process_group.gather([float(next((place for place, weight in enumerate(weights) if table and weight is table.weight), 0))])
    first = list(itertools.chain.from_iterable(numbers[0]))
    counted = itertools.chain.from_iterable(numbers[stages.index(dist.get_rank())])
    seconds = itertools.chain.from_iterable(_second(optimizer, table))
    return [first[int(places[stages[0]][0])] if is_second else next(counted) for is_second in seconds]


def _second(optimizer: Any, table: SharedTable | None) -> list[list[bool]]:
    """Of each parameter, by group, whether another stage counts it."""
    return [
        [table is not None and table.is_second and weight is table.weight for weight in group["params"]] for group in optimizer.param_groups
    ]


def flat(state: dict[int, dict[str, Any]]) -> tuple[dict[str, torch.Tensor], dict[str, type]]:
    """The state of an optimizer as tensors by `number/name`, or `number/name/name` where an optimizer nests its own (bitsandbytes: states, maps and
    scales of 8 bits); and the types of those that are plain numbers, by what comes after `number/`."""
    tensors: dict[str, torch.Tensor] = {}
    kinds: dict[str, type] = {}
    waiting: list[tuple[str, Any]] = [(f"{number}/{name}", value) for number, values in state.items() for name, value in values.items()]
    for place, value in waiting:
        if isinstance(value, dict):
            waiting += [(f"{place}/{name}", inner) for name, inner in value.items()]
        elif isinstance(value, torch.Tensor):
            tensors[place] = value
        else:
            tensors[place], kinds[place.partition("/")[2]] = torch.tensor(value), type(value)
    return tensors, kinds


def nested(tensors: dict[str, torch.Tensor], kinds: dict[str, type]) -> dict[int, dict[str, Any]]:
    """What `flat` was given."""
    state: dict[int, dict[str, Any]] = {}
    for place, tensor in tensors.items():
        number, _, names = place.partition("/")
        *outer, last = names.split("/")
        values = state.setdefault(int(number), {})
        for name in outer:
            values = values.setdefault(name, {})
        values[last] = kinds[names](tensor.item()) if names in kinds else tensor
    return state


def whole_optimizer(
    optimizer: Any, stages: Sequence[int], device: torch.device, table: SharedTable | None, *, is_kept: bool
) -> dict[str, Any]:
    """The state_dict that an optimizer of the whole model would have. Collective."""
    own = optimizer.state_dict()
    numbers = group_numbers(optimizer, stages, table)
    own_numbers = numbers_here(optimizer, stages, numbers, table)
    in_order = list(itertools.chain.from_iterable(group["params"] for group in own["param_groups"]))
    whole_of = dict(zip(in_order, own_numbers, strict=True))
    counted = set(itertools.chain.from_iterable(numbers[stages.index(dist.get_rank())]))
    tensors, kinds = flat({whole_of[index]: values for index, values in own["state"].items() if whole_of[index] in counted})
    state = nested(gathered(tensors, device, is_kept=is_kept), kinds)
    by_group = [list(itertools.chain.from_iterable(stage[group] for stage in numbers)) for group in range(len(own["param_groups"]))]
    groups = [{**group, "params": params} for group, params in zip(own["param_groups"], by_group, strict=True)]
    return {**own, "state": dict(sorted(state.items())), "param_groups": groups}


def own_optimizer(state: dict[str, Any], optimizer: Any, stages: Sequence[int], table: SharedTable | None) -> dict[str, Any]:
    """The part of a whole state_dict that the optimizer of this stage holds, in its own numbering. Collective."""
    own_numbers = numbers_here(optimizer, stages, group_numbers(optimizer, stages, table), table)
    own = {index: state["state"][number] for index, number in enumerate(own_numbers) if number in state["state"]}
    starts = itertools.accumulate((len(group["params"]) for group in optimizer.param_groups), initial=0)
    groups = [
        {**saved, "params": list(range(start, start + len(group["params"])))}
        for saved, group, start in zip(state["param_groups"], optimizer.param_groups, starts, strict=False)
    ]
    return {**state, "state": own, "param_groups": groups}
