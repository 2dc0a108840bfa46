"""From rows to tensors: one item per optimizer step, holding this rank's micro-batches and nothing else.

Where the model supports it (`attention.use`), rows are joined: one row without padding, with the end of each sample. Otherwise rows are
padded. Padded rows carry an attention mask; packed rows carry position ids that restart at every sample, from which transformers
(`masking_utils.find_packed_sequence_indices`) reads the end of each sample, for any number of rows per micro-batch.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import Dataset

from homelab.shared.law import order
from homelab.shared.protocol import chain
from homelab.shared.recipe import Objective
from homelab.worker.balancing.balancer import Balance
from homelab.worker.data import pair_batches
from homelab.worker.data.rows import Row
from homelab.worker.runtime import host_memory

IGNORED = -100  # torch's default ignore_index of cross entropy
Batch = dict[str, Any]  # keyword arguments of a model's forward: tensors, and the lengths of joined rows


@dataclass(frozen=True, slots=True)
class StepItem:
    """This rank's part of one optimizer step: `rows` rows of the global batch.

    `micro_batches` are keyword arguments of the model's forward, `seeds` one random seed for each of them (see `random_seed`).
    `sources` are the data rows in here. `loss_tokens` counts the whole global batch, over all ranks (of an objective, its pairs); `input_tokens` only this rank's.
    `unmatched` are passes over the other rows of judged answers.
    `batch` and `passes` are what the run's record says of the whole global batch (`chain.batch_digest`, `chain.passes_text`).
    """

    step: int
    epoch: int
    micro_batches: list[Batch]
    seeds: list[int]
    sources: list[int]
    rows: int
    input_tokens: int
    loss_tokens: int
    unmatched: list[Batch] = field(default_factory=list)
    batch: str = ""
    passes: str = ""

    @property
    def pass_tokens(self) -> list[int]:
        """Tokens of each forward pass, padding included; empty for a rank that has no row in this step."""
        return [batch["input_ids"].numel() for batch in self.micro_batches] if self.rows else []


class StepBatches(Dataset):
    """Item s is this rank's part of optimizer step s (0-based). The length is the number of steps of the whole run, on every rank.

    What is in an item depends on what `balance` believes when it is taken: take step s after step s - 1 is done.
    """

    def __init__(self, rows: Sequence[Row], *, seed: int, global_batch: int, steps: int, balance: Balance, rank: int, form: Form) -> None:
        self.rows = rows
        self.seed = seed
        self.global_batch = global_batch
        self.steps = steps
        self.balance = balance
        self.rank = rank
        self.form = form
        self.packed = form.objective is None and any(len(row.starts) > 1 for row in rows)

    def __len__(self) -> int:
        return self.steps

    def stand_in(self) -> Batch:
        """A pass without a loss."""
        return self.form.stand_in(packed=self.packed)

    def __getitem__(self, step: int) -> StepItem:
        if not 0 <= step < self.steps:
            raise IndexError(step)
        epoch, chosen = order.step_rows(step, seed=self.seed, count=len(self.rows), global_batch=self.global_batch)
        recorded = chain.passes_of(self.balance.recorded.get(str(step + 1), ""), len(chosen))
        cuts = self.balance.cuts_of([self.rows[row].longer_tokens for row in chosen], recorded)
        groups = [[self.rows[chosen[position]] for position in cut] for cut in cuts[self.rank]]
        rows = [row for group in groups for row in group]
        learned = self.form.learned(self.rows[row] for row in chosen)
        sources = [source for group in groups for row in group for source in row.sources]
        return StepItem(
            step=step,
            epoch=epoch,
            micro_batches=[self.form.batch(group, packed=self.packed, learned=learned) for group in groups] or [self.stand_in()],
            seeds=[random_seed(self.seed, step, [source for row in group for source in row.sources]) for group in groups or [[]]],
            sources=sources,
            rows=len(rows),
            input_tokens=sum(len(row.tokens) for row in rows),
            loss_tokens=sum(self.form.count(self.rows[row]) for row in chosen),
            unmatched=[self.form.unmatched(group) for group in groups],
            batch=chain.batch_digest(source for row in chosen for source in self.rows[row].sources),
            passes=chain.passes_text(cuts, len(chosen)),
        )


def stand_in(pad: int) -> Row:
    """A row without a loss, for a rank that has none in this step: it must still take part in every collective."""
    return Row(array("i", [pad, pad]), bytes(2), ())


def random_seed(seed: int, step: int, sources: Sequence[int]) -> int:
    """A seed for dropout that depends on the samples in a micro-batch, not on the rank: a resumed run draws what the undisturbed one did. Each layer
    makes its own of it (`homelab.worker.model.layer_seeds`).

    With one row per micro-batch the draws are the same on any cluster of CPUs, and of cards of one model. Cards of unlike models lay the
    same numbers out differently (ATen/native/cuda/Dropout.cu: by the number of their processors).
    """
    digest = hashlib.sha256(f"homelab dropout {seed} {step} {list(sources)}".encode()).digest()
    return int.from_bytes(digest[:7], "big")


@dataclass(frozen=True, slots=True)
class Form:
    """How rows become the tensors of a pass. `pad` is the token of padding; `joined` as in `join`, else as in `collate`.

    `labelled` adds the positions with a loss, for a fused loss that wants them: they are counted here, so the CPU does not have to wait for a card.
    `objective`: rows are pairs of answers, or answers that are judged alone, and rows are counted; None: tokens.
    """

    pad: int
    joined: bool = False
    labelled: bool = False
    objective: Objective | None = None

    def batch(self, rows: Sequence[Row], *, packed: bool, learned: float = 1.0) -> Batch:
        """The keyword arguments of one forward pass. `learned`: see `learned`, of the global batch."""
        pairs: Batch = {}
        if self.objective is not None and self.objective.scores:
            batch = join(pair_batches.answers(rows)) if self.joined else collate(pair_batches.answers(rows), self.pad, packed=packed)
            return batch | pair_batches.scored(rows, None if self.joined else batch["input_ids"].shape[1])
        if self.judges:
            pairs = pair_batches.judged(rows)
        elif self.objective is not None:
            learns_prompts = self.objective.learns_answers
            pairs = pair_batches.tensors(rows, learns_prompts=learns_prompts, learned=learned)
            rows = pair_batches.with_prompts(rows) if learns_prompts else pair_batches.answers(rows)
        batch = join(rows) if self.joined else collate(rows, self.pad, packed=packed)
        return batch | ({"labelled": labelled(batch["labels"])} if self.labelled else {}) | pairs

    @property
    def judges(self) -> bool:
        """Whether rows are answers that are judged alone."""
        return self.objective is not None and self.objective.learns_labels

    def unmatched(self, rows: Sequence[Row]) -> Batch:
        """A pass over the other rows of judged answers; empty where rows are none."""
        return self.batch([row.other for row in rows if row.other is not None], packed=False) if self.judges else {}

    def stand_in(self, *, packed: bool) -> Batch:
        """A pass without a loss."""
        row = stand_in(self.pad) if self.objective is None or self.judges else pair_batches.stand_in(self.pad)
        return self.batch([row], packed=packed)

    def count(self, row: Row) -> int:
        """What the loss is divided by, of one row: its tokens with a loss, or 1 for a pair or an answer that teaches something."""
        return row.loss_tokens if self.objective is None else pair_batches.counts(row)

    def counted(self, batch: Batch) -> int:
        """The same of a pass."""
        return loss_tokens(batch) if self.objective is None else int(batch["counting"].sum())

    def learned(self, rows: Iterable[Row]) -> float:
        """Tokens of these rows that an objective learns beside their preference; 1 where it learns none."""
        if self.objective is None or not self.objective.learns_answers:
            return 1.0
        return float(max(1, sum(map(pair_batches.learned_tokens, rows))))


def join(rows: Sequence[Row]) -> Batch:
    """All samples of the rows in one row: input_ids, labels and position_ids (from 0 in each sample) of shape [1, tokens].

    `segment_lengths` are the tokens of each sample, `segment_ends` int32 [samples + 1] where each ends, from 0 (see `attention.forward`).
    No sample's first token carries a loss, so the shift of the labels by one takes nothing from one into the next.
    """
    starts = [(*row.starts, len(row.tokens)) for row in rows]
    lengths = tuple(end - start for ends in starts for start, end in itertools.pairwise(ends))
    tokens = torch.cat([torch.frombuffer(row.tokens, dtype=torch.int32) for row in rows]).long()
    trained = torch.frombuffer(bytearray(b"".join(row.trained for row in rows)), dtype=torch.bool)
    return {
        "input_ids": tokens.unsqueeze(0),
        "labels": tokens.masked_fill(~trained, IGNORED).unsqueeze(0),
        "position_ids": torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0),
        "segment_lengths": lengths,
        "segment_ends": torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32),
    }


def labelled(labels: torch.Tensor) -> torch.Tensor:
    """Positions in the flattened [rows x tokens] whose next token carries a loss."""
    return torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].reshape(-1).ne(IGNORED).nonzero().squeeze(1)


def copied(batches: Sequence[Batch], device: torch.device, *, pin: bool) -> list[Batch]:
    """The batches on `device`, with one copy for each kind of number: the results are parts of one tensor.

    `pin`: from memory that a card reads by itself, so Python does not wait for it. torch keeps that memory until it was read
    (c10/core/CachingHostAllocator.h).
    """
    places: dict[torch.dtype, list[torch.Tensor]] = {}
    for batch in batches:
        for tensor in batch.values():
            if torch.is_tensor(tensor):
                places.setdefault(tensor.dtype, []).append(tensor)
    ready: dict[torch.dtype, Any] = {}
    for dtype, tensors in places.items():
        joined = host_memory.empty([sum(tensor.numel() for tensor in tensors)], dtype, pinned=pin)
        on_device = torch.cat([tensor.reshape(-1) for tensor in tensors], out=joined).to(device, non_blocking=True)
        ready[dtype] = iter(on_device.split([tensor.numel() for tensor in tensors]))
    return [
        {name: next(ready[value.dtype]).view(value.shape) if torch.is_tensor(value) else value for name, value in batch.items()}
        for batch in batches
    ]


def collate(rows: Sequence[Row], pad: int, *, packed: bool) -> Batch:
    """input_ids and labels of shape [rows, longest], padded at the end, with attention_mask or (packed) position_ids of that shape.

    Rows of equal length carry no mask: a mask of ones has no effect.
    """
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
        for start in (*row.starts, length):  # the padding counts as one more sample: no token attends to it
            positions[index, start:] = torch.arange(longest - start)
    batch: Batch = {"input_ids": tokens, "labels": labels}
    if packed:
        return batch | {"position_ids": positions}
    return batch if all(len(row.tokens) == longest for row in rows) else batch | {"attention_mask": mask}


def loss_tokens(batch: Batch) -> int:
    """Tokens whose prediction counts. The first of a row has no prediction: the model shifts the labels by one."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())
