"""From pairs of answers to the tensors of a pass, and from answers that are judged alone. The two answers of a pair are samples of their own, one after the other.

Beside the keyword arguments of any pass (`batches`), with P pairs in it:

    sides           which answer each token with a loss belongs to: 2 i is the better one of pair i, 2 i + 1 the other; 2 P is a prompt that is learned
    answer_tokens   [2 P] tokens of each answer
    reference       [2 P] the base model's summed log-probability of each
    counting        [P] 1 for a pair that counts, 0 for one that teaches nothing
    learned_tokens  `learned`: tokens of the global batch that are learned by themselves (ORPO)

Where answers are scored, there are `counting` and

    ends            [2 P] where the last token of each answer stands in the flattened pass

With P judged answers in it, each is a side, and it has `sides`, `answer_tokens`, `reference` and `counting`, all of them [P], and

    good            [P] 1 for a good answer, 0 for a bad one
    baseline        how far the model has moved on answers to other prompts, nats of an answer: a step measures it before its passes (`training.baseline`)
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from typing import Any

import torch

from homelab.worker.data.rows import Row

NAMES = ("sides", "answer_tokens", "reference", "counting", "learned_tokens", "good", "baseline", "ends")


def counts(row: Row) -> bool:
    """Whether a pair, or a judged answer, teaches something."""
    return any(row.trained)


def answers(rows: Sequence[Row]) -> list[Row]:
    """The rows of each answer, the better one first."""
    return [
        Row(row.tokens[start:end], row.trained[start:end], row.sources)
        for row in rows
        for start, end in itertools.pairwise((*row.starts, len(row.tokens)))
    ]


def learned_tokens(row: Row) -> int:
    """Tokens of the better answer and its prompt, of a pair that counts; its first has no prediction."""
    return row.starts[1] - 1 if counts(row) else 0


def stand_in(pad: int) -> Row:
    """A pair that teaches nothing, for a rank that has none in this step."""
    return Row(array("i", [pad] * 4), bytes(4), (), (0, 2))


def with_prompts(rows: Sequence[Row]) -> list[Row]:
    """The answers, in which all of a better one that counts has a loss: its prompt, too."""
    sides = answers(rows)
    return [
        Row(side.tokens, bytes([0, *[1] * (len(side.tokens) - 1)]), side.sources) if place % 2 == 0 and any(side.trained) else side
        for place, side in enumerate(sides)
    ]


def tensors(rows: Sequence[Row], *, learns_prompts: bool, learned: float) -> dict[str, Any]:
    """What the pass of these pairs has beside its tokens; `sides` in the order in which tokens with a loss stand in the flattened pass."""
    prompt_side = 2 * len(rows)
    sides: list[int] = []
    for place, side in enumerate(answers(rows)):
        if learns_prompts and place % 2 == 0 and any(side.trained):
            sides += [place if marked else prompt_side for marked in side.trained[1:]]
        else:
            sides += [place] * sum(side.trained)
    return {
        "sides": torch.tensor(sides, dtype=torch.long),
        "answer_tokens": torch.tensor([max(1, sum(side.trained)) for side in answers(rows)], dtype=torch.float64),
        "reference": torch.tensor([number for row in rows for number in row.reference], dtype=torch.float64),
        "counting": torch.tensor([float(counts(row)) for row in rows], dtype=torch.float64),
        "learned_tokens": torch.tensor(learned, dtype=torch.float64),
    }


def scored(rows: Sequence[Row], width: int | None) -> dict[str, Any]:
    """What the pass of these pairs has beside its tokens where answers are scored. `width`: of a padded pass; None: all stand in one row."""
    lengths = [len(side.tokens) for side in answers(rows)]
    begins = [0, *itertools.accumulate(lengths)] if width is None else [width * place for place in range(len(lengths))]
    return {
        "ends": torch.tensor([begin + length - 1 for begin, length in zip(begins, lengths, strict=False)], dtype=torch.long),
        "counting": torch.tensor([float(counts(row)) for row in rows], dtype=torch.float64),
    }


def set_baseline(batches: Sequence[dict[str, Any]], baseline: float) -> None:
    """Put the baseline into passes of judged answers."""
    for batch in batches:
        batch["baseline"] = torch.full_like(batch["baseline"], baseline)


def judged(rows: Sequence[Row]) -> dict[str, Any]:
    """What the pass of these judged answers has beside its tokens, with a baseline of 0."""
    return {
        "sides": torch.tensor([place for place, row in enumerate(rows) for _ in range(sum(row.trained))], dtype=torch.long),
        "answer_tokens": torch.tensor([max(1, sum(row.trained)) for row in rows], dtype=torch.float64),
        "reference": torch.tensor([row.reference[0] for row in rows], dtype=torch.float64),
        "counting": torch.tensor([float(counts(row)) for row in rows], dtype=torch.float64),
        "good": torch.tensor([float(row.good) for row in rows], dtype=torch.float64),
        "baseline": torch.zeros((), dtype=torch.float64),
    }
