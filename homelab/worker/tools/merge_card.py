"""The part of a model card about a merge: the loss of the adapter on its training base, and of what was merged. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

ADAPTER = "adapter on its training base"
_NAMES = {"original": "merge onto the original weights", "dequantised": "merge onto the dequantised weights"}


def name_of(kind: str) -> str:
    """A kind of merge, in words."""
    return _NAMES[kind]


def nearer(figures: Mapping[str, float], kinds: Sequence[str]) -> str:
    """The kind of merge whose loss is nearer to the adapter's; the first of equal ones."""
    return min(kinds, key=lambda kind: (abs(figures[_NAMES[kind]] - figures[ADAPTER]), kinds.index(kind)))


def text(card: str, figures: Mapping[str, float], chosen: str, rows: str) -> str:
    """The adapter's card as that of a whole model, with a table of the losses behind its results."""
    card = re.sub(r"(?m)^library_name: peft$", "library_name: transformers", card, count=1)
    lines = [
        "## Merge",
        "",
        f"The adapter was put into its base: {_NAMES[chosen]}. Loss per token over {rows}:",
        "",
        "| | loss per token | difference |",
        "|---|---|---|",
    ]
    for name, loss in figures.items():
        kept = " (kept)" if name == _NAMES[chosen] else ""
        lines.append(f"| {name}{kept} | {loss:.4f} | {loss - figures[ADAPTER]:+.4f} |")
    part = "\n".join(lines) + "\n\n"
    before, mark, behind = card.partition("## Data\n")
    return before + part + mark + behind if mark else f"{card.rstrip()}\n\n{part}"
