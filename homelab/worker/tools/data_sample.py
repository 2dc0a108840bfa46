"""python -m homelab.worker.tools.data_sample: would the worker take these rows, and how long are they? The worker's own reading and rendering,
without a model and without torch. Reads one JSON object from standard input:

    {"files": {"train": {"path": file that may be changed, "shown": its name for people, "whole": true, "longest": [], "previews": 0}},
     "data": [data of the recipe], "seq_len": 1024, "model": folder of the tokenizer or null, "revision": null,
     "moment": the time that a chat template is told, UTC, ISO 8601}

`longest` has rows from behind the part that lies in `path` (`homelab.shared.protocol.data_rows.longest_after`). A file may be {"hub": {"path", "config",
"split", "revision"}, "shown"} instead: then it is a data set of the hub (`homelab.worker.data.hub`).

and prints {"tokenizer": null or {"where", "message", "hint"}, "files": {"train": {...}}, "seconds"}; the fields of a file are those of
`homelab.shared.protocol.worker_messages.FileSample`.
"""

from __future__ import annotations

import heapq
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homelab.shared.protocol import row_forms
from homelab.worker.data import hub, samples, template_clock
from homelab.worker.data.chat_templates import Renderer
from homelab.worker.errors import WorkerError
from homelab.worker.tools.sampled_rows import MOST_BAD, MOST_OF_TABLE, MOST_ROWS, far_row, plain, previews, read_rows, size, spread

if TYPE_CHECKING:
    from homelab.shared.protocol.row_forms import RowForm
    from homelab.worker.data.readers import Record

MOST_LONGEST = 3  # rows that are tokenized because they are the longest
_LONGEST_CHARACTERS = 5_000_000  # of such a row
_LONGEST_S = 10.0
_NO_LIMIT = 1 << 30


def look(question: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The contents of each file. With `tokenizer` None, rows are read and their form is checked, and tokens are not counted."""
    files = {}
    for role, file in question["files"].items():
        files[role] = _look_into({"previews": 0, **file}, question["data"], int(question["seq_len"]), tokenizer)
    return files


def _look_into(file: dict[str, Any], settings: dict[str, Any], seq_len: int, tokenizer: Any) -> dict[str, Any]:
    bad: list[dict[str, str]] = []
    if file.get("hub"):
        try:
            rows, is_whole, commit = hub.first_rows(file["hub"], MOST_ROWS)
        except WorkerError as error:
            return {"rows_bad": [plain(error)]}
        reading = {"whole": is_whole, "rows_read": len(rows), "revision": commit}
        return reading | _of_all(rows, file, settings, seq_len, tokenizer, bad) | {"rows_bad": bad}
    if file["path"] is None:
        return {
            "unread": file.get("unread")
            or f"only the beginning of a large file is read, which {Path(file['shown']).suffix} files do not allow"
        }
    rows = read_rows(Path(file["path"]), bad)
    is_whole_table = file["path"].endswith(".parquet") and 0 < len(rows) < MOST_OF_TABLE
    figures: dict[str, Any] = {"whole": bool(file["whole"]) or is_whole_table, "rows_read": len(rows)}
    figures |= _of_all(rows, file, settings, seq_len, tokenizer, bad)
    if figures.get("mute_at"):
        figures["mute_at"] = figures["mute_at"].replace(file["path"], file["shown"])
    for row in figures.get("previews", ()):
        row["where"] = row["where"].replace(file["path"], file["shown"])
    of_copy, of_file = (f"{Path(file[key]).parent}/" for key in ("path", "shown"))  # a hint may write a file beside it
    figures["rows_bad"] = [
        {key: text.replace(file["path"], file["shown"]).replace(of_copy, of_file) for key, text in one.items()} for one in bad
    ]
    return figures


def _of_all(
    rows: Sequence[Record], file: dict[str, Any], settings: dict[str, Any], seq_len: int, tokenizer: Any, bad: list[dict[str, str]]
) -> dict[str, Any]:
    """The figures of the readable rows; the errors of the first unreadable rows go to `bad`."""
    if not rows:
        return {}
    try:
        form = samples.form_of(rows[0], settings)
    except WorkerError as error:
        bad.append(plain(error))
        return {"form": row_forms.PREFERENCE} if row_forms.has_preference(rows[0].fields) else {}
    figures = _of_rows(rows, form, settings, seq_len, tokenizer, bad)
    if figures.get("tokens_sampled"):
        figures |= _longest(rows, file, settings, tokenizer, figures)
        figures["previews"] = previews(rows, settings, tokenizer, int(file["previews"]))
        figures.pop("_tokens_per_character")
    return figures


def _of_rows(
    rows: Sequence[Record], form: RowForm, settings: dict[str, Any], seq_len: int, tokenizer: Any, bad: list[dict[str, str]]
) -> dict[str, Any]:
    """The form of all rows, and the tokens of some."""
    checked = Renderer(None, settings)
    good = _without_bad(rows, lambda row: checked.sample(row, form), bad)
    is_chat = form.kind in (row_forms.PAIR, *row_forms.OF_OBJECTIVES) and any(checked.sample(row, form).must_be_chat for row in good)
    needed = form.kind == row_forms.CHAT or is_chat
    figures: dict[str, Any] = {"form": form.kind, "read_as": form.said, "needs_chat_template": needed}
    if form.kind in (row_forms.PAIR, row_forms.CHAT):
        figures["labels"] = row_forms.label_in(rows[0].fields) or ""
    if tokenizer is None or not good or (needed and not tokenizer.chat_template):
        return figures
    from homelab.worker.data.encoding import Encoder, special_ids, teaches_nothing

    sampled = spread(good)
    encoder = Encoder(tokenizer, settings, _NO_LIMIT, lambda note: None)
    try:
        encoded = encoder.encode(sampled, "train", form)
    except WorkerError:  # a template may refuse a row of the right form
        renderer = Renderer(tokenizer, settings)
        sampled = _without_bad(sampled, lambda row: renderer.render(row, form), bad)
        if not sampled:
            return figures
        encoded = encoder.encode(sampled, "train", form)
    figures |= {"unused": encoder.unused}
    lengths = [len(row.tokens) for row in encoded]
    marks = special_ids(tokenizer)
    mute = [row for row in encoded if any(row.trained) and teaches_nothing(row, tokenizer, marks)]
    where = {row.index: row.where for row in sampled}
    return figures | {
        "tokens_sampled": len(lengths),
        "rows_longer": sum(length > seq_len for length in lengths),
        # Of answers all is learned, or nothing.
        "rows_silent": sum(
            not any(row.trained[:seq_len]) or (form.kind in row_forms.OF_OBJECTIVES and len(row.tokens) > seq_len) for row in encoded
        ),
        "longest_tokens": max(lengths),
        "largest_id": max(max(row.tokens) for row in encoded),
        "median_tokens": round(statistics.median(lengths)),
        "kept_tokens": sum(min(length, seq_len) for length in lengths),
        "sum_tokens": sum(lengths),
        "loss_tokens": sum(row.loss_tokens for row in encoded),
        "answers_good": sum(row.good for row in encoded) if form.kind == row_forms.LABELLED else 0,
        "rows_mute": len(mute),
        "mute_at": where[mute[0].sources[0]] if mute else "",
        "_tokens_per_character": sum(lengths) / max(1, sum(size(row) for row in sampled)),
    }


def _longest(
    rows: Sequence[Record], file: dict[str, Any], settings: dict[str, Any], tokenizer: Any, figures: dict[str, Any]
) -> dict[str, Any]:
    """The longest sample of all rows, not only of those that were tokenized: {"longest_tokens", "longest_at"}.

    The rows with the most characters are tokenized one by one until `_LONGEST_S` seconds are over; the tokens of the others are estimated from their size.
    """
    from homelab.worker.data.encoding import Encoder

    far = [entry for entry in file.get("longest") or () if isinstance(entry.get("bytes"), int)]
    candidates = [(size(row), row) for row in heapq.nlargest(MOST_LONGEST, rows, key=size)]
    candidates += [(entry["bytes"], far_row(file["path"], entry)) for entry in far]
    longest, at = figures["longest_tokens"], ""
    until = time.perf_counter() + _LONGEST_S
    encoder = Encoder(tokenizer, settings, _NO_LIMIT, lambda note: None)
    for characters, row in sorted(candidates, key=lambda entry: -entry[0]):
        tokens = round(characters * figures["_tokens_per_character"])
        if row.fields and characters <= _LONGEST_CHARACTERS and time.perf_counter() < until:
            try:
                tokens = len(encoder.encode([row], "train", samples.form_of(rows[0], settings))[0].tokens)
            except WorkerError:  # a row that the worker refuses is reported elsewhere
                continue
        if tokens >= longest:
            longest, at = tokens, row.where
    return {"longest_tokens": longest, "longest_at": at.replace(file.get("path") or file["shown"], file["shown"])}


def _without_bad(rows: Sequence[Record], render: Callable[[Record], Any], bad: list[dict[str, str]]) -> list[Record]:
    good = []
    for row in rows:
        try:
            render(row)
            good.append(row)
        except WorkerError as error:
            if len(bad) < MOST_BAD:
                bad.append(plain(error))
    return good


def load(folder: str, revision: str | None, moment: str | None = None) -> Any:
    """The tokenizer as the worker loads it. Raises WorkerError when it cannot be loaded, or gives no offsets."""
    from transformers import AutoTokenizer

    from homelab.worker.data.encoding import Encoder

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, revision=revision, trust_remote_code=False)
    except Exception as error:  # `tokenizers` raises plain Exception for a file that it cannot read
        from homelab.worker.model.base_kind import load_error

        known = load_error(error, folder, "tokenizer")
        if known is error:
            hint = "copy the model's folder again, or install what its tokenizer needs on the node"
            known = WorkerError(
                f"the tokenizer cannot be loaded: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}",
                where=folder,
                hint=hint,
            )
        raise known from error
    Encoder(tokenizer, {}, 8, lambda note: None)
    return template_clock.bind(tokenizer, template_clock.moment_of({template_clock.MOMENT: moment or datetime.now(UTC).isoformat()}))


def main() -> int:
    """Read the question, print the answer."""
    began = time.perf_counter()
    question = json.load(sys.stdin)
    os.environ |= {
        "TRANSFORMERS_VERBOSITY": "error",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "true",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    of_hub = any(file.get("hub") for file in question["files"].values())
    if not of_hub:
        os.environ["HF_HUB_OFFLINE"] = "1"
    with_torch = bool(question.get("with_torch"))
    if not with_torch:
        os.nice(10)
        # A tokenizer does without torch, whose import takes three of four seconds. None is Python's own way to say "not installed".
        sys.modules.update({"torch": None} | ({} if of_hub else {"datasets": None}))  # type: ignore[arg-type]
    tokenizer, problem = None, None
    if question.get("model"):
        try:
            tokenizer = load(question["model"], question.get("revision"), question.get(template_clock.MOMENT))
        except WorkerError as error:
            if not with_torch:  # perhaps because torch is missing
                again = json.dumps({**question, "with_torch": True})
                return subprocess.run(
                    [sys.executable, "-m", "homelab.worker.tools.data_sample"], input=again.encode(), check=False
                ).returncode
            problem = plain(error)
    if of_hub:
        hub.import_without_torch()
    files = look(question, tokenizer)
    print(json.dumps({"tokenizer": problem, "files": files, "seconds": round(time.perf_counter() - began, 3)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
