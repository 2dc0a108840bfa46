"""Answers of nvidia-smi; empty where it is missing, fails, or does not answer in time."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

_LIMIT_S = 30


def cards() -> str:
    """One line for each card: name, driver, memory, compute capability."""
    return _said("--query-gpu=name,driver_version,memory.total,compute_cap").strip()


def held_bytes(pids: Sequence[int]) -> list[int]:
    """What these processes hold of the cards, without those that it does not name (containers hide the process ids)."""
    held = dict(re.findall(r"(\d+), (\d+) MiB", _said("--query-compute-apps=pid,used_memory")))
    return [int(held[str(pid)]) << 20 for pid in pids if str(pid) in held]


def used_bytes(card: str) -> int:
    """What all processes hold of this card (its number or uuid), asked without a context of our own. Raises RuntimeError where nvidia-smi does not say."""
    said = re.match(r"(\d+) MiB", _said("--query-gpu=memory.used", f"--id={card}"))
    if said is None:
        raise RuntimeError(f"nvidia-smi does not say what is used of card {card}")
    return int(said[1]) << 20


def _said(*question: str) -> str:
    try:
        return subprocess.run(["nvidia-smi", *question, "--format=csv,noheader"], capture_output=True, text=True, timeout=_LIMIT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
