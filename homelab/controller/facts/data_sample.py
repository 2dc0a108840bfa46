"""A sample of the training data, on one node and with the model's own tokenizer (`homelab.worker.tools.data_sample`)."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from homelab.controller.base.models import WireModel
from homelab.controller.base.sanitize import plain_lines

Count = Annotated[int, Field(ge=0)]
Words = Annotated[str, Field(max_length=2000), AfterValidator(plain_lines)]  # a node's, and from a file: they reach a terminal


class BadRow(WireModel):
    """A row that the worker would refuse: its place (file and line), what is wrong with it, and what fixes it."""

    where: Words
    message: Words
    hint: Words = ""


class FileSample(WireModel):
    """One data file. `unread` says why nothing of it was read; `whole`: all its rows were, not only its beginning.

    Of the rows read, `tokens_sampled` were tokenized, spread evenly; 0 where there was no tokenizer. `rows_longer` of those have more
    than seq_len tokens, `rows_silent` have no token that carries loss, of `rows_mute` only the end of the turn carries loss (the first
    of them is at `mute_at`), `kept_tokens` is the sum of what is left of them. `longest_tokens` is the longest of all rows of the file,
    estimated from its size where it is too long to be tokenized; its place is `longest_at`. `largest_id` is the largest token id
    of the rows that were tokenized. `revision` is the commit of a data set of the hub.
    `read_as` is the form in words, `unused` says what of the rows nobody reads.
    """

    revision: Annotated[str, Field(pattern="^([0-9a-f]{40})?$")] = ""
    unread: Words | None = None
    whole: bool = False
    rows_read: Count = 0
    rows_bad: tuple[BadRow, ...] = ()
    form: str = ""  # chat | prompt-completion | text
    read_as: Words = ""
    unused: Annotated[tuple[Words, ...], Field(max_length=50)] = ()
    needs_chat_template: bool = False
    tokens_sampled: Count = 0
    rows_longer: Count = 0
    rows_silent: Count = 0
    rows_mute: Count = 0
    mute_at: Words = ""
    longest_tokens: Count = 0
    longest_at: Words = ""
    median_tokens: Count = 0
    kept_tokens: Count = 0
    largest_id: Count = 0


class SampleResult(WireModel):
    """What `homelab.controller.features.preflight.data_sample.look` brings back. `refused` says why no node could look; `files` are by role ("train", "eval").

    `tokenizer` says what is wrong with the model's tokenizer, where something is.
    """

    node: str = ""
    refused: Words | None = None
    tokenizer: BadRow | None = None
    files: dict[str, FileSample] = {}
    seconds: float = 0.0


class SampleOfData(WireModel):
    """`sample-data`: None where nothing is kept and nothing was to be read."""

    sample: SampleResult | None
