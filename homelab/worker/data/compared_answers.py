"""Rows of answers: two to one prompt, or one that is judged alone and compared with an answer to another prompt. Pure.

How far the model has moved on those others is the baseline of KTO (Ethayarajh et al. 2024, section 4.1). TRL 1.16 takes the completion of the row before, within a
rank's batch, and wants an unshuffled order for it (trl/trainer/kto_trainer.py). Here the other answer is drawn once for the whole training, by the seed: it depends
neither on who computes what nor on the step, so the base reads each of these rows once; and rows that stand beside each other in a file, often two answers to one
prompt, do not become each other's.
"""

from __future__ import annotations

from collections.abc import Sequence

from homelab.shared.law import order
from homelab.worker.data.rows import Row

_DRAW = -2  # as an epoch: no epoch of the training, nor the choice of held-out rows


def pair(chosen: Row, rejected: Row, most: int) -> Row:
    """Two answers as one row. Where both together have more than `most` tokens, or one has none that counts, nothing of the pair counts."""
    lengths = [len(chosen.tokens), len(rejected.tokens)]
    is_whole = sum(lengths) <= most
    if not is_whole:
        lengths[0] = min(lengths[0], max(most // 2, most - lengths[1]))
        lengths[1] = min(lengths[1], most - lengths[0])
    tokens = chosen.tokens[: lengths[0]] + rejected.tokens[: lengths[1]]
    counts = is_whole and any(chosen.trained) and any(rejected.trained)
    trained = chosen.trained + rejected.trained if counts else bytes(sum(lengths))
    return Row(tokens, trained, chosen.sources, (0, lengths[0]))


def silence_long(rows: Sequence[Row], most: int) -> int:
    """Cut judged answers that have more than `most` tokens with their prompts, and learn nothing of them, as of a pair; how many they are."""
    long = [row for row in rows if len(row.tokens) > most]
    for row in long:
        row.tokens, row.trained = row.tokens[:most], bytes(most)
    return len(long)


def fill_others(rows: Sequence[Row], seed: int, most: int) -> None:
    """Set `other` of each row: its prompt with the answer of the next row of a drawn circle, of at most `most` tokens.

    A row alone gets its own answer. Rows that teach nothing are outside the circle; theirs is a row without a loss.
    """
    counting = [row for row in rows if any(row.trained)]
    circle = order.permutation(seed, _DRAW, len(counting))
    for place, index in enumerate(circle):
        row, answering = counting[index], counting[circle[(place + 1) % len(circle)]]
        prompt, answer = row.trained.index(1), answering.trained.index(1)
        tokens, trained = row.tokens[:prompt] + answering.tokens[answer:], bytes(prompt) + answering.trained[answer:]
        row.other = Row(tokens[:most], trained[:most], row.sources)
    for row in rows:
        row.other = row.other or Row(row.tokens[:2], bytes(len(row.tokens[:2])), row.sources)
