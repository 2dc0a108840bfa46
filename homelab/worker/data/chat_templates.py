"""From a record to the text that the model will see, and which of its characters carry loss.

The parts of a chat that carry loss are found by rendering: the text that the template adds for one more assistant message, after the
generation prompt, is the model's answer. The template needs no marks for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from homelab.worker.data.file_kind import half_character
from homelab.worker.data.readers import Record
from homelab.worker.errors import WorkerError


@dataclass(frozen=True, slots=True)
class Text:
    """A rendered sample: the text, the spans of characters that carry loss, and what the tokenizer adds around it."""

    text: str
    spans: tuple[tuple[int, int], ...]
    special_tokens: bool


class Renderer:
    """Renders rows of one format with a tokenizer's chat template. `rewritten` counts rows whose template rewrites history.

    `is_plain` ([data] template = "none"): plain prompts and completions are joined as they stand, as TRL does
    (trl/trainer/sft_trainer.py, tokenize_fn: the end token behind them, and no template).
    """

    def __init__(self, tokenizer: Any, settings: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.rewritten = 0
        self.is_plain = settings.get("template") == "none"  # runs of older versions lack this key

    def text(self, record: Record) -> Text:
        """A row with plain text: all of it carries loss."""
        column = self.settings["text_column"]
        text = _string(record, column)
        return Text(text, ((0, len(text)),), special_tokens=True)

    def prompt_completion(self, record: Record) -> Text:
        """A row with a prompt and its completion, each text or a list of messages."""
        for key in ("prompt", "completion"):
            if key not in record.fields:
                raise _missing(record, key)
        prompt, completion = record.fields["prompt"], record.fields["completion"]
        is_chat = isinstance(prompt, list) or isinstance(completion, list)
        if is_chat and self.is_plain:
            raise _needs_template(record)
        if is_chat or (self.tokenizer.chat_template and not self.is_plain):
            first = prompt if isinstance(prompt, list) else [{"role": "user", "content": _string(record, "prompt")}]
            answer = (
                completion
                if isinstance(completion, list)
                else [{"role": "assistant", "content": _string(record, "completion")}]
            )
            if not self.tokenizer.chat_template:
                hint = "give prompt and completion as strings, or use a model with a chat template"
                raise WorkerError(
                    "messages need a chat template, and this tokenizer has none", where=record.where, hint=hint
                )
            return self._render(record, _messages(first, record), _messages(answer, record))
        prompt, completion = _string(record, "prompt"), _string(record, "completion")
        start = len(prompt) if self.settings["completion_only"] else 0
        return Text(prompt + completion, ((start, len(prompt) + len(completion)),), special_tokens=True)

    def chat(self, record: Record) -> Text:
        """A row with a conversation."""
        if "messages" not in record.fields:
            raise _missing(record, "messages")
        if self.is_plain:
            raise _needs_template(record)
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
            answer = str(whole[turns[-1]]["content"]).strip()
            start = text.rfind(answer)
            spans[-1] = (start, len(text)) if start >= 0 else None
        return Text(text, tuple(span for span in spans if span), special_tokens=False)

    def _turn(self, record: Record, messages: list[dict[str, Any]], text: str, turn: int) -> tuple[int, int] | None:
        """Characters of `text` that the model says in message `turn`; None when the template rewrites history."""
        upto = self._template(record, messages[: turn + 1], generation_prompt=False)
        # There is no message before this one to render a prompt from: the text before the content is the prompt.
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
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt))
        except TemplateError as error:
            hint = "most templates want user and assistant in turn, and a system message only first"
            raise WorkerError(f"the chat template refuses this row: {error}", where=record.where, hint=hint) from error


def detect_format(record: Record, text_column: str) -> str:
    """chat, prompt-completion or text, by the keys of the first row. Raises WorkerError, with the edit that fixes it, for other keys."""
    keys = record.fields
    if "messages" in keys:
        return "chat"
    if "prompt" in keys and "completion" in keys:
        return "prompt-completion"
    if text_column in keys:
        return "text"
    raise _missing(record, f'messages", "prompt" and "completion", or "{text_column}')


def _string(record: Record, key: str) -> str:
    if key not in record.fields:
        raise _missing(record, key)
    value = record.fields[key]
    if not isinstance(value, str):
        hint = f'write "{key}": "..."'
        raise WorkerError(
            f'"{key}" must be text, here it is {type(value).__name__}', where=f"{record.where}, key {key}", hint=hint
        )
    _check_characters(value, f"{record.where}, key {key}")
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
            raise WorkerError(
                f'"content" must be text, here it is {type(message.get("content")).__name__}', where=where, hint=hint
            )
        for key, value in message.items():  # a template may use any of them
            _check_characters(value, f"{where}, key {key}")
    return messages


def _check_characters(value: Any, where: str) -> None:
    """Raises WorkerError for text, however deep, that no tokenizer takes."""
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list | tuple):
        for inner in value:
            _check_characters(inner, where)
    elif isinstance(value, str) and (half := half_character(value)) is not None:
        hint = f'write the whole character: an emoji is two such halves ("\\ud83d\\ude00"), or simply itself; or take {half} out'
        raise WorkerError(f"this text has half a character, {half}, which UTF-8 cannot hold", where=where, hint=hint)


def _needs_template(record: Record) -> WorkerError:
    return WorkerError(
        'this row has messages, which are only text by the chat template, and the recipe says [data] template = "none"',
        where=record.where,
        hint='give "prompt" and "completion" as text, or set [data] template = "auto"',
    )


def _missing(record: Record, key: str) -> WorkerError:
    have = ", ".join(f'"{name}"' for name in record.fields).encode("utf-8", "replace").decode() or "nothing"
    hint = f'rename a key to "{key}", or set [data] format (and text_column) in the recipe'
    if "conversations" in record.fields:
        hint = 'rename "conversations" to "messages", "from" to "role" ("human" -> "user", "gpt" -> "assistant"), "value" to "content"'
    elif "instruction" in record.fields:
        hint = 'rename "instruction" (with "input" after it) to "prompt" and "output" to "completion"'
    return WorkerError(f'the row has no "{key}", it has {have}', where=record.where, hint=hint)
