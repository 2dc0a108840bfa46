"""Rows of a data file that is looked at before a launch: readable ones, a spread of them, and some as the model will read them."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from homelab.shared.protocol import row_forms
from homelab.worker.data import readers as reading
from homelab.worker.data import samples
from homelab.worker.data.chat_templates import Renderer
from homelab.worker.data.readers import Record
from homelab.worker.errors import WorkerError

MOST_ROWS = 2000  # rows that are tokenized, spread evenly, and rows that are requested from the hub
MOST_OF_TABLE = 100_000  # rows of a Parquet file, which is read where it lies, however large it is
MOST_BAD = 3
_MOST_CHARACTERS = 3_000_000  # of those rows: a second of a tokenizer's work
_TEXT_CHARACTERS, _ROW_CHARACTERS, _MOST_TEXTS = 1500, 3000, 98  # of a text, and of a row that is shown


def read_rows(path: Path, bad: list[dict[str, str]]) -> list[Record]:
    """The readable rows, of a table the first `MOST_OF_TABLE`; the errors of the first unreadable ones go to `bad`.

    It changes the file: an unreadable line is removed, so that the lines after it can be read."""
    for _ in range(MOST_BAD):
        try:
            most = MOST_OF_TABLE if path.suffix == ".parquet" else None
            return reading.read({"kind": "file", "path": str(path), "sha256": None}, most=most)
        except WorkerError as error:
            bad.append(plain(error))
            line = re.search(r", line (\d+)$", error.where)
            if path.suffix != ".jsonl" or line is None:
                return []
            lines = path.read_bytes().split(b"\n")
            number = int(line[1]) - 1
            if len(bad) == MOST_BAD:
                lines = lines[:number]
            else:
                lines[number] = b""
            path.write_bytes(b"\n".join(lines))
    try:
        return reading.read({"kind": "file", "path": str(path), "sha256": None})
    except WorkerError:  # no row is left
        return []


def spread(rows: Sequence[Record]) -> list[Record]:
    """At most `MOST_ROWS` rows from the whole file, fewer where they are long."""
    count = min(len(rows), MOST_ROWS)
    sizes = [len(str(row.fields)) for row in rows[:: max(1, len(rows) // 200)]]
    count = max(1, min(count, int(_MOST_CHARACTERS / max(1.0, statistics.mean(sizes)))))
    return [rows[place * len(rows) // count] for place in range(count)]


def size(row: Record) -> int:
    """Characters of its text, about: a cheap measure of its length."""
    return sum(len(value) if isinstance(value, str) else len(str(value)) for value in row.fields.values())


def far_row(path: str, entry: dict[str, Any]) -> Record:
    """A row after the part that is read; without fields where it was too long to send, or is not a row."""
    try:
        fields = json.loads(entry.get("text") or "null")
    except ValueError:
        fields = None
    return reading.Record(-1, f"{path}, line {entry['line']}", fields if isinstance(fields, dict) else {})


def previews(rows: Sequence[Record], settings: dict[str, Any], tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """The first rows as the model will read them: {"where", "texts": in turn read only and learned}."""
    form = samples.form_of(rows[0], settings)
    renderer = Renderer(tokenizer, settings)
    shown = []
    for row in rows[:count]:
        with contextlib.suppress(WorkerError):  # a row that is refused is reported elsewhere
            texts: list[str] = []
            sides, names = [(row, form)], [""]
            if form.kind == row_forms.PREFERENCE:
                sides, names = samples.sides(row, form), ["[better]\n", "[other]\n"]
            elif form.kind == row_forms.LABELLED:
                names = ["[good]\n" if samples.is_good(row, form) else "[bad]\n"]
            for name, (side, of_side) in zip(names, sides, strict=True):
                text = renderer.render(side, of_side)
                edges = [0, *(edge for span in text.spans for edge in span), len(text.text)]
                pieces = [_short(text.text[start:end]) for start, end in itertools.pairwise(edges)]
                texts = [*texts[:-1], "\n".join([*texts[-1:], name + pieces[0]]), *pieces[1:]]
            lengths = itertools.accumulate(map(len, texts))
            count = min(_MOST_TEXTS, max(2, sum(length <= _ROW_CHARACTERS for length in lengths)))
            texts = texts[:count] if count >= len(texts) else [*texts[: count // 2 * 2], " [...]"]
            shown.append({"where": row.where, "texts": texts})
    return shown


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS else f"{text[: _TEXT_CHARACTERS // 2]} [...] {text[-_TEXT_CHARACTERS // 2 :]}"


def plain(error: WorkerError) -> dict[str, str]:
    """An error for the answer, bounded."""
    return {key: text[:1000] for key, text in error.as_dict().items()}
