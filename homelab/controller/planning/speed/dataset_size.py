"""How many rows a recipe's data has, how long they are, and how many optimizer steps that makes: measured, counted, or guessed."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from homelab.controller.base.units import megabytes
from homelab.controller.config.recipe import TrainRecipe
from homelab.controller.planning.speed.speed_profiles import SpeedProfile
from homelab.shared.recipe import HubData

BYTES_PER_TOKEN = 4  # of English text, markup included; a guess that an earlier run's own count replaces
_SPREAD = 0.5  # rows differ in length: assumed evenly between half and one and a half times the mean


@dataclass(frozen=True)
class DataFile:
    """What is known of a data file without a tokenizer. `rows` is approximate; None: it cannot be counted. `hub`: the data set of the hub, in place of a file."""

    size_bytes: int | None = None
    rows: int | None = None
    sha256: str | None = None
    hub: HubData | None = None


@dataclass(frozen=True)
class Rows:
    """Rows that are trained on per epoch (None: not known) and their mean length in tokens; `because` says where they come from.

    `quantiles` are lengths from the shortest row to the longest at even distances, where they were counted. `padded` says why the
    rows of a pass are padded to its longest one; empty: they stand one after the other. `loss_part`: of the tokens, those that carry a loss.
    """

    count: int | None
    tokens_mean: float
    is_measured: bool
    because: str
    quantiles: tuple[float, ...] = ()
    padded: str = ""
    loss_part: float = 1.0

    def steps(self, recipe: TrainRecipe) -> int | None:
        """Optimizer steps of the whole run; None when the number of rows decides it and is not known."""
        if recipe.train.steps is not None:
            return recipe.train.steps
        assert recipe.train.epochs is not None
        return None if self.count is None else recipe.train.epochs * math.ceil(self.count / recipe.train.global_batch)

    def lengths(self, batch: int, seq_len: int) -> list[int]:
        """Lengths of the rows of one typical global batch, in tokens: as counted, else spread evenly around the mean; none above `seq_len`."""
        if len(self.quantiles) > 1:
            lengths = [_at(self.quantiles, (2 * row + 1) / (2 * batch)) for row in range(batch)]
            scale = self.tokens_mean * batch / sum(lengths)
            return [min(seq_len, max(1, round(length * scale))) for length in lengths]
        spread = max(0.0, min(_SPREAD, seq_len / self.tokens_mean - 1))
        return [max(1, round(self.tokens_mean * (1 + spread * ((2 * row + 1) / batch - 1)))) for row in range(batch)]


def _at(quantiles: tuple[float, ...], part: float) -> float:
    """The length below which `part` of the rows are, between two quantiles in a straight line."""
    place = part * (len(quantiles) - 1)
    below = min(int(place), len(quantiles) - 2)
    return quantiles[below] + (place - below) * (quantiles[below + 1] - quantiles[below])


def of_data(recipe: TrainRecipe, train: DataFile | None, files: Iterable[SpeedProfile]) -> Rows:
    """Rows of the training data: as an earlier run with the same file counted them, else from the file's lines and bytes."""
    seq_len = recipe.train.seq_len
    for file in files:
        # Of hub data without a commit any commit will do: it is an estimate.
        same = train is not None and train.sha256 is not None and (file.data_sha256 or "").startswith(train.sha256)
        if same and file.seq_len == seq_len and file.row_tokens_mean is not None:
            mean = min(file.row_tokens_mean, float(seq_len))
            return Rows(
                file.rows or (train.rows if train else None),
                mean,
                True,
                f"counted by {file.run or 'an earlier run'}",
                file.row_tokens_quantiles,
                loss_part=file.loss_part or _loss_part(recipe),
            )
    count = train.rows if train else None
    if count is None or not train or not train.size_bytes:
        return Rows(
            None,
            float(seq_len),
            False,
            f"not known: rows of {seq_len} tokens are assumed, the longest possible",
            loss_part=_loss_part(recipe),
        )
    mean = min(train.size_bytes / count / BYTES_PER_TOKEN, float(seq_len))
    mean = max(mean, 1.0)
    if recipe.data.eval is None and recipe.data.eval_fraction > 0:
        count = max(1, count - max(round(count * recipe.data.eval_fraction), 1))
    because = f"a guess: {count} rows of {megabytes(train.size_bytes, '.2g')} MB, {BYTES_PER_TOKEN} bytes a token"
    if recipe.data.packing:
        count, mean = max(1, math.ceil(count * mean / seq_len)), float(seq_len)
        because += f", packed to {seq_len}"
    return Rows(count, mean, False, because, loss_part=_loss_part(recipe))


def _loss_part(recipe: TrainRecipe) -> float:
    """Before it was counted: answers are taken to be half of a conversation."""
    return 0.5 if recipe.data.completion_only else 1.0
