"""What the worker's own programs answer on a node, which the node program passes on: a chat, a dry run, a look at the data and at the model."""

from __future__ import annotations

from typing import Annotated, Literal

from homelab.shared.markers import Longest, Matches
from homelab.shared.protocol.marks import PLAIN_LINES, Count, Json, NodeName, Seconds, Words
from homelab.shared.protocol.message import Message

ShownWords = Annotated[str, Longest(2000), PLAIN_LINES]  # a node's, and from a file: they reach a terminal


class Answer(Message):
    """The answer of `chat`. `notes`: on what the model was loaded."""

    answer: Annotated[str, Longest(1_000_000)]
    notes: Annotated[tuple[Words, ...], Longest(100)] = ()


class DryRunResult(Message):
    """One situation of a `dry-run`."""

    peak_bytes: Count
    at: Annotated[str, Longest(200)]
    items: Annotated[dict[NodeName, Count], Longest(1000)]
    seconds: Seconds


class DryRuns(Message):
    """The answer of `dry-run`: in the order of the situations, fewer when the time was over."""

    results: Annotated[tuple[DryRunResult, ...], Longest(1000)]


class BadRow(Message):
    """A row that the worker would refuse: its place (file and line), what is wrong with it, and what fixes it."""

    where: ShownWords
    message: ShownWords
    hint: ShownWords = ""


class RowPreview(Message):
    """A row as the model will read it, from `where`. `texts` are in turn read only and learned; the first may be empty."""

    where: ShownWords
    texts: Annotated[tuple[ShownWords, ...], Longest(100)]


class FileSample(Message):
    """One data file. `unread` says why nothing of it was read; `whole`: all its rows were, not only its beginning.

    Of the rows read, `tokens_sampled` were tokenized, spread evenly; 0 where there was no tokenizer. `rows_longer` of those have more
    than seq_len tokens, `rows_silent` have no token that carries loss, of `rows_mute` only the end of the turn carries loss (the first
    of them is at `mute_at`), `kept_tokens` is the sum of what is left of them. `longest_tokens` is the longest of all rows of the file,
    estimated from its size where it is too long to be tokenized; its place is `longest_at`. `largest_id` is the largest token id
    of the rows that were tokenized. `revision` is the commit of a data set of the hub.
    `read_as` is the form in words, `unused` says what of the rows nobody reads. `sum_tokens` are the tokens of the rows that were tokenized, `loss_tokens`
    those of them that are learned; `previews` some rows, if they were asked for. `labels` is a column that says true or false of an answer, and that nobody has asked
    for; of those that were asked for, `answers_good` are true.
    """

    revision: Annotated[str, Matches("^([0-9a-f]{40})?$")] = ""
    unread: ShownWords | None = None
    whole: bool = False
    rows_read: Count = 0
    rows_bad: Annotated[tuple[BadRow, ...], Longest(10_000)] = ()
    form: str = ""  # chat | prompt-completion | text | preference | labelled; beside `rows_bad`: pairs that nobody has asked for
    read_as: ShownWords = ""
    labels: ShownWords = ""
    unused: Annotated[tuple[ShownWords, ...], Longest(50)] = ()
    needs_chat_template: bool = False
    tokens_sampled: Count = 0
    rows_longer: Count = 0
    rows_silent: Count = 0
    answers_good: Count = 0
    rows_mute: Count = 0
    mute_at: ShownWords = ""
    longest_tokens: Count = 0
    longest_at: ShownWords = ""
    median_tokens: Count = 0
    kept_tokens: Count = 0
    largest_id: Count = 0
    sum_tokens: Count = 0
    loss_tokens: Count = 0
    previews: Annotated[tuple[RowPreview, ...], Longest(100)] = ()


class SampleResult(Message):
    """What `homelab.controller.features.preflight.data_sample.look` brings back. `refused` says why no node could look; `files` are by role ("train", "eval").

    `tokenizer` says what is wrong with the model's tokenizer, where something is.
    """

    node: str = ""
    refused: ShownWords | None = None
    tokenizer: BadRow | None = None
    files: Annotated[dict[str, FileSample], Longest(100)] = {}
    seconds: float = 0.0


class SampleOfData(Message):
    """The answer of `sample-data`: None where nothing is kept and nothing was to be read."""

    sample: SampleResult | None


class BuildFinding(Message):
    """One thing that a person should know before a launch. `topic` is the check that it belongs to."""

    topic: Literal["hub", "kind", "stored", "weights", "adapters", "gradient", "tokenizer"]
    level: Literal["warn", "fail"]
    message: ShownWords
    where: ShownWords = ""
    hint: ShownWords = ""


class BuildResult(Message):
    """What `homelab.controller.features.preflight.model_build.look` brings back. `refused` says why no node could build it.

    `trained` and `total` are numbers of weights (0: it could not be built), `largest_id` the
    largest id of the tokenizer, `beyond` the first tokens (id: text) that the embedding with `embedding_rows` lacks, `positions` the most tokens of
    a row (None: any), `loose_experts_bytes` what a quantised base leaves in 16 bits (None: it is not quantised). Of a model that no node has, and whose
    small files came from the hub, `config` is its config.json, and `has_chat_template` as in `ModelFacts`.
    """

    node: str = ""
    refused: ShownWords | None = None
    findings: Annotated[tuple[BuildFinding, ...], Longest(50)] = ()
    trained: Count = 0
    total: Count = 0
    embedding_rows: Count | None = None
    positions: Count | None = None
    largest_id: Count | None = None
    beyond: Annotated[dict[ShownWords, ShownWords], Longest(20)] = {}
    loose_experts_bytes: Count | None = None
    config: Json | None = None
    has_chat_template: bool | None = None
    seconds: float = 0.0


class BuildAnswer(Message):
    """The answer of `build-model`."""

    built: BuildResult
