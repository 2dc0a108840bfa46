"""A row of tokens, and all rows of a training. A row is made by `encoding`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class Row:
    """One training sequence: a sample, or several when packed; or two answers to one prompt, the better one first, each with the prompt.

    `tokens` are token ids, `trained` has a 1 for every token whose prediction counts, `sources` the data rows in here
    and `starts` where each of them begins. A sample's first token has no prediction, so it never counts. `reference` has the summed
    log-probabilities (nats) that the base model gives to the two answers, where the objective compares with them.

    An answer that is judged alone is `good` or not, and has `other` beside it: its prompt with an answer to another one (`unmatched`), whose
    log-probability is the second of `reference`.
    """

    tokens: array[int]
    trained: bytes
    sources: tuple[int, ...]
    starts: tuple[int, ...] = (0,)
    reference: tuple[float, float] = (0.0, 0.0)
    good: bool = True
    other: Row | None = None

    @property
    def loss_tokens(self) -> int:
        """Tokens of this row whose prediction counts."""
        return sum(self.trained)

    @property
    def longer_tokens(self) -> int:
        """Tokens of this row or of `other`, whichever has more: a pass over either of them is cut by this, so that both fit."""
        return max(len(self.tokens), len(self.other.tokens) if self.other is not None else 0)


@dataclass
class EncodedData:
    """Everything the trainer needs: rows to train on, rows held out, and notes for the user.

    `commits` of data from the hub, by role ("train", "eval"), as far as they are known.
    """

    train: list[Row]
    held_out: list[Row]
    notes: list[str] = field(default_factory=list)
    commits: dict[str, str] = field(default_factory=dict)
