"""What one forward pass of a rank may hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Limits:
    """The most tokens and rows (None: any number) of one forward pass of a rank, and the longest row that the rank takes (None: any).

    `padded`: the rows of a pass are padded to the longest of them, and the padding counts.
    """

    pass_tokens: int
    pass_rows: int | None = None
    row_tokens: int | None = None
    padded: bool = True

    @classmethod
    def planned(cls, micro_batch: int, token_cap: int | None, *, seq_len: int, asked: int | Literal["auto"], padded: bool = True) -> Limits:
        """The limits of a planned rank. `asked` is [parallel] micro_batch of the recipe: a number counts rows; "auto" is what
        memory takes, and memory counts tokens."""
        tokens = max(1, micro_batch) * seq_len if token_cap is None else token_cap
        return cls(tokens, None if asked == "auto" else micro_batch, token_cap, padded)

    def takes(self, length: int) -> bool:
        """Whether this rank can compute a row of `length` tokens."""
        return self.row_tokens is None or length <= self.row_tokens

    def tokens(self, rows: int, longest: int, total: int) -> int:
        """Tokens that a pass of `rows` rows with `total` tokens together computes, padding included."""
        return rows * longest if self.padded else total

    def holds(self, rows: int, tokens: int) -> bool:
        """Whether one pass may hold so many rows and tokens. A single row always passes; `takes` refuses a row that is too long."""
        return rows == 1 or (tokens <= self.pass_tokens and (self.pass_rows is None or rows <= self.pass_rows))
