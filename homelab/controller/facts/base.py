"""What the facts share: the types of values that become words of commands, and the refusal of absurd answers."""

from __future__ import annotations

import ipaddress
import math
from typing import Annotated, Any

from pydantic import AfterValidator, Field

_LARGEST = 2**63  # the largest number that a counter of a machine holds
_FILES = ("config", "content")  # the content of files may hold any number (Mamba2: Infinity); the reader checks it


def refuse_absurd(value: Any, depth: int = 0, is_file: bool = False) -> None:
    """Raises ValueError for endless nesting, and outside of files for numbers that no machine has (NaN, infinities, thousands of digits)."""
    if depth > 50:
        raise ValueError("it is nested too deeply")
    if isinstance(value, dict):
        for name, entry in value.items():
            refuse_absurd(entry, depth + 1, is_file or name in _FILES)
    elif isinstance(value, list | tuple):
        for entry in value:
            refuse_absurd(entry, depth + 1, is_file)
    elif is_file:
        return
    elif (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and abs(value) > _LARGEST):
        raise ValueError("it has an impossible number")


def address(text: str) -> str:
    """The text. Raises ValueError where it is no address."""
    if not _is_address(text) or "/" in text:
        raise ValueError("not an address")
    return text


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_interface(text)
    except ValueError:
        return False
    return "%" not in text  # what follows it, the zone of an IPv6 address, may be any words


# Words that hints make commands of. Process 0 and below are groups of processes to kill(1).
Addresses = Annotated[tuple[str, ...], AfterValidator(lambda texts: tuple(text for text in texts if _is_address(text)))]
Address = Annotated[str, AfterValidator(address)]
Mac = Annotated[str, Field(pattern=r"^([0-9a-f]{2}:){5}[0-9a-f]{2}$")]
Pid = Annotated[int | None, AfterValidator(lambda pid: pid if pid is None or pid > 0 else None)]
Run = Annotated[str, Field(pattern=r"^\w", max_length=200)]  # never an option of `homelab stop`
