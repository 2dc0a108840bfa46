"""Exact digests of a model's weights, made where they lie: a card's are not copied to the host for it.

A tensor's bytes are 32-bit words in blocks of 65,536. Every block becomes one number, the sum of its words times fixed odd multipliers, one
for each place, modulo 2^64; sha256 over these numbers, with type and shape, is the digest. Integers wrap alike on a card and on a CPU, and a
sum modulo 2^64 does not depend on its order: all devices find the same digest of the same bits. A difference within one word is always
seen, as an odd multiplier can be divided by again; words that are changed or exchanged at several places are missed with a chance of less
than 2^-32 per block (multilinear hashing: Lemire and Kaser, Strongly universal string hashing is fast, 2014). A plain sum would miss every
exchange, and sha256 of all bytes costs a copy over PCIe and up to 2 s per GB on a processor without instructions for it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from homelab.worker.model import host_layers

_WORDS = 1 << 16  # of a block
_PIECE_BLOCKS = 32  # per piece: 8 MiB of weights, and for a moment 40 MiB beside them
SOURCE = "homelab_source"  # attribute of a quant_state, or of 8 bits' scales: the digest of the weights that were quantised


def each(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The digest of every tensor, of any type and shape. Tensors that share their memory are read once."""
    sums: dict[tuple[Any, ...], torch.Tensor] = {}
    places = {}
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if place not in sums:
            sums[place] = _sums(tensor.detach())
        places[name] = place
    # One copy to the host for all of a device, which waits for it once.
    bytes_of: dict[tuple[Any, ...], bytes] = {}
    for device in {place[1] for place in sums}:
        own = [place for place in sums if place[1] == device]
        numbers = torch.cat([sums[place] for place in own]).cpu().split([len(sums[place]) for place in own])
        bytes_of |= {place: part.contiguous().numpy().tobytes() for place, part in zip(own, numbers, strict=True)}
    return {
        name: hashlib.sha256(f"{tensors[name].dtype} {tuple(tensors[name].shape)}\n".encode() + bytes_of[place]).hexdigest()
        for name, place in places.items()
    }


def joined(digests: Mapping[str, str]) -> str:
    """One digest of all, by name; the order in which they stand does not matter."""
    return hashlib.sha256("\n".join(f"{name} {digests[name]}" for name in sorted(digests)).encode()).hexdigest()


def trained(model: Any) -> str:
    """Of all weights that are trained."""
    return joined(each({name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}))


def base(model: Any, without: tuple[str, ...] = ()) -> tuple[str, str]:
    """(as it was read, as it is held) of all that is not trained, but for weights whose names begin so.

    They differ where weights were quantised here (`noting_sources`): the first has what was quantised, the second the codes with their
    scales. The same 16-bit weights can become other codes on another kind of card: bitsandbytes takes the mean of a matrix's scales, a sum
    whose rounding depends on the card's number of processors (functional.py, quantize_4bit), and divides by a row's largest value with the
    card's fast division (csrc, kInt8VectorQuant: __fdividef).
    """
    own = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    with host_layers.shown(model):
        frozen = {name: value for name, value in model.state_dict().items() if name not in own and not name.startswith(without)}
        tensors = {name: value for name, value in frozen.items() if isinstance(value, torch.Tensor)}
        digests = each(tensors)
    read = dict(digests)
    for name, source in sources(model).items():
        if source is None:
            continue
        place, _, matrix = name.rpartition(".")  # what is held of a layer's matrix begins with its name, and of experts' ends with it
        read = {
            key: value
            for key, value in read.items()
            if key != name and not key.startswith(f"{name}.") and not (key.startswith(f"{place}.") and key.endswith(f"_{matrix}"))
        }
        read[name] = source
    for module_name, scales in _in_8_bits(model).items():
        taken = getattr(scales, SOURCE, None)
        if taken is not None:
            read.pop(f"{module_name}.SCB", None)
            read[f"{module_name}.weight"] = taken
    return joined(read), joined(digests)


def sources(model: Any) -> dict[str, str | None]:
    """Of every matrix in 4 bits, by the name that its weights had: their digest, or None where none was taken."""
    found = {f"{name}.weight": getattr(part.weight.quant_state, SOURCE, None) for name, part in quantised(model).items()}
    for name, part in quantised_experts(model).items():
        found |= {f"{name}.{matrix}": part.sources.get(matrix) for matrix in part.shapes}
    return found


def put_sources(model: Any, digests: Mapping[str, str]) -> None:
    """Give every matrix in 4 bits the digest of what it was, as `sources` has them. Raises KeyError where one is missing."""
    for name, part in quantised(model).items():
        setattr(part.weight.quant_state, SOURCE, digests[f"{name}.weight"])
    for name, experts in quantised_experts(model).items():
        experts.sources = {matrix: digests[f"{name}.{matrix}"] for matrix in experts.shapes}


def quantised(model: Any) -> dict[str, Any]:
    """The layers whose matrix is held in 4 bits, by name."""
    return {name: part for name, part in model.named_modules() if getattr(getattr(part, "weight", None), "quant_state", None) is not None}


def quantised_experts(model: Any) -> dict[str, Any]:
    """The routed experts that are held in 4 bits (`quantised_experts.QuantisedExperts`), by the name of their module."""
    return {name: part for name, part in model.named_modules() if type(part).__name__ == "QuantisedExperts"}


def _in_8_bits(model: Any) -> dict[str, torch.Tensor]:
    """The scales of the layers whose matrix is held in 8 bits, by the layer's name."""
    scales = {name: getattr(getattr(part, "weight", None), "SCB", None) for name, part in model.named_modules()}
    return {name: found for name, found in scales.items() if found is not None}


@contextlib.contextmanager
def noting_sources() -> Iterator[None]:
    """While this lasts, every matrix that bitsandbytes quantises leaves the digest of what it was with its scales."""
    if importlib.util.find_spec("bitsandbytes") is None:
        yield
        return
    functional: Any = importlib.import_module("bitsandbytes.functional")
    before = {name: getattr(functional, name) for name in ("quantize_4bit", "int8_vectorwise_quant")}

    def noting(quantise: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(quantise)
        def noted(weights: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            made = quantise(weights, *arguments, **options)
            setattr(made[1], SOURCE, each({"": weights})[""])
            return made

        return noted

    for name, quantise in before.items():
        setattr(functional, name, noting(quantise))
    try:
        yield
    finally:
        for name, quantise in before.items():
            setattr(functional, name, quantise)


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """One int64 per block, on the tensor's own device."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    piece_bytes = 4 * _WORDS * _PIECE_BLOCKS
    multipliers = _multipliers(flat.device)
    sums = [torch.empty(0, dtype=torch.int64, device=flat.device)]
    for start in range(0, len(flat), piece_bytes):
        piece = flat[start : start + piece_bytes]
        padding = -len(piece) % (4 * _WORDS)
        if padding:  # zeros add nothing, and the shape is in the digest
            piece = torch.nn.functional.pad(piece, (0, padding))
        elif piece.storage_offset() % 4:  # of a file that is mapped into memory; a view as words needs an aligned copy
            piece = piece.clone()
        sums.append((piece.view(torch.int32).view(-1, _WORDS) * multipliers).sum(1))
    return torch.cat(sums)


@functools.lru_cache(maxsize=8)
def _multipliers(device: torch.device) -> torch.Tensor:
    """The same odd 64-bit numbers everywhere, by the definition of shake_256, because random generators may change."""
    drawn = bytearray(hashlib.shake_256(b"homelab weights").digest(8 * _WORDS))
    return (torch.frombuffer(drawn, dtype=torch.int64) | 1).to(device)
