"""One layer's frozen matrices as a block of bytes on the host: memory, pinned beside a card, or a file that is mapped into memory."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from homelab.worker.errors import WorkerError, size_words
from homelab.worker.runtime import host_memory

_ALIGNED = 256  # bytes: what a card's copies and every type's views take
_LEAST_BYTES = 1024  # smaller tensors stay: a quantised matrix's constants, which come with any of its parts


@dataclass(frozen=True)
class Piece:
    """One tensor of a layer: `holder.name` is it; its bytes begin at `offset` of the layer's block."""

    holder: Any
    name: str
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        size_bytes: int = self.shape.numel() * self.dtype.itemsize
        return size_bytes

    def look_into(self, block: torch.Tensor) -> None:
        setattr(self.holder, self.name, block[self.offset : self.offset + self.size_bytes].view(self.dtype).view(self.shape))


@dataclass
class StoredLayer:
    """The pieces of a layer in its block of bytes on the host, and the empty tensors that stand for them."""

    pieces: list[Piece]
    block: torch.Tensor
    empty: list[torch.Tensor]

    def shape(self) -> None:
        """Its parameters have their shapes, in the memory of one number each."""
        for piece, empty in zip(self.pieces, self.empty, strict=True):
            setattr(piece.holder, piece.name, empty.new_zeros(1).expand(piece.shape))

    def leave(self) -> None:
        """Its parameters are empty again."""
        for piece, empty in zip(self.pieces, self.empty, strict=True):
            setattr(piece.holder, piece.name, empty)


def moved(module: Any, device: torch.device, file: Path | None, taken_bytes: int, *, pinned: bool) -> StoredLayer:
    """Move the frozen matrices of a layer to the host; its parameters are empty on `device` then. `file`: a path that holds the block instead of memory,
    and is gone at once. `pinned`: memory that is pinned, where the system gives so much of it. `taken_bytes`: of the layers before it, for the error.
    Raises WorkerError where the host has no room."""
    found = list(_frozen(module))
    pieces, offset = [], 0
    for holder, name, tensor in found:
        pieces.append(Piece(holder, name, offset, tensor.shape, tensor.dtype))
        offset += -(-tensor.nbytes // _ALIGNED) * _ALIGNED
    block = _zeros(offset, taken_bytes, pinned=pinned and file is None)
    for piece, (_, _, tensor) in zip(pieces, found, strict=True):
        block[piece.offset : piece.offset + piece.size_bytes].copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))
    if file is not None:
        block = _on_disk(block, file, taken_bytes)
    layer = StoredLayer(pieces, block, [torch.empty(0, dtype=tensor.dtype, device=device) for _, _, tensor in found])
    layer.leave()
    return layer


def _zeros(size_bytes: int, taken_bytes: int, *, pinned: bool) -> torch.Tensor:
    try:
        return host_memory.empty([size_bytes], torch.uint8, pinned=pinned).zero_()
    except RuntimeError as error:
        raise WorkerError(
            f"the host has no {size_words(size_bytes)} of memory for another layer, after {size_words(taken_bytes)}: {str(error).splitlines()[0]}",
            where="memory of the host", hint="close other programs on this machine, or use a smaller [model]; under WSL2, raise memory in .wslconfig",
        ) from error  # fmt: skip


def _on_disk(block: torch.Tensor, file: Path, taken_bytes: int) -> torch.Tensor:
    """The same bytes, mapped from a file that nobody else can open. They are on the disk before anybody reads them: pages that must still be written
    cannot be dropped, and a control group that is full of them ends the process."""
    with contextlib.suppress(FileExistsError):
        file.parent.mkdir(parents=True)
    try:
        # Without a name: two chats may load the same layers for the same rank, and one that is ended meanwhile leaves nothing.
        with tempfile.TemporaryFile(dir=file.parent) as opened:
            opened.write(memoryview(block.numpy()))
            opened.flush()
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            storage = torch.UntypedStorage.from_file(f"/proc/self/fd/{opened.fileno()}", shared=True, nbytes=block.numel())
    except (OSError, RuntimeError) as error:  # torch raises the latter where the file cannot be mapped
        why = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        raise WorkerError(
            f"no room for {size_words(block.numel())} of a streamed layer, after {size_words(taken_bytes)}: {why}",
            where=str(file.parent), hint="make room on this disk, or set the node's workdir to another one in cluster.toml",
        ) from error  # fmt: skip
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _frozen(module: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """(holder, attribute, tensor) of a layer's frozen matrices: the parameters, what bitsandbytes keeps beside them, and experts in 4 bits."""
    for parameter in module.parameters():
        if parameter.dim() < 2 or parameter.nbytes < _LEAST_BYTES:
            continue
        state = getattr(parameter, "quant_state", None)
        beside = [(parameter, "SCB", getattr(parameter, "SCB", None)), (parameter, "CB", getattr(parameter, "CB", None))]
        if state is not None:
            beside = [(state, "absmax", state.absmax), *([(state.state2, "absmax", state.state2.absmax)] if state.nested else [])]
        yield parameter, "data", parameter.data
        for holder, name, tensor in beside:
            if tensor is None:
                continue
            if tensor.data_ptr() == parameter.data_ptr():  # bitsandbytes names the 8-bit matrix twice
                setattr(holder, name, None)
            elif tensor.nbytes >= _LEAST_BYTES:
                yield holder, name, tensor
    for part in module.modules():
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.dim() > 1 and buffer.nbytes >= _LEAST_BYTES:
                yield part, name, buffer
