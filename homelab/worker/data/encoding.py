"""From records to rows of tokens: which tokens carry loss, truncation, packing, the held-out part.

TRL can prepare data, too (its import takes 0.4 s with `datasets`, measured). It is not used for two reasons: its packing does not record
which rows are in which sequence, which "every sample exactly once" needs; and its masks for conversations need a chat template with
{% generation %} marks, which most models lack. Where TRL has such a template for a model, rows and masks are TRL's
(`training_templates`). Tokenizers are those of transformers.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from homelab.shared.law import order, packing
from homelab.shared.protocol import row_forms
from homelab.shared.protocol.row_forms import RowForm
from homelab.worker.data import compared_answers, hub, samples
from homelab.worker.data.chat_templates import Renderer, Text
from homelab.worker.data.readers import Record, read
from homelab.worker.data.rows import EncodedData, Row
from homelab.worker.errors import WorkerError

ENCODE_AT_ONCE = 1024  # texts per call of the tokenizer: enough for its threads, and small in memory


def load_data(run: dict[str, Any], tokenizer: Any, node: str = "this node") -> EncodedData:
    """Read and encode the data of a run. Raises WorkerError naming the row when one cannot be used."""
    settings, train = run["recipe"]["data"], run["recipe"]["train"]
    notes: list[str] = []
    encoder = Encoder(tokenizer, settings, int(train["seq_len"]), notes.append)
    commits: dict[str, str] = {}
    place: dict[str, Any] = {"node": node, "run": str(run.get("name", "RUN"))}

    def encoded(role: str) -> list[Row]:
        source = run["data"][role]
        if source["kind"] != "hub":
            records = read(source, **place)
        else:
            records, commits[role] = hub.load(source, **place)
            notes.append(f"{role} data: {hub.named(source)}, revision {commits[role] or 'not known'}")
        if int(run.get(row_forms.RULES_KEY) or 0) < row_forms.SINCE_NULLS_ARE_LEFT_OUT:
            records = [dataclasses.replace(record, filled=False) for record in records]
        return encoder.encode(records, role)

    rows = encoded("train")
    held_out: list[Row] = []
    if run["data"].get("eval"):
        held_out = encoded("eval")
    elif settings["eval_fraction"] > 0:
        rows, held_out = hold_out(rows, settings["eval_fraction"], int(train["seed"]))
    if settings["packing"]:  # never with pairs
        samples = len(rows)
        rows = pack_rows(rows, int(train["seq_len"]))
        notes.append(f"packing: {samples} samples in {len(rows)} rows of at most {train['seq_len']} tokens")
    if not any(row.loss_tokens for row in rows):
        raise WorkerError(
            "no token of the training data carries loss",
            where=run["data"]["train"]["path"],
            hint="raise [train] seq_len so that the answers fit"
            + ("" if run["recipe"].get("objective") else ", or set [data] completion_only = false"),
            needs_launch=True,
        )
    return EncodedData(rows, held_out, notes, commits)


def hold_out(rows: Sequence[Row], fraction: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Split (train, held out) by the seed alone: the same on every node. At least one row is held out, and one is left."""
    count = min(max(round(len(rows) * fraction), 1), len(rows) - 1)
    chosen = set(order.permutation(seed, -1, len(rows))[:count])
    train = [row for index, row in enumerate(rows) if index not in chosen]
    return train, [row for index, row in enumerate(rows) if index in chosen]


def pack_rows(rows: Sequence[Row], capacity: int) -> list[Row]:
    """Join samples into rows of at most `capacity` tokens. Attention between them is cut by position ids (see batches.py)."""
    packed = []
    for members in packing.pack([len(row.tokens) for row in rows], capacity):
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
    """Turns records into rows with one tokenizer and the recipe's [data].

    `unused`: what the records that were encoded last hold and nobody reads, in words.
    """

    def __init__(self, tokenizer: Any, settings: dict[str, Any], seq_len: int, note: Callable[[str], None]) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.seq_len = seq_len
        self.note = note
        self.unused: list[str] = []
        if not getattr(tokenizer, "is_fast", False):
            raise WorkerError(
                f"the tokenizer {type(tokenizer).__name__} cannot say which characters a token covers",
                where="[model] name",
                hint="use a model with a tokenizer.json (save the tokenizer once with a recent transformers)",
            )

    def encode(self, records: Sequence[Record], part: str, form: RowForm | None = None) -> list[Row]:
        """Rows in the order of the records. `part` ("train" or "eval") is for the notes; `form` None: the first record decides."""
        form = form or samples.form_of(records[0], self.settings)
        renderer = Renderer(self.tokenizer, self.settings)
        if form.kind == row_forms.PREFERENCE:
            return self._encode_pairs(records, part, form, renderer)
        judges = form.kind == row_forms.LABELLED
        if form.kind == row_forms.CHAT and not self.tokenizer.chat_template:
            raise WorkerError(
                "the data is chat, but the model's tokenizer has no chat template",
                where=records[0].where,
                hint='use the "-Instruct" or "-chat" version of the model, or give the data as prompt and completion',
            )
        rows: list[Row] = []
        cut = 0
        for start in range(0, len(records), ENCODE_AT_ONCE):
            batch = records[start : start + ENCODE_AT_ONCE]
            texts = [renderer.render(record, form) for record in batch]
            cut += self._tokenize(batch, texts, rows, None if judges else self.seq_len)
        if judges:
            for record, row in zip(records, rows, strict=True):
                row.good = samples.is_good(record, form)
            self._judge(part, rows)
        self._report(part, form, rows, cut, renderer)
        return rows

    def _judge(self, part: str, rows: Sequence[Row]) -> None:
        """Of judged answers: one that is longer than seq_len keeps its place, and is cut and not learned, as a pair is."""
        long = compared_answers.silence_long(rows, self.seq_len)
        good = sum(row.good for row in rows)
        self.note(f"{part} data: {good} answers are good, {len(rows) - good} are bad")
        if long:
            self.note(
                f"{part} data: {long} of {len(rows)} answers are longer than seq_len {self.seq_len} with their prompts; they keep their place and teach nothing"
            )
        if len(rows) > 1 and good in (0, len(rows)):
            self.note(f"{part} data: all answers are {'good' if good else 'bad'}; nothing says what the other kind looks like")

    def _encode_pairs(self, records: Sequence[Record], part: str, form: RowForm, renderer: Renderer) -> list[Row]:
        """A row per pair, both answers in it. A pair that is longer than seq_len keeps its place, and is cut and not learned: half of an answer is another one."""
        of_rejected = Renderer(self.tokenizer, self.settings)  # what rows hold and nobody reads is counted once
        rows: list[Row] = []
        cut = alike = 0
        for start in range(0, len(records), ENCODE_AT_ONCE):
            batch = records[start : start + ENCODE_AT_ONCE]
            texts: list[list[Text]] = [[], []]
            for record in batch:
                for place, (side, of_side) in enumerate(samples.sides(record, form)):
                    texts[place].append((renderer, of_rejected)[place].render(side, of_side))
            both: list[list[Row]] = [[], []]
            for side_texts, side_rows in zip(texts, both, strict=True):
                self._tokenize(batch, side_texts, side_rows, most=None)
            for chosen, rejected in zip(*both, strict=True):
                row = compared_answers.pair(chosen, rejected, self.seq_len)
                cut += len(chosen.tokens) + len(rejected.tokens) > self.seq_len
                alike += chosen.tokens == rejected.tokens
                rows.append(row)
        self._report(part, form, rows, 0, renderer)
        if cut:
            self.note(
                f"{part} data: {cut} of {len(rows)} pairs are longer than seq_len {self.seq_len}, both answers together; they keep their place and teach nothing"
            )
        if alike:
            self.note(f"{part} data: both answers of {alike} of {len(rows)} pairs are the same; they teach nothing")
        return rows

    def _report(self, part: str, form: RowForm, rows: Sequence[Row], cut: int, renderer: Renderer) -> None:
        silent = sum(1 for row in rows if not row.loss_tokens)
        marks = special_ids(self.tokenizer)
        mute = sum(1 for row in rows if row.loss_tokens and teaches_nothing(row, self.tokenizer, marks))
        tokens = sum(len(row.tokens) for row in rows)
        self.note(
            f"{part} data: {len(rows)} rows as {form.said}, {tokens} tokens, {sum(row.loss_tokens for row in rows)} of them are trained"
        )
        if cut:
            self.note(f"{part} data: {cut} of {len(rows)} rows are longer than seq_len {self.seq_len} and were cut at the end")
        if silent:
            self.note(f"{part} data: {silent} rows have no trained token; they keep their place and teach nothing")
        if mute:
            self.note(f"{part} data: the answer of {mute} of {len(rows)} rows is empty; they teach the model to answer nothing")
        if renderer.rewritten:
            self.note(
                f"{part} data: the chat template rewrites earlier turns in {renderer.rewritten} rows; only the last turn of them is trained"
            )
        self.unused = renderer.unused.said
        if self.unused:
            self.note(f"{part} data: these keys are not used: {', '.join(self.unused)}")
        for note in renderer.how(form):
            self.note(f"{part} data: {note}")

    def _tokenize(self, records: Sequence[Record], texts: Sequence[Text], rows: list[Row], most: int | None) -> int:
        """Append a row per text, of at most so many tokens; returns how many were cut."""
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
                cut += most is not None and len(tokens) > most
                trained[0] = 0
                rows.append(Row(array("i", tokens[:most]), bytes(trained[:most]), (record.index,)))
        return cut


def special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids of the tokens that mark turns and ends."""
    marks = {number for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    return frozenset(marks | set(tokenizer.all_special_ids))


_A_FEW = 4  # tokens: an answer with more of them has content


def teaches_nothing(row: Row, tokenizer: Any, marks: frozenset[int]) -> bool:
    """True when no token that carries loss is text: only the end of the turn or white space is learned. `marks`: `special_ids`."""
    if row.loss_tokens > _A_FEW:
        return False
    labelled = [token for token, counts in zip(row.tokens, row.trained, strict=True) if counts and token not in marks]
    return not labelled or not tokenizer.decode(labelled).strip()


def _trained(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> list[int]:
    """1 for every token that covers a character of a span (spans in order). Tokens that the tokenizer adds itself cover no character."""
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
