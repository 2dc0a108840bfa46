"""The chain of a run's record: every line carries a digest of itself and of all before it, so a later edit shows at its step. Pure.

    {"kind": "start", ...}   what the training is made of and computed with: recipe, rows, base model, versions
    {"kind": "train", ...}   a step: its loss, the rows of its global batch ("batch"), and which of them shared a pass ("passes")
    {"kind": "kept", ...}    the state that a kept checkpoint holds: weights, optimizer, learning-rate schedule; and the processors of that attempt
    {"kind": "eval", ...}    the loss over the held-out rows after a step

The chain shows that nothing was changed afterwards. It does not show that anything was computed: `homelab verify` computes parts again.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any, Optional

RECORD = "curves.jsonl"
KEY = "chain"
START, TRAIN, KEPT, EVAL = "start", "train", "kept", "eval"
_PLACES = {START: 0, TRAIN: 1, KEPT: 2, EVAL: 3}  # of the lines of one step
_DIGITS = 32  # of a sha256: 128 bits, because every checkpoint carries all lines
_SHORT_DIGITS = 16
CARD_WORDS = "End of the record's chain"


def link(before: str, line: Mapping[str, Any]) -> str:
    """The chain after this line, 32 hexadecimal digits. `before`: the chain so far, "" at the beginning; the line's own key `chain` does not count."""
    text = json.dumps({name: line[name] for name in line if name != KEY}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(f"{before}\n{text}".encode()).hexdigest()[:_DIGITS]


def end_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """The chain as the last line says it; "" where there is none, as in the checkpoints of older versions."""
    return str(lines[-1].get(KEY) or "") if lines else ""


def order_of(line: Mapping[str, Any]) -> tuple[int, int]:
    """Sorts lines as they are written."""
    return line["step"], _PLACES.get(line["kind"], len(_PLACES))


def first_break(lines: Iterable[Mapping[str, Any]]) -> Optional[int]:
    """The position of the first line that does not follow from those before it, or has no chain; None where all do."""
    chain = ""
    for position, line in enumerate(lines):
        if line.get(KEY) != link(chain, line):
            return position
        chain = str(line[KEY])
    return None


def batch_digest(ids: Iterable[int]) -> str:
    """A short digest of the data rows of a global batch, in its order."""
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()[:_SHORT_DIGITS]


def passes_text(cuts: Iterable[Sequence[Sequence[int]]], rows: int) -> str:
    """Which of so many rows of a global batch shared a forward pass, on whichever rank. `cuts`: rank -> passes -> positions in the batch.

    One mark a row, in the order of the batch: the number of its pass, counted as they first appear there, in base 36; two digits where one is not enough.
    """
    pass_of = {position: number for number, positions in enumerate(part for of_rank in cuts for part in of_rank) for position in positions}
    seen: dict[int, int] = {}
    numbers = [seen.setdefault(pass_of[position], len(seen)) for position in range(rows)]
    if len(seen) > len(_MARKS) ** 2:  # a batch of more than a thousand passes: a digest still says whether they were the same
        return batch_digest(numbers)
    return "".join(_MARKS[number] if len(seen) <= len(_MARKS) else _MARKS[number // 36] + _MARKS[number % 36] for number in numbers)


def passes_of(text: str, rows: int) -> list[list[int]]:
    """Pass -> its positions in a batch of so many rows, from `passes_text`; empty where the text does not say them."""
    width = len(text) // max(1, rows)
    if width not in (1, 2) or len(text) != width * rows or not set(text) <= set(_MARKS):
        return []
    passes: dict[str, list[int]] = {}
    for position in range(rows):
        passes.setdefault(text[position * width : (position + 1) * width], []).append(position)
    return list(passes.values())


_MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"


def card_line(chain: str) -> str:
    """The line of a model card that names the end of the chain."""
    return f"{CARD_WORDS}: `{chain}`."


def of_card(card: str) -> str:
    """The end of the chain that a model card names; "" where it names none."""
    for text in card.splitlines():
        if text.startswith(f"{CARD_WORDS}: `"):
            return text[len(CARD_WORDS) + 3 :].split("`")[0][:_DIGITS]
    return ""
