"""What `homelab new` decides about the training, each value with its reason and its source. Pure.

Sources, by the short names that stand in a recipe:

    Regret    Schulman and Thinking Machines Lab, "LoRA Without Regret", 2025: adapters on all layers; alpha 32 makes the best rate independent of
              the rank; the best rate of adapters is ten times that of full training, fifteen times in short runs; large batches cost adapters
              more than full training. Its rate is 5e-5 * 10 * (2000 / hidden size) ** power, with 0.0775 for Qwen and 0.781 for Llama
              (tinker-cookbook, hyperparam_utils.py).
    QLoRA     Dettmers et al., 2023, arXiv:2305.14314: a rate of 2e-4 for 7 and 13 billion weights, batches of 16.
    Capacity  Allen-Zhu and Li, "Physics of Language Models 3.3", 2024, arXiv:2404.05405: a weight stores two bits; a token has about one to learn.
    LIMA      Zhou et al., 2023, arXiv:2305.11206: fifteen passes over a thousand rows.
    Alpaca    Taori et al., 2023, github.com/tatsu-lab/stanford_alpaca: three passes over 52 thousand rows.
    Unsloth   unsloth.ai/docs, guide to the hyperparameters of LoRA: one to three passes, 5 to 10 % of the steps as warm-up, rank 16 or 32.
    DPO       Rafailov et al., 2023, arXiv:2305.18290, and TRL's default beta of 0.1.
    KTO       Ethayarajh et al., 2024, arXiv:2402.01306, and TRL's default beta of 0.1.
    Handbook  huggingface/alignment-handbook, recipes/zephyr-7b-beta: pairs are learned in one pass, at a fortieth of the rate of its sft/config_qlora.yaml.
    Measured  `scripts/bench new`: 55 to 150 rows on a model of 135 million weights, the recipe beside others by hand; questions and answers about one subject
              gained until eight passes, texts and single facts until two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from homelab.controller.planning.model.architecture import Architecture
from homelab.shared.law import order
from homelab.shared.recipe import Train

_RATE, _SHORT_STEPS, _SHORT_FACTOR, _RATE_WIDTH = 5e-4, 320, 1.5, 2000
_RATE_POWER = {"qwen": 0.0775}  # of kinds whose name begins so
_RATE_POWER_ELSE = 0.781
_FULL_TRAINING = 0.1
_RATE_UNKNOWN = 2e-4
_TIDY = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)
_ALPHA = 32
_RANKS = (16, 32, 64, 128)
_BATCHES = ((250, 4), (1000, 8), (10_000, 16))  # (up to so many rows, samples of a step)
_BATCH_ELSE = 32
_STEPS_WANTED, _MOST_PASSES, _UNSURE_PASSES = 300, 8, 6
_PASSES = ((20_000, 3), (100_000, 2))
_STEPS_OF_PAIRS, _MOST_PASSES_OF_PAIRS, _RATE_OF_PAIRS = 150, 3, 1 / 40
_WARMUP = 0.05
_HELD_OUT, _HELD_OUT_MOST, _HELD_OUT_LEAST, _ROWS_TO_HOLD_OUT = 0.1, 400, 4, 20
_EVALUATIONS = (4, 20)
_ENOUGH_ROWS, _LONG_ROW = 100, 200  # tokens of a row that counts for several
_GUESSED_ROOM = 1.5  # of a row whose tokens nobody has counted
_SEQ_STEP, _SEQ_LEAST = 64, 128


_WORD = {"dpo": "pair", "kto": "answer"}


@dataclass(frozen=True)
class Rows:
    """The data: rows, tokens of the longest and of all rows, and the part of these that is learned. `is_counted`: by the model's tokenizer. `objective`: its
    kind, where rows say which answer is better or good."""

    count: int
    longest: int
    tokens: int
    loss_part: float
    is_counted: bool
    objective: str = ""

    @property
    def words(self) -> str:
        """1 row, 55 rows, 55 pairs, 55 answers."""
        return f"{self.count} {_WORD.get(self.objective, 'row')}{'' if self.count == 1 else 's'}"

    @property
    def few(self) -> str:
        """What is to be said of so few rows; "" where there are enough, or where each is a long text of its own."""
        if self.count >= _ENOUGH_ROWS or self.tokens >= _ENOUGH_ROWS * _LONG_ROW:
            return ""
        learned = "learns them by heart rather than what they have in common"
        return f"{self.words} {'is' if self.count == 1 else 'are'} few: a model {learned}; {_ENOUGH_ROWS} are the least that is advised (Unsloth)"


@dataclass(frozen=True)
class Base:
    """The base model. `shape` and `positions` (the most tokens of a row) are None where they are not known; `kind` is its model_type, or ""."""

    kind: str
    shape: Architecture | None
    positions: int | None


@dataclass(frozen=True)
class Decision:
    """One key of the recipe, its value and the reason. `section` and `key` as in the recipe."""

    section: str
    key: str
    value: str | int | float | bool | dict[str, str]
    reason: str

    @property
    def place(self) -> str:
        """For people and for the record: train.learning_rate."""
        return f"{self.section}.{self.key}"


_OBJECTIVES = {
    "dpo": (
        Decision("objective", "kind", "dpo", "each row says which of two answers is better (DPO)"),
        Decision("objective", "beta", 0.1, "how far the model may move from its base; the usual value (DPO)"),
    ),
    "kto": (
        Decision("objective", "kind", "kto", "each row says whether its answer is good (KTO)"),
        Decision("objective", "beta", 0.1, "how far the model may move from its base; the usual value (KTO)"),
    ),
}


def of_training(rows: Rows, base: Base, kind: str, ranks: int) -> tuple[Decision, ...]:
    """[train] and the adapters of [method] for a method of this kind on so many ranks, in the order of the file."""
    batch = _batch(rows, ranks)
    held_out = _held_out(rows)
    trained = rows.count - (max(round(rows.count * held_out), 1) if held_out else 0)
    samples = cast(int, batch.value)
    epochs = _passes_of_answers(trained, samples) if rows.objective else _epochs(trained, samples)
    passes = cast(int, epochs.value)
    steps = passes * order.steps_per_epoch(trained, samples)
    rate = _rate(base, kind, steps)
    return (
        *_OBJECTIVES.get(rows.objective, ()),
        *_evaluation(rows, held_out, passes, steps),
        *(_adapters(rows, base, passes) if kind != "full" else ()),
        batch,
        epochs,
        _of_answers(rate) if rows.objective else rate,
        Decision("train", "warmup_steps", max(1, round(_WARMUP * steps)), f"5 % of the {steps} steps (Unsloth)"),
        Decision("train", "schedule", "cosine", "the rate falls to zero at the end, so the last steps settle (Unsloth)"),
        _seq_len(rows, base),
    )


def shorter(decisions: tuple[Decision, ...], seq_len: int, reason: str) -> tuple[Decision, ...]:
    """The same with another seq_len."""
    return tuple(Decision("train", "seq_len", seq_len, reason) if one.place == "train.seq_len" else one for one in decisions)


def _batch(rows: Rows, ranks: int) -> Decision:
    wanted = next((batch for most, batch in _BATCHES if rows.count <= most), _BATCH_ELSE)
    if ranks > wanted:
        return Decision("train", "global_batch", ranks, f"one row for each of the {ranks} ranks; small batches suit adapters (Regret)")
    return Decision(
        "train", "global_batch", wanted, f"{rows.words}: small batches suit adapters, and few rows need many steps (Regret, QLoRA)"
    )


def _epochs(rows: int, batch: int) -> Decision:
    passes = next((passes for most, passes in _PASSES if rows <= most), 1)
    for_steps = min(_MOST_PASSES, math.ceil(_STEPS_WANTED * batch / rows))
    if for_steps > passes:
        enough = f"make {_STEPS_WANTED} steps" if for_steps < _MOST_PASSES else "are the most that help"
        return Decision("train", "epochs", for_steps, f"rows to learn from are few ({rows}): so many passes {enough} (LIMA, Measured)")
    return Decision("train", "epochs", passes, f"one to three passes are usual, fewer the more rows there are: {rows} (Alpaca, Unsloth)")


def _passes_of_answers(rows: int, batch: int) -> Decision:
    passes = min(_MOST_PASSES_OF_PAIRS, math.ceil(_STEPS_OF_PAIRS * batch / rows))
    if passes > 1:
        return Decision(
            "train", "epochs", passes, f"they are few ({rows}): one pass is usual, and these make about {_STEPS_OF_PAIRS} steps (Handbook)"
        )
    return Decision("train", "epochs", 1, "one pass is usual for answers that are compared (Handbook)")


def _of_answers(rate: Decision) -> Decision:
    tidy = _tidy(cast(float, rate.value) * _RATE_OF_PAIRS)
    return Decision(
        "train",
        "learning_rate",
        tidy,
        f"a fortieth of the rate {rate.reason.partition(',')[0]}: a larger one leaves the language (Handbook)",
    )


def unsure_passes(rows: Rows, train: Train) -> tuple[int, int] | None:
    """Passes worth a try each, where few rows get many of them: facts that come again in other words want all, others the fewest (Measured). Else None."""
    return (2, train.epochs) if train.epochs is not None and train.epochs >= _UNSURE_PASSES and not rows.objective else None


def _rate(base: Base, kind: str, steps: int) -> Decision:
    if base.shape is None:
        rate, why = _RATE_UNKNOWN, "the usual rate; the size of the model is not known here (QLoRA)"
    else:
        power = next((power for name, power in _RATE_POWER.items() if base.kind.startswith(name)), _RATE_POWER_ELSE)
        rate = _RATE * (_RATE_WIDTH / base.shape.hidden) ** power
        why = f"for a model that is {base.shape.hidden} wide"
        if steps < _SHORT_STEPS:
            rate, why = rate * _SHORT_FACTOR, f"{why}, half as much again because the run is short (Regret, Measured)"
        else:
            why += " (Regret)"
    if kind == "full":
        rate, why = rate * _FULL_TRAINING, f"a tenth of an adapter's rate {why}"
    return Decision("train", "learning_rate", _tidy(rate), why)


def _tidy(value: float) -> float:
    """The nearest round number, by ratio."""
    power = 10.0 ** math.floor(math.log10(value))
    digit = min(_TIDY, key=lambda digit: abs(math.log(digit * power / value)))
    return float(f"{digit * power:.2g}")


def _adapters(rows: Rows, base: Base, epochs: int) -> Iterator[Decision]:
    rank, why = _RANKS[0], "enough for most data (Unsloth)"
    if base.shape is not None:
        per_rank = sum(count * (linear.inputs + linear.outputs) for linear, count in base.shape.linears)
        learned = rows.tokens * rows.loss_part
        rank = next((rank for rank in _RANKS if 2 * rank * per_rank >= learned), _RANKS[-1])
        why = f"its {rank * per_rank / 1e6:.1f} million weights have room for {_count(learned)} learned tokens (Capacity)"
    yield Decision("method", "rank", rank, why)
    yield Decision("method", "alpha", _ALPHA, "with 32, the best rate does not depend on the rank (Regret)")
    yield Decision("method", "targets", "all-linear", "adapters on all layers learn most (Regret, QLoRA)")


def _count(number: float) -> str:
    """With two digits, as people say it: 1,400, 2.3 million."""
    return f"{number / 1e6:.2g} million" if number >= 1e6 else f"{float(f'{number:.2g}'):,.0f}"


def _held_out(rows: Rows) -> float:
    """The share of the rows that is set aside; 0 where there are too few."""
    if rows.count < _ROWS_TO_HOLD_OUT:
        return 0.0
    count = min(max(rows.count * _HELD_OUT, _HELD_OUT_LEAST), _HELD_OUT_MOST)
    return float(f"{count / rows.count:.2g}")


def _evaluation(rows: Rows, held_out: float, epochs: int, steps: int) -> Iterator[Decision]:
    if not held_out:
        yield Decision("data", "eval_fraction", 0.0, f"{rows.words} {'is' if rows.count == 1 else 'are'} too few to set some aside")
        return
    count = max(round(rows.count * held_out), 1)
    yield Decision("data", "eval_fraction", held_out, f"{count} rows are never trained on: their loss says when it has learned enough")
    least, most = _EVALUATIONS
    every = max(1, steps // min(most, max(least, 2 * epochs)))
    yield Decision("tracking", "eval_every_steps", every, f"about {steps // every} looks at the held-out rows")
    yield Decision("train", "keep_best", True, "the result is the step with the lowest held-out loss, so a pass too many does no harm")


def _seq_len(rows: Rows, base: Base) -> Decision:
    longest = rows.longest if rows.is_counted else math.ceil(rows.longest * _GUESSED_ROOM)
    wanted = max(_SEQ_LEAST, math.ceil(longest / _SEQ_STEP) * _SEQ_STEP)
    how = (
        f"the longest row has {rows.longest} tokens"
        if rows.is_counted
        else f"the longest row has about {rows.longest} tokens (guessed from its size)"
    )
    if base.positions is not None and wanted > base.positions:
        return Decision("train", "seq_len", base.positions, f"the most that the model reads; {how}, and is cut there")
    return Decision("train", "seq_len", wanted, f"{how}: nothing is cut")
