"""What a row of the data is, by its columns: the one rule for every command that looks at data, and for the worker. Pure.

The first row of a file decides for all of its rows, so every rank and every attempt reads a file in the same way. A row that does not fit
is an error of its own. run.json has the number of the rules that made the rows of its run (`RULES`).

Sources of the forms: OpenAI (messages, tools, tool_calls), ShareGPT (conversations with from and value), Stanford Alpaca (instruction,
input, output), LLaMA-Factory's data/README.md (system, history, tools, function_call and observation).
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any, Literal

RULES = 3  # how rows are made. Another rule is another number, and a run goes on with the rows that it began with
RULES_KEY = "rows"  # of a run.json
SINCE_NULLS_ARE_LEFT_OUT = 3
CHAT, PAIR, TEXT = "chat", "prompt-completion", "text"
PREFERENCE: Literal["preference"] = "preference"
LABELLED: Literal["labelled"] = "labelled"
OF_OBJECTIVES = (PREFERENCE, LABELLED)
# What [data] columns can name: where a part of the row stands. `role` and `content` are keys of a message.
PARTS = (
    "messages", "role", "content", "prompt", "input", "completion", "chosen", "rejected", "label", "system", "history", "text", "tools", "documents",
    "chat_template_kwargs",
)  # fmt: skip
_CONVERSATIONS = ("messages", "conversations", "conversation")
_PROMPTS = ("prompt", "instruction", "question", "query", "problem", "user", "human", "input")
_COMPLETIONS = ("completion", "output", "response", "answer", "solution", "assistant", "target", "reply")
_PREFERENCES = ("chosen", "rejected")
_PLAIN = ("prompt completion", "text", "prompt chosen rejected", "chosen rejected", "prompt completion label", "messages label")
_LABELS = ("label", "desirable", "thumbs_up", "is_good")
# Optional parts, with the names that they go by.
_EXTRAS = {
    "input": ("input", "context"), "system": ("system", "system_prompt"), "history": ("history",), "tools": ("tools", "functions"),
    "documents": ("documents",), "chat_template_kwargs": ("chat_template_kwargs",),
}  # fmt: skip
# Columns that say something about a sample and are none of it.
_ABOUT = frozenset((
    "id", "_id", "idx", "index", "uid", "uuid", "key", "hash", "sha256", "url", "link", "source", "src", "origin", "dataset", "subset", "split",
    "category", "categories", "label", "labels", "tag", "tags", "topic", "lang", "language", "license", "licence", "author", "date", "time",
    "timestamp", "created", "created_at", "path", "file", "filename", "repo", "meta", "metadata", "score", "title",
))  # fmt: skip


@dataclass(frozen=True)
class RowForm:
    """How the rows of a file are read. `name` is for people, `kind` one of chat, prompt-completion, text, preference, labelled; `columns` says which column is which part."""

    name: str
    kind: str
    columns: dict[str, str]

    @property
    def required(self) -> tuple[str, ...]:
        """Parts that every row must have."""
        of_label = ("messages", "label") if "messages" in self.columns else ("prompt", "completion", "label")
        of_kind = {
            CHAT: ("messages",),
            PAIR: ("prompt", "completion"),
            TEXT: ("text",),
            PREFERENCE: ("chosen", "rejected"),
            LABELLED: of_label,
        }
        return of_kind[self.kind]

    @property
    def said(self) -> str:
        """The form in words: its kind where a row is what homelab's own names say, else where it comes from and what it is read from."""
        if self.kind == CHAT:
            if (self.name, self.columns["messages"], self.columns["role"], self.columns["content"]) == (
                "messages",
                "messages",
                "role",
                "content",
            ):
                return self.kind
            keys = f", {self.columns['role']} and {self.columns['content']}" if self.columns["role"] != "role" else ""
            return f"{self.name} ({self.columns['messages']}{keys})"
        columns = [
            self.columns[part]
            for part in ("messages", "prompt", "input", "completion", "chosen", "rejected", "label", "text")
            if part in self.columns
        ]
        if " ".join(columns) in _PLAIN:
            return self.kind
        return f"{self.name} ({', '.join(columns)})" if " and ".join(columns) != self.name else self.name


class FormError(Exception):
    """A row that fits no form. `hint` is the edit that fixes it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def detect(row: Mapping[str, Any], settings: Mapping[str, Any]) -> RowForm:
    """The form of the rows of a file whose first row is `row`. `settings`: [data] of the recipe. Raises FormError."""
    given = {part: column for part, column in (settings.get("columns") or {}).items() if column}
    wanted = settings.get("format", "auto")
    if wanted == PREFERENCE:
        return _preference(row, given)
    if wanted == LABELLED:
        return _labelled(row, given)
    text = given.get("text") or settings.get("text_column", "text")
    found = None
    for form in _candidates(row, given, text):
        if wanted in ("auto", form.kind):
            found = form
            break
    if found is None:
        raise _unknown(row, wanted, text)
    return found


def has_preference(row: Mapping[str, Any]) -> bool:
    """Whether a row says which of two answers is better, by the usual names."""
    return all(key in row for key in _PREFERENCES)


def label_in(row: Mapping[str, Any]) -> str | None:
    """The column that says true or false of a row's answer, by the usual names."""
    return next((name for name in _LABELS if isinstance(row.get(name), bool)), None)


def missing(row: Mapping[str, Any], what: str, *, settings: str = "") -> FormError:
    """The error for a row without the columns `what`; `settings` is the edit of the recipe that may help."""
    near = difflib.get_close_matches(what, [str(key) for key in row], n=1)
    meant = f'; did you mean "{near[0]}"?' if near and near[0].isprintable() else ""
    hint = f'rename a key to "{what}", or set [data] {settings or "format (and text_column) or columns"} in the recipe'
    return FormError(f'the row has no "{what}", it has {_names(row)}{meant}', hint)


def _candidates(row: Mapping[str, Any], given: Mapping[str, str], text: str) -> Iterator[RowForm]:
    """The forms that the row may have, the surest first. What the recipe names ([data] columns) goes before every name that is known."""
    extras = {part: _extra(row, part, given) for part in _EXTRAS}
    named_pair = "prompt" in given or "completion" in given
    if "messages" in given or ("messages" in row and not named_pair and "text" not in given):
        yield _chat(row, given.get("messages", "messages"), given, extras)
    if "text" in given:
        yield RowForm("text", TEXT, {"text": text})
    if named_pair or ("prompt" in row and "completion" in row):
        prompt, completion = _one(row, "prompt", _PROMPTS, given), _one(row, "completion", _COMPLETIONS, given)
        if completion in row or not has_preference(row):
            yield _pair(row, prompt, completion, given, extras)
    if text in row:
        yield RowForm("text", TEXT, {"text": text})
    if any(key in row for key in _PREFERENCES):
        return
    listed = [key for key in row if key not in given.values() and key not in extras.values() and first_message(row[key]) is not None]
    named = [key for key in _CONVERSATIONS if key in listed]
    if named or len(listed) == 1:
        yield _chat(row, (named or listed)[0], given, extras)
    elif not listed:
        yield from _by_names(row, given, extras)


def _by_names(row: Mapping[str, Any], given: Mapping[str, str], extras: dict[str, str]) -> Iterator[RowForm]:
    """Alpaca, question and answer, and one column of text."""
    completions = [key for key in _COMPLETIONS if key in row]
    prompts = [key for key in _PROMPTS if key in row and key not in ("input", *completions)] or [key for key in ("input",) if key in row]
    if len(prompts) == len(completions) == 1:
        yield _pair(row, prompts[0], completions[0], given, extras)
    texts = [key for key, value in row.items() if isinstance(value, str) and key.isprintable() and key.lower() not in _ABOUT]
    if len(texts) == 1 and texts[0] not in (*_PROMPTS, *_COMPLETIONS, *_CONVERSATIONS, *extras.values()):
        yield RowForm("text", TEXT, {"text": texts[0]})


def _chat(row: Mapping[str, Any], column: str, given: Mapping[str, str], extras: dict[str, str]) -> RowForm:
    first = first_message(row.get(column)) or {}
    shared = "from" in first and "value" in first and "role" not in first
    role, content = given.get("role", "from" if shared else "role"), given.get("content", "value" if shared else "content")
    columns = {
        "messages": column,
        "role": role,
        "content": content,
        **{part: extras[part] for part in extras if part not in ("input", "history")},
    }
    return RowForm("ShareGPT" if (role, content) == ("from", "value") else "messages", CHAT, columns)


def _pair(row: Mapping[str, Any], prompt: str, completion: str, given: Mapping[str, str], extras: dict[str, str]) -> RowForm:
    is_alpaca = prompt == "instruction" and "prompt" not in given
    present = next((name for name in _EXTRAS["input"] if name in row and name not in (prompt, completion)), None)
    # The published form of prompt and completion has no further input; a question may have its context.
    further = given.get("input") or (
        (present or "input") if is_alpaca else None if (prompt, completion) == ("prompt", "completion") else present
    )
    columns = {"prompt": prompt, **({"input": further} if further else {}), "completion": completion}
    columns |= {part: column for part, column in extras.items() if part != "input"}
    return RowForm("Alpaca" if is_alpaca else f"{prompt} and {completion}", PAIR, columns)


def _preference(row: Mapping[str, Any], given: Mapping[str, str]) -> RowForm:
    """Two answers to one prompt, or two conversations that begin alike. Raises FormError."""
    answers = {part: given.get(part, part) for part in _PREFERENCES}
    for column in answers.values():
        if column not in row:
            error = missing(row, column)
            error.hint = '[objective] learns from pairs: give each row "prompt", "chosen" and "rejected", or name them with [data] columns; else remove [objective]'
            raise error
    prompt = given.get("prompt") or next((name for name in _PROMPTS if name in row), None)
    extras = {part: _extra(row, part, given) for part in _EXTRAS if part != "input"}
    return RowForm("preference", PREFERENCE, {**({"prompt": prompt} if prompt else {}), **answers, **extras})


def _labelled(row: Mapping[str, Any], given: Mapping[str, str]) -> RowForm:
    """An answer to a prompt, or a conversation that ends with an answer, and whether it is good. Raises FormError."""
    label = given.get("label") or next((name for name in _LABELS if name in row), _LABELS[0])
    if label not in row:
        error = missing(row, label)
        if has_preference(row):
            error.hint = '[objective] kind = "kto" learns from single answers: these rows are pairs, so set kind = "dpo"'
        else:
            error.hint = '[objective] kind = "kto" learns from labelled answers: give each row "prompt", "completion" and "label", or name them with [data] columns'
        raise error
    rest = {key: value for key, value in row.items() if key != label}
    inner = detect(rest, {"columns": {part: column for part, column in given.items() if part != "label"}})
    if inner.kind == TEXT:
        error = missing(row, "prompt")
        error.hint = 'a labelled answer needs its question: give each row "prompt" and "completion", or name them with [data] columns'
        raise error
    return RowForm("labelled", LABELLED, {**inner.columns, "label": label})


def _one(row: Mapping[str, Any], part: str, names: tuple[str, ...], given: Mapping[str, str]) -> str:
    """The column of a part: as the recipe says, else its own name, else the one known name that the row has. Raises FormError."""
    if part in given:
        return given[part]
    present = [name for name in names if name in row and name not in given.values()]
    if part in row or len(present) != 1:
        return part
    return present[0]


def _extra(row: Mapping[str, Any], part: str, given: Mapping[str, str]) -> str:
    """The column of a part that rows may lack."""
    names = _EXTRAS[part]
    return given.get(part) or next((name for name in names if name in row), names[0])


def first_message(value: Any) -> Mapping[str, Any] | None:
    """The first message, where `value` is a conversation or the JSON text of one."""
    if isinstance(value, str) and value.lstrip()[:1] == "[":
        try:
            value = json.loads(value)
        except ValueError:
            return None
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return None
    is_message = any(
        role in value[0] and content in value[0] for role, content in (("role", "content"), ("from", "value"), ("role", "tool_calls"))
    )
    return value[0] if is_message else None


def _unknown(row: Mapping[str, Any], wanted: str, text: str) -> FormError:
    """The error for a row that fits no form, with the edit for what it looks like."""
    what = {CHAT: "messages", PAIR: 'prompt" and "completion', TEXT: text}.get(wanted, f'messages", "prompt" and "completion", or "{text}')
    error = missing(row, what)
    if any(key in row for key in _PREFERENCES):
        error.message = f"this is a row with preferences, and the recipe has no [objective]: {error.message}"
        prompt = "prompt" if "prompt" in row else next((name for name in _PROMPTS if name in row), None)
        named = f'{{ prompt = "{prompt}", completion = "chosen" }}' if prompt else '{ messages = "chosen" }'
        error.hint = f'to learn which answer is better: [objective] kind = "dpo" in the recipe; to train on the chosen answers: [data] columns = {named}'
    elif "input_ids" in row:
        error.message = f"this row holds tokens, but homelab makes the tokens itself: {error.message}"
        error.hint = "give the text that these tokens were made from"
    elif any(key in row for key in _CONVERSATIONS):
        key = next(key for key in _CONVERSATIONS if key in row)
        error.hint = (
            f'write "{key}" as [{{"from": "human", "value": "..."}}, {{"from": "gpt", "value": "..."}}], or rename "{key}" to "messages", '
            '"from" to "role" and "value" to "content"'
        )
    elif (pair := _likely_pair(row)) is not None:
        error.hint = f'name the columns: [data] columns = {{ prompt = "{pair[0]}", completion = "{pair[1]}" }} in the recipe; ' + error.hint
    return error


def _likely_pair(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """The two columns that a person most likely means; for a hint."""
    texts = [key for key, value in row.items() if isinstance(value, str) and key.lower() not in _ABOUT and key.isidentifier()]
    if len(texts) < 2:
        return None
    prompt = next((name for name in _PROMPTS if name in texts), texts[0])
    completion = next((name for name in _COMPLETIONS if name in texts and name != prompt), next(name for name in texts if name != prompt))
    return prompt, completion


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(f'"{name}"' for name in row).encode("utf-8", "replace").decode() or "nothing"
