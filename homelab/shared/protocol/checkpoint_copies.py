"""Which copy is right where nodes hold different ones of the same checkpoint. Pure; controller and worker decide by the same rule."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

# The files that the next step is computed from. Curves and other records may differ without harm.
STATE = ("trainable.safetensors", "optimizer.pt", "scheduler.pt", "scaler.pt")
NUMBERS = 4  # of `numbers`: 96 bits in floats that hold 24 each exactly

Holder = TypeVar("Holder")


def state_digest(sha256_of: Mapping[str, str]) -> str:
    """One digest of a checkpoint's state, from the sha256 of its files as the manifest has them. Empty where it holds no state of ours."""
    lines = [f"{name} {sha256_of[name]}" for name in STATE if name in sha256_of]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if STATE[0] in sha256_of else ""


def right(digests: Mapping[Holder, str]) -> str:
    """The digest that most hold; where no other has more votes, that of the first holder (the head's, in the order of the plan)."""
    counted = Counter(digests.values())
    most = max(counted.values(), default=0)
    return next((digest for digest in digests.values() if counted[digest] == most), "")


def numbers(digest: str) -> list[float]:
    """The first 96 bits of a digest, for a collective of floats."""
    return [float(int(digest[start : start + 6] or "0", 16)) for start in range(0, 6 * NUMBERS, 6)]
