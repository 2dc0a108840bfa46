"""The signs that a node is wanted by its owner, in what was seen of its processes, its cards and its seats. Pure.

Sources: `nvidia-smi --help-query-compute-apps` (contexts that compute; under WDDM and WSL "[N/A]", or none at all), `nvidia-smi pmon -h` (those
that draw, too: type G or C+G, `sm` in percent of the last second, `fb` in MiB), logind's `IdleHint` (org.freedesktop.login1(5)).
"""

from __future__ import annotations

import csv
from typing import TYPE_CHECKING

from homelab.shared.protocol.house_messages import MOST_SIGNS, HouseSign

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

# What draws a desktop takes less of a card. A film in a browser takes up to 10 % of a small card; a game that waits for nothing takes all of it.
DRAWS_BYTES, DRAWS_PERCENT = 500 << 20, 20.0
TAKEN_BYTES = 1 << 30
_MIB = 1 << 20


class RunningProgram:
    """One process of the machine. `names`: what people may call it."""

    def __init__(self, pid: int, names: Collection[str]) -> None:
        self.pid, self.names = pid, names


class CardUse:
    """A process on a card. `kind`: C computes, G draws, C+G both; what is not told is None."""

    def __init__(self, card: str, pid: int, kind: str = "C", memory_bytes: int | None = None, percent: float | None = None) -> None:
        self.card, self.pid, self.kind, self.memory_bytes, self.percent = card, pid, kind, memory_bytes, percent


def named(processes: Iterable[RunningProgram], yield_to: Collection[str]) -> list[tuple[str, RunningProgram]]:
    """(the name as cluster.toml has it, process) of all that run under one of these names. The kernel keeps 15 letters of a name (comm of proc(5))."""
    names = {name.lower(): name for name in yield_to}
    names.update({name.lower()[:15]: name for name in yield_to})
    found = []
    for process in processes:
        name = next((names[word.lower()] for word in process.names if word.lower() in names), None)
        if name is not None:
            found.append((name, process))
    return found


def computing(text: str) -> list[CardUse]:
    """Of `nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory --format=csv,noheader,nounits`; other lines are left out."""
    uses = []
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == 3 and row[1].strip().isdigit():
            memory = row[2].strip()
            uses.append(CardUse(row[0].strip(), int(row[1]), memory_bytes=int(memory) * _MIB if memory.isdigit() else None))
    return uses


def drawing(text: str, uuids: Mapping[str, str]) -> list[CardUse]:
    """Of `nvidia-smi pmon -c 1 -s um`, whose columns differ by driver. `uuids`: index of a card -> its uuid."""
    columns: list[str] = []
    uses = []
    for line in text.splitlines():
        words = line.split()
        if line.startswith("#"):
            columns = columns or words[1:]
            continue
        values = dict(zip(columns, words))
        if not values.get("pid", "").isdigit():
            continue
        percent, memory = values.get("sm", "-"), values.get("fb", "-")
        uses.append(
            CardUse(
                uuids.get(values["gpu"], values["gpu"]), int(values["pid"]), values.get("type", ""),
                int(memory) * _MIB if memory.isdigit() else None, float(percent) if percent.isdigit() else None,
            )
        )  # fmt: skip
    return uses


def on_cards(uses: Iterable[CardUse], cards: Collection[str], known: Collection[int]) -> list[CardUse]:
    """Those that want a card for their owner. `cards`: that train, by uuid, empty for all; `known`: processes that are ours, or were there before."""
    merged: dict[int, CardUse] = {}
    for use in uses:
        if use.pid in known or (cards and use.card not in cards):
            continue
        before = merged.get(use.pid, use)
        merged[use.pid] = CardUse(
            use.card, use.pid, use.kind if "G" in use.kind else before.kind,
            max(use.memory_bytes or 0, before.memory_bytes or 0), max(use.percent or 0.0, before.percent or 0.0),
        )  # fmt: skip
    return [
        use
        for use in merged.values()
        if "G" not in use.kind or (use.memory_bytes or 0) > DRAWS_BYTES or (use.percent or 0.0) > DRAWS_PERCENT
    ]


def used_memory(text: str, cards: Collection[str]) -> int | None:
    """Bytes of these cards that are in use, of `nvidia-smi --query-gpu=index,uuid,memory.used --format=csv,noheader,nounits`; None: not told."""
    used = [
        int(row[2]) * _MIB
        for row in csv.reader(text.splitlines(), skipinitialspace=True)
        if len(row) == 3 and row[0].strip().isdigit() and row[2].strip().isdigit() and (not cards or row[1].strip() in cards)
    ]
    return sum(used) if used else None


def is_at_input(text: str) -> bool:
    """Whether somebody is at keyboard or mouse, of `loginctl show-session ID ... -p ...`: blocks of KEY=value with empty lines between."""
    for block in text.split("\n\n"):
        said = dict(line.partition("=")[::2] for line in block.splitlines())
        sits_there = said.get("Remote") == "no" and said.get("Class", "user") == "user" and said.get("Type") in ("x11", "wayland", "mir")
        if sits_there and said.get("Active") == "yes" and (said.get("IdleHint"), said.get("LockedHint")) == ("no", "no"):
            return True
    return False


def bounded(signs: Iterable[HouseSign]) -> tuple[HouseSign, ...]:
    """As many as a message holds; a program counts once, by its oldest process."""
    first: dict[tuple[str, str], HouseSign] = {}
    for sign in signs:
        before = first.get((sign.kind, sign.name))
        if before is None or sign.pid < before.pid:
            first[sign.kind, sign.name] = sign
    return tuple(first.values())[:MOST_SIGNS]
