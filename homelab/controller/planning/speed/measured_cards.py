"""What others have measured on a card, and how that moves the guess from its data sheet. Pure.

A row is one card, one model and one recipe (`homelab bench card` writes it; the table that is shipped begins with what others published). Another
model is not as many tokens per second, but the card is as far from its guess: the ratio of a row's speed to the roofline of the same row is
what goes over to other models. The median of the card's rows and of the guess itself counts, each row between half and twice the guess: a
single row of another program is no surer than the guess, and further off something else was measured. (Each of the 31 published rows foretold
by the others: off by 1.09 in the median; by the guess alone 1.12, by the median of the rows alone 1.11.)

Rows with the same kind of weights go first, because unpacking them is a cost of its own; where a card has none, those with another kind count
as well: they differ by a tenth or two, and cards by more than two. A row that waited for the host's kernels says nothing of the card.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from homelab.controller.base import hardware
from homelab.controller.base.errors import InputError
from homelab.controller.base.hardware import Card
from homelab.controller.base.models import ConfigModel
from homelab.controller.base.units import binary_size
from homelab.controller.config.recipe import TrainRecipe, parse_recipe
from homelab.controller.planning.model import families, layers
from homelab.controller.planning.model.architecture import Architecture
from homelab.controller.planning.speed import power_limit
from homelab.controller.planning.speed.roofline import flops_per_token, roofline
from homelab.shared.law.speed import Speed
from homelab.shared.recipe import Method

LEAST, MOST = 0.5, 2.0
# Cards clock above the boost of their data sheet while they are cool: 4090 2.7 GHz for 2.52. Beyond that, no product is computed faster.
ABOVE_PEAK = 1.15
Words = Annotated[str, StringConstraints(min_length=1, max_length=80, pattern=r"^[\w .,:+()/#@\[\]-]+$")]
Count = Annotated[int, Field(ge=1, le=10**6)]


class Shape(ConfigModel):
    """The keys of a model's config.json that decide its speed."""

    model_type: Words
    hidden_size: Count
    num_hidden_layers: Count
    num_attention_heads: Count
    num_key_value_heads: Count
    intermediate_size: Count
    vocab_size: Count
    tie_word_embeddings: bool
    head_dim: Count | None = None


class MeasuredCard(ConfigModel):
    """One row: a card, what was trained on it, tokens per second of one card, and the most memory of it, by torch. None: not known.

    It has no name of a machine or a person, no path and no serial number. `homelab`: the version that measured; None: another program did.
    """

    card: Words
    memory_bytes: Annotated[int, Field(ge=2**28, le=2**42)] | None = None
    driver: Words | None = None
    power_limit_w: Annotated[float, Field(ge=1, le=3000)] | None = None
    power_limit_default_w: Annotated[float, Field(ge=1, le=3000)] | None = None
    torch: Words | None = None
    homelab: Words | None = None
    source: Words
    method: Literal["full", "lora", "qlora"]
    base: Literal["auto", "8bit"] = "auto"
    precision: Literal["bf16", "fp16", "fp32"]
    shape: Shape
    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    targets: Literal["all-linear"] | tuple[Words, ...] = "all-linear"
    gradient_checkpointing: bool
    fused_loss: bool = False
    seq_len: Count
    micro_batch: Annotated[int, Field(ge=1, le=65_536)]
    accumulation: Annotated[int, Field(ge=1, le=65_536)] = 1
    tokens_per_s: Annotated[float, Field(gt=0, le=1e8)]
    peak_bytes: Annotated[int, Field(ge=1, le=2**42)] | None = None

    @property
    def tokens(self) -> int:
        """Of one pass."""
        return self.seq_len * self.micro_batch

    def architecture(self) -> Architecture | None:
        """The model's shape; None for a kind that no formula counts, or that these keys do not describe."""
        return None if layers.has_delta(self.shape.model_type) else families.from_config(self.shape.model_dump(exclude_none=True))

    def recipe(self) -> TrainRecipe:
        """The recipe of this row, as far as its speed goes. Raises ValueError for settings that no recipe has."""
        adapters = (
            {}
            if self.method == "full"
            else {"rank": self.rank, "alpha": self.rank, "targets": self.targets if isinstance(self.targets, str) else list(self.targets)}
        )
        base = {"base": self.base} if self.base != "auto" else {}
        train = {
            "global_batch": self.micro_batch,
            "steps": 1,
            "learning_rate": 1e-4,
            "seq_len": self.seq_len,
            "gradient_checkpointing": self.gradient_checkpointing,
        }
        found = parse_recipe(
            {
                "model": {"name": "/shape"},
                "data": {"train": "/rows.jsonl"},
                "method": {"kind": self.method, **adapters, **base},
                "train": train,
            }
        )
        assert isinstance(found, TrainRecipe)
        return found

    def guess(self) -> Speed:
        """The roofline of this row. Its card and its shape are known (`fault`)."""
        card, shape, recipe = hardware.lookup(self.card), self.architecture(), self.recipe()
        assert card is not None and shape is not None
        limited = power_limit.limited(card, self.power_limit_w, self.power_limit_default_w)
        return roofline(limited, shape, recipe.method, recipe.train, self.precision)


@dataclass(frozen=True)
class Table:
    """Rows that can be, and a sentence for each line that is none."""

    rows: tuple[MeasuredCard, ...] = ()
    refused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Moved:
    """How many times as fast a card is as its guess, by so many rows, and who measured them."""

    ratio: float
    sources: tuple[str, ...]

    def speed(self, guess: Speed) -> Speed:
        """The guess, moved; what the host needs for its kernels does not depend on the card."""
        return Speed(guess.step_s / self.ratio, guess.micro_batch_s / self.ratio, guess.token_s / self.ratio, guess.floor_s)


def fault(row: MeasuredCard) -> tuple[str, str] | None:
    """The key of a row that cannot be, and why; None for a row that can."""
    card, shape = hardware.lookup(row.card), row.architecture()
    if card is None:
        return "card", f'homelab has no data sheet of "{row.card}": add it to homelab/controller/base/data_sheets.py first'
    if shape is None:
        return "shape", f"the formulas do not know a model of this shape; known are {', '.join(sorted(families.KINDS))}"
    try:
        recipe = row.recipe()
        flops = flops_per_token(shape, recipe.method, replace(recipe.train, gradient_checkpointing=False))
    except ValueError as error:
        return "method", f"these settings are not a valid recipe: {str(error).splitlines()[0]}"
    except InputError as error:
        return "targets", error.message
    if row.memory_bytes is not None and not card.can_have(row.memory_bytes):
        return "memory_bytes", f"{binary_size(row.memory_bytes)}, but a {card.name} has {binary_size(card.memory_bytes)}"
    memory_bytes = row.memory_bytes or card.memory_bytes
    if row.peak_bytes is not None and row.peak_bytes > memory_bytes:
        return "peak_bytes", f"{binary_size(row.peak_bytes)}, more than the card's memory of {binary_size(memory_bytes)}"
    if row.tokens_per_s * flops > card.peak_flops * ABOVE_PEAK:
        most = card.peak_flops * ABOVE_PEAK / flops
        return (
            "tokens_per_s",
            f"{row.tokens_per_s:.0f} tokens/s; at most {most:.0f} are possible with the {card.peak_flops / 1e12:.0f} TFLOPS of a {card.name}",
        )
    return None


def moved(rows: Iterable[MeasuredCard], card: Card, method: Method, precision: str) -> Moved | None:
    """What these rows say of the card with this method; None where they say nothing."""
    of_card = [
        row
        for row in rows
        if (sheet := hardware.lookup(row.card)) and sheet.name == card.name and (row.precision == "fp32") == (precision == "fp32")
    ]
    ratios = [(row, ratio) for row in of_card if (ratio := _ratio(row)) is not None]
    alike = [one for one in ratios if one[0].recipe().method.quantisation == method.quantisation] or ratios
    if not alike:
        return None
    return Moved(statistics.median([1.0, *(ratio for _, ratio in alike)]), tuple(dict.fromkeys(row.source for row, _ in alike)))


def _ratio(row: MeasuredCard) -> float | None:
    """Measured over guessed speed, between LEAST and MOST; None where the host's kernels bound the pass."""
    guess = row.guess()
    return None if guess.pass_s(row.tokens) <= guess.floor_s else min(MOST, max(LEAST, of_guess(row)))


def of_guess(row: MeasuredCard) -> float:
    """How many times as fast the row is as its data sheet's guess. It can be (`fault`)."""
    return row.tokens_per_s * row.guess().seconds([row.tokens] * row.accumulation) / (row.tokens * row.accumulation)


def words(found: Sequence[Moved]) -> str:
    """`measured by others: QwenLM` or, of several, the first and how many more."""
    sources = list(dict.fromkeys(source for one in found for source in one.sources))
    return f"{OTHERS}: {sources[0]}" + (f" and {len(sources) - 1} more" if len(sources) > 1 else "")


OTHERS = "measured by others"
