"""What of a result is missing in a folder here, and whether the disk takes it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.hint import Hint
from homelab.controller.base.models import Value
from homelab.controller.base.units import decimal_size
from homelab.controller.facts.reading import AsMessage
from homelab.shared.protocol.result_messages import ResultFile

SPARE_BYTES = 100 * 10**6
_HEADER_BYTES = 8


class Missing(Value):
    """A file of which `have_bytes` are here."""

    file: Annotated[ResultFile, AsMessage]
    have_bytes: int


def missing(files: Iterable[ResultFile], whole: Mapping[str, str], partial: Mapping[str, int]) -> tuple[Missing, ...]:
    """The files that are not here whole. `whole`: name -> sha256 of files here; `partial`: sha256 -> bytes that came of it."""
    return tuple(
        Missing(file=file, have_bytes=have if (have := partial.get(file.sha256, 0)) <= file.size else 0)
        for file in files
        if whole.get(file.name) != file.sha256
    )


def left_bytes(parts: Iterable[Missing]) -> int:
    """How many bytes still have to come."""
    return sum(part.file.size - part.have_bytes for part in parts)


def check_room(parts: Iterable[Missing], free_bytes: int, folder: str) -> None:
    """Raises HomelabError where the disk of `folder` does not take what is missing."""
    needed_bytes = left_bytes(parts)
    if needed_bytes and needed_bytes + SPARE_BYTES > free_bytes:
        raise HomelabError(
            f"{decimal_size(needed_bytes)} are missing, but {decimal_size(free_bytes)} are free on this machine's disk", where=folder,
            hint=Hint("make room there (df -h), or name a folder on another disk as the last argument"),
        )  # fmt: skip


def weights_fault(name: str, first: bytes, size_bytes: int) -> str | None:
    """None where the first 9 bytes of a file of weights are those of its format, else what is wrong: a pickle under another name is none.

    safetensors: 8 bytes with the length of a header that is a JSON object (README of huggingface/safetensors); GGUF: its four letters.
    """
    if name.endswith(".gguf"):
        return None if first[:4] == b"GGUF" else "it does not begin as a GGUF file"
    if not name.endswith(".safetensors"):
        return None
    length = int.from_bytes(first[:_HEADER_BYTES], "little")
    is_header = len(first) > _HEADER_BYTES and first[_HEADER_BYTES : _HEADER_BYTES + 1] == b"{" and length <= size_bytes - _HEADER_BYTES
    return None if is_header else "it does not begin as a safetensors file"
