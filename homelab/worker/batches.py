"""From rows to tensors: one item per optimizer step, holding this rank's micro-batches and nothing else.

Padded rows carry an attention mask. Packed rows carry position ids that start again at every sample: without a mask, transformers
(`masking_utils.find_packed_sequence_indices`) reads from them where one sample ends, for any number of rows per micro-batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset

from homelab.worker import sampler
from homelab.worker.balance import Balance
from homelab.worker.data import Row

IGNORED = -100  # torch's default ignore_index of cross entropy


@dataclass(frozen=True, slots=True)
class StepItem:
    """This rank's part of one optimizer step: `rows` rows of the global batch.

    `micro_batches` are keyword arguments of the model's forward, `seeds` one random seed for each of them (see `random_seed`).
    `sources` are the data rows in here. `loss_tokens` counts the whole global batch, over all ranks; `input_tokens` only this rank's.
    """

    step: int
    epoch: int
    micro_batches: list[dict[str, torch.Tensor]]
    seeds: list[int]
    sources: list[int]
    rows: int
    input_tokens: int
    loss_tokens: int

    @property
    def pass_tokens(self) -> list[int]:
        """Tokens of each forward pass, padding included; empty for a rank that has no row in this step."""
        return [batch["input_ids"].numel() for batch in self.micro_batches] if self.rows else []


class StepBatches(Dataset):
    """Item s is this rank's part of optimizer step s (0-based). The length is the number of steps of the whole run, on every rank.

    What is in an item depends on what `balance` believes when it is taken: take step s after step s - 1 is done.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        seed: int,
        global_batch: int,
        steps: int,
        balance: Balance,
        rank: int,
        pad: int,
    ) -> None:
        self.rows = rows
        self.seed = seed
        self.global_batch = global_batch
        self.steps = steps
        self.balance = balance
        self.rank = rank
        self.pad = pad
        self.packed = any(len(row.starts) > 1 for row in rows)

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> StepItem:
        if not 0 <= step < self.steps:
            raise IndexError(step)
        epoch, chosen = sampler.step_rows(step, seed=self.seed, count=len(self.rows), global_batch=self.global_batch)
        mine = self.balance.rows_of([len(self.rows[row].tokens) for row in chosen], self.rank)
        rows = [self.rows[chosen[position]] for position in mine]
        cuts = self.balance.passes_of([len(row.tokens) for row in rows], self.rank)
        groups = [[rows[i] for i in cut] for cut in cuts]
        sources = [source for group in groups for row in group for source in row.sources]
        return StepItem(
            step=step,
            epoch=epoch,
            micro_batches=[collate(group, self.pad, packed=self.packed) for group in groups or [[stand_in(self.pad)]]],
            seeds=[
                random_seed(self.seed, step, [source for row in group for source in row.sources])
                for group in groups or [[]]
            ],
            sources=sources,
            rows=len(rows),
            input_tokens=sum(len(row.tokens) for row in rows),
            loss_tokens=sum(self.rows[row].loss_tokens for row in chosen),
        )


def stand_in(pad: int) -> Row:
    """A row without a loss, for a rank that has none in this step: it must still take part in every collective."""
    from array import array

    return Row(array("i", [pad, pad]), bytes(2), ())


def random_seed(seed: int, step: int, sources: Sequence[int]) -> int:
    """A seed for dropout that depends on the samples in a micro-batch, not on the rank: a resumed run draws what the undisturbed one did.

    With one row per micro-batch the draws are the same on any cluster of CPUs, and of cards of one model. Cards of unlike models lay the
    same numbers out differently (ATen/native/cuda/Dropout.cu: by the number of their processors).
    """
    digest = hashlib.sha256(f"homelab dropout {seed} {step} {list(sources)}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


def collate(rows: Sequence[Row], pad: int, *, packed: bool) -> dict[str, torch.Tensor]:
    """input_ids and labels of shape [rows, longest], padded at the end, with attention_mask or (packed) position_ids of that shape."""
    longest = max(len(row.tokens) for row in rows)
    shape = (len(rows), longest)
    tokens = torch.full(shape, pad, dtype=torch.long)
    labels = torch.full(shape, IGNORED, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.long)
    positions = torch.arange(longest).repeat(len(rows), 1)
    for index, row in enumerate(rows):
        length = len(row.tokens)
        tokens[index, :length] = torch.frombuffer(row.tokens, dtype=torch.int32)
        trained = torch.frombuffer(bytearray(row.trained), dtype=torch.bool)
        labels[index, :length] = tokens[index, :length].where(trained, torch.tensor(IGNORED))
        mask[index, :length] = 1
        for start in (*row.starts, length):  # the padding counts as one more sample: nothing attends to it
            positions[index, start:] = torch.arange(longest - start)
    batch: dict[str, Any] = {"input_ids": tokens, "labels": labels}
    return batch | ({"position_ids": positions} if packed else {"attention_mask": mask})


def loss_tokens(batch: dict[str, torch.Tensor]) -> int:
    """Tokens whose prediction counts. The first of a row is predicted by nothing: the model shifts the labels by one."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())
