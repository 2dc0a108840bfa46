"""Whether NVLink bridges join the cards: `nvidia-smi nvlink --status`, asked where there are several."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from homelab.node.system import programs

if TYPE_CHECKING:
    from typing import Any

    from homelab.shared.protocol.files import JsonObject

QUERY = ("nvidia-smi", "nvlink", "--status")
_TIMEOUT_S = 10.0
_CARD = re.compile(r"GPU \d+: .*\(UUID: (GPU-[0-9A-Fa-f-]+)\)")
_WORKS = re.compile(r"\s+Link \d+: [\d.]+ GB/s")  # "<inactive>" where there is no bridge


def add(cards: list[JsonObject]) -> None:
    """ "nvlink" of each of several cards: True where a link of it works; None where nvidia-smi does not say."""
    if len(cards) < 2:
        return
    joined = ask()
    for card in cards:
        card["nvlink"] = None if joined is None else card.get("uuid") in joined


def ask() -> Any:
    """uuids of the cards with a link that works; None where the question has no answer."""
    program = programs.path_of(QUERY[0])
    if program is None:
        return None
    try:
        code, output, _ = programs.answer_of((program, *QUERY[1:]), _TIMEOUT_S)
    except (OSError, TimeoutError):
        return None
    return parse(output) if code == 0 else None


def parse(text: str) -> Any:
    """The same of nvidia-smi's words: a line for each card, and below it one for each link."""
    uuids, uuid = set(), None
    for line in text.splitlines():
        card = _CARD.match(line)
        if card:
            uuid = card.group(1)
        elif uuid and _WORKS.match(line):
            uuids.add(uuid)
    return uuids
