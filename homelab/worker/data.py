"""From records to rows of tokens: format, chat template, which tokens carry loss, truncation, packing, the held-out part.

TRL would do most of this. It is written here because `import trl` (SFTTrainer) costs seconds of every start, because its packing
loses the identity of the rows, which the "every sample exactly once" of this project needs, and because its completion masks want
chat templates with {% generation %} marks, which most models do not have. Chat templates and tokenizers are transformers' own.

Which tokens of a chat carry loss is found by rendering: what the template adds when it renders one more assistant message, beyond the
prompt it would have given the model, is what the model has to say. Characters become tokens by the tokenizer's offsets.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from homelab.worker import sampler
from homelab.worker.errors import WorkerError
from homelab.worker.records import Record, read

ENCODE_AT_ONCE = 1024  # texts per call of the tokenizer: enough for its threads, little enough for memory


@dataclass(slots=True)
class Row:
    """What is trained as one sequence: a sample, or several when packed.

    `tokens` are token ids, `trained` has a 1 for every token whose prediction counts, `sources` the data rows in here
    and `starts` where each of them begins. A sample's first token is predicted by nothing, so it never counts.
    """

    tokens: array[int]
    trained: bytes
    sources: tuple[int, ...]
    starts: tuple[int, ...] = (0,)

    @property
    def loss_tokens(self) -> int:
        return sum(self.trained)


@dataclass(frozen=True, slots=True)
class Text:
    """A rendered sample: the text, the spans of characters that carry loss, and what the tokenizer adds around it."""

    text: str
    spans: tuple[tuple[int, int], ...]
    special_tokens: bool


@dataclass
class Data:
    """Everything the trainer needs: rows to train on, rows held out, and what has to be said aloud about them."""

    train: list[Row]
    held_out: list[Row]
    notes: list[str] = field(default_factory=list)


def load_data(run: dict[str, Any], tokenizer: Any) -> Data:
    """Read and encode the data of a run. Raises WorkerError naming the row when one cannot be used."""
    settings, train = run["recipe"]["data"], run["recipe"]["train"]
    notes: list[str] = []
    encoder = Encoder(tokenizer, settings, int(train["seq_len"]), notes.append)
    rows = encoder.encode(read(run["data"]["train"], settings["split"]), "train")
    held_out: list[Row] = []
    if run["data"].get("eval"):
        held_out = encoder.encode(read(run["data"]["eval"], settings["split"]), "eval")
    elif settings["eval_fraction"] > 0:
        rows, held_out = hold_out(rows, settings["eval_fraction"], int(train["seed"]))
    if settings["packing"]:
        samples = len(rows)
        rows = pack_rows(rows, int(train["seq_len"]))
        notes.append(f"packing: {samples} samples in {len(rows)} rows of at most {train['seq_len']} tokens")
    if not any(row.loss_tokens for row in rows):
        raise WorkerError(
            "no token of the training data carries loss",
            where=run["data"]["train"]["path"],
            hint="raise [train] seq_len so that the answers fit, or set [data] completion_only = false",
        )
    return Data(rows, held_out, notes)


def hold_out(rows: Sequence[Row], fraction: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Split (train, held out) by the seed alone: the same on every node. At least one row is held out, and one is left."""
    count = min(max(round(len(rows) * fraction), 1), len(rows) - 1)
    chosen = set(sampler.permutation(seed, -1, len(rows))[:count])
    train = [row for index, row in enumerate(rows) if index not in chosen]
    return train, [row for index, row in enumerate(rows) if index in chosen]


def pack_rows(rows: Sequence[Row], capacity: int) -> list[Row]:
    """Join samples into rows of at most `capacity` tokens. Attention between them is cut by position ids (see batches.py)."""
    packed = []
    for members in sampler.pack([len(row.tokens) for row in rows], capacity):
        tokens: array[int] = array("i")
        starts = []
        for member in members:
            starts.append(len(tokens))
            tokens.extend(rows[member].tokens)
        trained = b"".join(rows[member].trained for member in members)
        sources = tuple(source for member in members for source in rows[member].sources)
        packed.append(Row(tokens, trained, sources, tuple(starts)))
    return packed


class Encoder:
    """Turns records into rows with one tokenizer and the recipe's [data]."""

    def __init__(self, tokenizer: Any, settings: dict[str, Any], seq_len: int, note: Callable[[str], None]) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.seq_len = seq_len
        self.note = note
        self.rewritten = 0
        if not getattr(tokenizer, "is_fast", False):
            raise WorkerError(
                f"the tokenizer {type(tokenizer).__name__} cannot say which characters a token covers",
                where="[model] name",
                hint="use a model with a tokenizer.json (save the tokenizer once with a recent transformers)",
            )

    def encode(self, records: Sequence[Record], part: str) -> list[Row]:
        """Rows in the order of the records. `part` ("train" or "eval") is for the notes."""
        form = self.settings["format"]
        form = detect_format(records[0], self.settings["text_column"]) if form == "auto" else form
        render = {"chat": self._chat, "prompt-completion": self._prompt_completion, "text": self._text}[form]
        if form == "chat" and not self.tokenizer.chat_template:
            raise WorkerError(
                "the data is chat, but the model's tokenizer has no chat template",
                where=records[0].where,
                hint='use the "-Instruct" or "-chat" version of the model, or give the data as prompt and completion',
            )
        rows: list[Row] = []
        cut = 0
        for start in range(0, len(records), ENCODE_AT_ONCE):
            some = records[start : start + ENCODE_AT_ONCE]
            texts = [render(record) for record in some]
            cut += self._tokenize(some, texts, rows)
        self._report(part, form, rows, cut)
        return rows

    def _report(self, part: str, form: str, rows: Sequence[Row], cut: int) -> None:
        silent = sum(1 for row in rows if not row.loss_tokens)
        tokens = sum(len(row.tokens) for row in rows)
        self.note(f"{part} data: {len(rows)} rows as {form}, {tokens} tokens, {sum(row.loss_tokens for row in rows)} of them carry loss")
        if cut:
            self.note(f"{part} data: {cut} of {len(rows)} rows are longer than seq_len {self.seq_len} and were cut at the end")
        if silent:
            self.note(f"{part} data: {silent} rows have no token that carries loss; they stay in the order and teach nothing")
        if self.rewritten:
            self.note(
                f"{part} data: the chat template rewrites earlier turns in {self.rewritten} rows; those turns carry no loss, the last does"
            )
            self.rewritten = 0

    def _tokenize(self, records: Sequence[Record], texts: Sequence[Text], rows: list[Row]) -> int:
        """Append a row per text; returns how many were cut to seq_len."""
        cut = 0
        end = self.tokenizer.eos_token_id
        for special in (False, True):
            chosen = [i for i, text in enumerate(texts) if text.special_tokens is special]
            if not chosen:
                continue
            assert len(chosen) == len(texts), "one format per file"
            encoded = self.tokenizer(
                [text.text for text in texts],
                add_special_tokens=special,
                return_offsets_mapping=True,
                return_attention_mask=False,
                verbose=False,
            )
            for record, text, tokens, offsets in zip(records, texts, encoded["input_ids"], encoded["offset_mapping"], strict=True):
                trained = bytearray(_trained(offsets, text.spans))
                if special and end is not None:  # a text ends with the end token, and the model learns to stop there
                    if not tokens or tokens[-1] != end:
                        tokens = [*tokens, end]
                        trained.append(1)
                    trained[-1] = 1
                if not tokens:
                    tokens, trained = [end or 0], bytearray(1)
                cut += len(tokens) > self.seq_len
                trained[0] = 0
                row_tokens = array("i", tokens[: self.seq_len])
                rows.append(Row(row_tokens, bytes(trained[: self.seq_len]), (record.index,)))
        return cut

    def _text(self, record: Record) -> Text:
        column = self.settings["text_column"]
        text = _string(record, column)
        return Text(text, ((0, len(text)),), special_tokens=True)

    def _prompt_completion(self, record: Record) -> Text:
        for key in ("prompt", "completion"):
            if key not in record.fields:
                raise _missing(record, key)
        prompt, completion = record.fields["prompt"], record.fields["completion"]
        if isinstance(prompt, list) or isinstance(completion, list) or self.tokenizer.chat_template:
            first = prompt if isinstance(prompt, list) else [{"role": "user", "content": _string(record, "prompt")}]
            answer = completion if isinstance(completion, list) else [{"role": "assistant", "content": _string(record, "completion")}]
            if not self.tokenizer.chat_template:
                hint = "give prompt and completion as strings, or use a model with a chat template"
                raise WorkerError("messages need a chat template, and this tokenizer has none", where=record.where, hint=hint)
            return self._render(record, _messages(first, record), _messages(answer, record))
        prompt, completion = _string(record, "prompt"), _string(record, "completion")
        start = len(prompt) if self.settings["completion_only"] else 0
        return Text(prompt + completion, ((start, len(prompt) + len(completion)),), special_tokens=True)

    def _chat(self, record: Record) -> Text:
        if "messages" not in record.fields:
            raise _missing(record, "messages")
        messages = record.fields["messages"]
        if isinstance(messages, str):  # a CSV cell holds JSON
            try:
                messages = json.loads(messages)
            except ValueError as error:
                hint = 'the cell is a JSON list: [{"role": "user", "content": "..."}, ...]'
                raise WorkerError(f'"messages" is not JSON: {error}', where=record.where, hint=hint) from error
        return self._render(record, [], _messages(messages, record))

    def _render(self, record: Record, before: list[dict[str, Any]], messages: list[dict[str, Any]]) -> Text:
        """Render before + messages; the assistant's turns in `messages` carry loss."""
        whole = before + messages
        text = self._template(record, whole, generation_prompt=False)
        if not self.settings["completion_only"]:
            return Text(text, ((0, len(text)),), special_tokens=False)
        turns = [i for i in range(len(before), len(whole)) if whole[i]["role"] == "assistant"]
        spans = [self._turn(record, whole, text, turn) for turn in turns]
        if None in spans[:-1]:
            self.rewritten += 1
        if spans and spans[-1] is None:
            said = str(whole[turns[-1]]["content"]).strip()
            start = text.rfind(said)
            spans[-1] = (start, len(text)) if start >= 0 else None
        return Text(text, tuple(span for span in spans if span), special_tokens=False)

    def _turn(self, record: Record, messages: list[dict[str, Any]], text: str, turn: int) -> tuple[int, int] | None:
        """Characters of `text` that the model says in message `turn`; None when the template rewrites history."""
        upto = self._template(record, messages[: turn + 1], generation_prompt=False)
        # Without a message before, a template has nothing to render a prompt from: what it puts before the content is the prompt.
        prompt = upto[: max(upto.find(str(messages[turn]["content"])), 0)]
        if turn > 0:
            prompt = self._template(record, messages[:turn], generation_prompt=True)
        if not (upto.startswith(prompt) and text.startswith(upto)):
            return None
        # A line break after the end-of-turn token is the template's, not the model's: generation has stopped before it.
        trimmed = upto.rstrip()
        end = len(trimmed) if trimmed.endswith(self.tokenizer.eos_token or "\0") else len(upto)
        return len(prompt), end

    def _template(self, record: Record, messages: list[dict[str, Any]], *, generation_prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt)
        except TemplateError as error:
            hint = "most templates want user and assistant in turn, and a system message only first"
            raise WorkerError(f"the chat template refuses this row: {error}", where=record.where, hint=hint) from error


def detect_format(record: Record, text_column: str) -> str:
    """chat, prompt-completion or text, by the keys of the first row. Raises WorkerError with the mending edit for anything else."""
    keys = record.fields
    if "messages" in keys:
        return "chat"
    if "prompt" in keys and "completion" in keys:
        return "prompt-completion"
    if text_column in keys:
        return "text"
    raise _missing(record, f'messages", "prompt" and "completion", or "{text_column}')


def _trained(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """1 for every token that covers a character of a span (spans in order). Tokens that the tokenizer adds itself cover nothing."""
    marks = [0] * len(offsets)
    remaining = iter(spans)
    first, last = next(remaining, (0, 0))
    for index, (start, end) in enumerate(offsets):
        while start >= last > 0:
            first, last = next(remaining, (0, 0))
        if last == 0:
            break
        if end > first and end > start:
            marks[index] = 1
    return marks


def _string(record: Record, key: str) -> str:
    if key not in record.fields:
        raise _missing(record, key)
    value = record.fields[key]
    if not isinstance(value, str):
        hint = f'write "{key}": "..."'
        raise WorkerError(f'"{key}" must be text, here it is {type(value).__name__}', where=f"{record.where}, key {key}", hint=hint)
    return value


def _messages(messages: Any, record: Record) -> list[dict[str, Any]]:
    hint = 'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
    if not isinstance(messages, list) or not messages:
        raise WorkerError("the messages must be a list with at least one message", where=record.where, hint=hint)
    for number, message in enumerate(messages, start=1):
        where = f"{record.where}, message {number}"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise WorkerError('a message is an object with "role" and "content"', where=where, hint=hint)
        if not isinstance(message.get("content"), str):
            raise WorkerError(f'"content" must be text, here it is {type(message.get("content")).__name__}', where=where, hint=hint)
    return messages


def _missing(record: Record, key: str) -> WorkerError:
    have = ", ".join(f'"{name}"' for name in record.fields) or "nothing"
    hint = f'rename a key to "{key}", or set [data] format (and text_column) in the recipe'
    if "conversations" in record.fields:
        hint = 'rename "conversations" to "messages", "from" to "role" ("human" -> "user", "gpt" -> "assistant"), "value" to "content"'
    elif "instruction" in record.fields:
        hint = 'rename "instruction" (with "input" after it) to "prompt" and "output" to "completion"'
    return WorkerError(f'the row has no "{key}", it has {have}', where=record.where, hint=hint)
