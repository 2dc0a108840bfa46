"""A row of the data as what is trained on: messages, prompt and completion, or text, whatever its columns are called.

`homelab.shared.protocol.row_forms` says which column is which; nothing here knows a tokenizer.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from homelab.shared.protocol import row_forms
from homelab.shared.protocol.row_forms import RowForm
from homelab.worker.data import chat_messages as messages
from homelab.worker.data.chat_messages import Message
from homelab.worker.data.readers import Record
from homelab.worker.errors import WorkerError

# The published text of Stanford Alpaca (github.com/tatsu-lab/stanford_alpaca, train.py), for models without a chat template.
_ALPACA = "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
_GOOD, _BAD = (1, "true", "1", "good", "yes"), (0, "false", "0", "bad", "no")
_WITH_INPUT = ", paired with an input that provides further context"


@dataclass(frozen=True, slots=True)
class Sample:
    """One row. `before` are messages that carry no loss, `messages` those whose answers do; both are empty for plain text.

    `prompt` and `completion` are the same as text; a row of plain text is a completion without a prompt. `options` go to the chat template (tools, documents,
    chat_template_kwargs), `used` are the columns that were read. `must_be_chat`: only a chat template makes text of it.
    """

    before: list[Message] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    prompt: str = ""
    completion: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    used: frozenset[str] = frozenset()
    must_be_chat: bool = False


def form_of(record: Record, settings: Mapping[str, Any]) -> RowForm:
    """The form of the rows of a file, by its first. Raises WorkerError with the edit that fixes it."""
    try:
        return row_forms.detect(record.fields, settings)
    except row_forms.FormError as error:
        raise WorkerError(error.message, where=record.where, hint=error.hint) from error


def sample(record: Record, form: RowForm) -> Sample:
    """The sample of a row. Raises WorkerError with the place where the row does not fit the form of its file."""
    for part in form.required:
        if form.columns[part] not in record.fields:
            error = row_forms.missing(record.fields, form.columns[part], settings="format, text_column or columns")
            raise WorkerError(error.message, where=record.where, hint=error.hint)
    used = frozenset(form.columns[part] for part in form.required)
    if form.kind == row_forms.LABELLED:
        is_good(record, form)
        return _judged(record, form, used) if "messages" in form.columns else _pair(record, form, used)
    if form.kind == row_forms.PREFERENCE:
        read = [sample(*side) for side in sides(record, form)]
        return dataclasses.replace(read[0], used=read[0].used | used, must_be_chat=any(one.must_be_chat for one in read))
    if form.kind == row_forms.TEXT:
        return Sample(completion=messages.text(record.fields[form.columns["text"]], record.where, form.columns["text"]), used=used)
    return _chat(record, form, used) if form.kind == row_forms.CHAT else _pair(record, form, used)


def is_good(record: Record, form: RowForm) -> bool:
    """What the label of a row says of its answer. Raises WorkerError with the place."""
    value = record.fields[form.columns["label"]]
    said = value.strip().lower() if isinstance(value, str) else value
    if isinstance(said, bool | int | float | str):
        for labels, means_good in ((_GOOD, True), (_BAD, False)):
            if said in labels:
                return means_good
    raise WorkerError(
        f"a label is true or false, here it is {str(value)[:40]!r}", where=f"{record.where}, key {form.columns['label']}",
        hint="write true for a good answer and false for a bad one (1 and 0, good and bad are read, too)",
    )  # fmt: skip


def sides(record: Record, form: RowForm) -> list[tuple[Record, RowForm]]:
    """A row with a preference as two rows of a prompt and a completion, the chosen one first, each with how it is read.

    An answer that is a whole conversation has its prompt in it: what both begin with. Raises WorkerError where one of them is missing, or both are one.
    """
    for part in form.required:
        if form.columns[part] not in record.fields:
            error = row_forms.missing(record.fields, form.columns[part], settings="columns")
            raise WorkerError(error.message, where=record.where, hint=error.hint)
    answers = [_opened(record, form.columns[part]) for part in form.required]
    named = form.columns.get("prompt")
    prompt = _opened(record, named) if named in record.fields else None
    conversations = [answer for answer in answers if isinstance(answer, list)]
    first = [answer[0] for answer in conversations if answer and isinstance(answer[0], dict)]
    begins_with_prompt = any(message.get("role", message.get("from")) in ("system", "user", "human") for message in first)
    if prompt is None or (len(conversations) == 2 and begins_with_prompt):
        if len(conversations) < 2:
            raise WorkerError(
                "the row has no prompt: its answers are no conversations", where=record.where,
                hint='give each row a "prompt", or name its column: [data] columns = { prompt = "..." } in the recipe',
            )  # fmt: skip
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*answers, strict=False)))
        same = min(same, *(len(answer) - 1 for answer in answers))
        if same <= 0:
            raise WorkerError(
                "chosen and rejected do not begin with the same prompt", where=record.where,
                hint='both begin with the same messages and differ in their last answers; or give the question once, as "prompt"',
            )  # fmt: skip
        prompt, answers = answers[0][:same], [answer[same:] for answer in answers]
    asked = named or "prompt"
    of_both = {name: value for name, value in record.fields.items() if name not in (asked, *(form.columns[part] for part in form.required))}
    columns = {part: column for part, column in form.columns.items() if part not in form.required} | {"prompt": asked}
    return [
        (
            dataclasses.replace(record, fields={**of_both, asked: prompt, form.columns[part]: answer}),
            RowForm("preference", row_forms.PAIR, {**columns, "completion": form.columns[part]}),
        )
        for part, answer in zip(form.required, answers, strict=True)
    ]


def _opened(record: Record, column: str) -> Any:
    """A cell, or the conversation whose JSON text it is. An answer may be a JSON list, too."""
    value = record.fields[column]
    return json.loads(value) if isinstance(value, str) and row_forms.first_message(value) is not None else value


def _chat(record: Record, form: RowForm, used: frozenset[str]) -> Sample:
    column = form.columns["messages"]
    whole = _messages(record, form, column)
    system, more = _system(record, form)
    if system and whole[0]["role"] != "system":
        whole = [*system, *whole]
    options, opened = _options(record, form)
    return Sample(messages=whole, options=options, used=used | opened | (more if system else frozenset()), must_be_chat=True)


def _judged(record: Record, form: RowForm, used: frozenset[str]) -> Sample:
    """A conversation whose last answer is judged; what comes before it is the prompt."""
    chat = _chat(record, form, used)
    *before, last = chat.messages
    if last["role"] != "assistant" or not before:
        raise WorkerError(
            "the conversation does not end with an answer to be judged", where=f"{record.where}, key {form.columns['messages']}",
            hint="let the last message be the assistant's, after a question; the label is about it",
        )  # fmt: skip
    return dataclasses.replace(chat, before=before, messages=[last])


def _pair(record: Record, form: RowForm, used: frozenset[str]) -> Sample:
    names = {part: form.columns[part] for part in ("prompt", "completion")}
    prompt, completion = (record.fields[names[part]] for part in ("prompt", "completion"))
    is_chat = isinstance(prompt, list) or isinstance(completion, list)
    further = _filled(record, form, "input")
    asked = "" if isinstance(prompt, list) else messages.text(prompt, record.where, names["prompt"])
    given = messages.text(further, record.where, form.columns["input"]) if further is not None else ""
    answer = "" if isinstance(completion, list) else messages.text(completion, record.where, names["completion"])
    system, of_system = _system(record, form)
    history, of_history = _history(record, form)
    options, opened = _options(record, form)
    question = "\n\n".join(filter(None, (asked, given)))
    before = _messages(record, form, names["prompt"]) if isinstance(prompt, list) else [{"role": "user", "content": question}]
    turns = _messages(record, form, names["completion"]) if isinstance(completion, list) else [{"role": "assistant", "content": answer}]
    if before[0]["role"] == "system":
        system, of_system = [], frozenset()
    text = "" if is_chat else _as_text(form, system, history, asked, given)
    if further is not None:
        used |= {form.columns["input"]}
    return Sample([*system, *history, *before], turns, text, answer, options, used | of_system | of_history | opened, is_chat)


def _as_text(form: RowForm, system: list[Message], history: list[Message], asked: str, given: str) -> str:
    """The prompt without a chat template: the published text of Alpaca, and a prompt of any other form as it stands."""
    if form.name != "Alpaca":
        return "\n\n".join([*(message["content"] or "" for message in (*system, *history)), asked, *([given] if given else [])])
    start = f"{system[0]['content']}\n\n" if system else _ALPACA.format(_WITH_INPUT if given else "")
    turns = "".join(
        f"### {'Instruction' if message['role'] == 'user' else 'Response'}:\n{message['content'] or ''}\n\n" for message in history
    )
    further = f"### Input:\n{given}\n\n" if given else ""
    return f"{start}{turns}### Instruction:\n{asked}\n\n{further}### Response:\n"


def _messages(record: Record, form: RowForm, column: str) -> list[Message]:
    keys = {"role": form.columns["role"], "content": form.columns["content"]} if "role" in form.columns else {}
    value = messages.without_nulls(record.fields[column]) if record.filled else record.fields[column]
    return messages.conversation(value, record.where, column=column, **keys)


def _filled(record: Record, form: RowForm, part: str) -> Any:
    """What the row has in the column of a part; None where it has nothing there."""
    value = record.fields.get(form.columns.get(part, ""))
    return value if value not in (None, "", [], {}) else None


def _system(record: Record, form: RowForm) -> tuple[list[Message], frozenset[str]]:
    value = _filled(record, form, "system")
    if value is None:
        return [], frozenset()
    column = form.columns["system"]
    return [{"role": "system", "content": messages.text(value, record.where, column)}], frozenset({column})


def _history(record: Record, form: RowForm) -> tuple[list[Message], frozenset[str]]:
    """Earlier turns: [[question, answer], ...] of Alpaca's form, or messages."""
    value = _filled(record, form, "history")
    if value is None:
        return [], frozenset()
    column = form.columns["history"]
    if isinstance(value, str):
        value = messages.from_json(value, record.where, column, hint="the cell is a JSON list: [[question, answer], ...]")
    if isinstance(value, list) and all(isinstance(turn, dict) for turn in value):
        value = messages.without_nulls(value) if record.filled else value
        return messages.conversation(value, f"{record.where}, key {column}", column=column), frozenset({column})
    turns: list[Message] = []
    for turn in value if isinstance(value, list) else [None]:
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise WorkerError(
                f'"{column}" must be a list of pairs',
                where=f"{record.where}, key {column}",
                hint=f'write "{column}": [["question", "answer"], ...]',
            )
        turns += [
            {"role": role, "content": messages.text(said, record.where, column)}
            for role, said in zip(("user", "assistant"), turn, strict=True)
        ]
    return turns, frozenset({column})


def _options(record: Record, form: RowForm) -> tuple[dict[str, Any], frozenset[str]]:
    """What goes to the chat template beside the messages, and the columns of it."""
    options: dict[str, Any] = {}
    used = set()
    for part, kind in (("tools", list), ("documents", list), ("chat_template_kwargs", dict)):
        value = _filled(record, form, part)
        if value is None:
            continue
        column = form.columns[part]
        where = f"{record.where}, key {column}"
        if isinstance(value, str):
            value = messages.from_json(value, where, column, hint="write it as JSON, or as text that is JSON")
        elif record.filled:
            value = messages.without_nulls(value)
        if not isinstance(value, kind) or (kind is list and not all(isinstance(entry, dict) for entry in value)):
            what = "a list of objects" if kind is list else "an object"
            raise WorkerError(f'"{column}" must be {what}', where=where, hint='write "tools": [{"type": "function", "function": {"name": "..."}}]'
                              if part == "tools" else f"write it as {what}")  # fmt: skip
        messages.check_characters(value, where)
        if value:
            options |= value if part == "chat_template_kwargs" else {part: value}
            used.add(column)
    return options, frozenset(used)
