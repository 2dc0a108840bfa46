"""Rows as runs of older versions made them (`row_forms.RULES` 1): such a run goes on, is merged and is judged with the rows that it began with.

Nothing of a row but messages, prompt with completion, or text reached the template, and an answer in an earlier turn carried no loss where the
template closes the whole chat with a mark of its own.
"""

from __future__ import annotations

from typing import Any

from homelab.shared.protocol import row_forms
from homelab.shared.protocol.row_forms import RowForm
from homelab.worker.data import chat_messages as reading
from homelab.worker.data import samples
from homelab.worker.data.chat_messages import Message
from homelab.worker.data.chat_templates import Renderer, Text, refused
from homelab.worker.data.readers import Record
from homelab.worker.data.template import TemplateRefusal, told


def form_of(record: Record, settings: dict[str, Any]) -> RowForm:
    """The form of the rows of a file, by its first."""
    return samples.form_of(_narrow(record, settings), settings)


def _narrow(record: Record, settings: dict[str, Any]) -> Record:
    """The row with the columns that were read."""
    own = {"messages", "prompt", "completion", settings["text_column"]}
    return Record(record.index, record.where, {key: value for key, value in record.fields.items() if key in own})


class EarlierRenderer(Renderer):
    """Renders rows by the model's own template alone."""

    def sample(self, record: Record, form: RowForm) -> samples.Sample:
        return super().sample(_narrow(record, self.settings), form)

    def how(self, form: RowForm) -> list[str]:
        return []

    def _as_chat(self, record: Record, form: RowForm, sample: samples.Sample) -> Text:
        if form.kind == row_forms.CHAT:
            listed = record.fields[form.columns["messages"]]
            before: list[Message] = []
            after = reading.from_json(listed, record.where, "messages", "") if isinstance(listed, str) else listed
        else:
            first, answer = record.fields["prompt"], record.fields["completion"]
            before = first if isinstance(first, list) else [{"role": "user", "content": first}]
            after = answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}]
        return self._with_spans(record, before, after)

    def _with_spans(self, record: Record, before: list[Message], messages: list[Message]) -> Text:
        """Render before + messages; the assistant's turns in `messages` carry loss."""
        whole = before + messages
        text = self._own(record, whole, generation_prompt=False)
        if not self.settings["completion_only"]:
            return Text(text, ((0, len(text)),), special_tokens=False)
        turns = [number for number in range(len(before), len(whole)) if whole[number]["role"] == "assistant"]
        spans = [self._turn(record, whole, text, turn) for turn in turns]
        if None in spans[:-1]:
            self.rewritten += 1
        if spans and spans[-1] is None:
            answer = str(whole[turns[-1]]["content"]).strip()
            start = text.rfind(answer)
            spans[-1] = (start, len(text)) if start >= 0 else None
        return Text(text, tuple(span for span in spans if span), special_tokens=False)

    def _turn(self, record: Record, messages: list[Message], text: str, turn: int) -> tuple[int, int] | None:
        """Characters of `text` that the model says in message `turn`; None when the template rewrites history."""
        upto = self._own(record, messages[: turn + 1], generation_prompt=False)
        # There is no message before this one to render a prompt from: the text before the content is the prompt.
        prompt = upto[: max(upto.find(str(messages[turn]["content"])), 0)]
        if turn > 0:
            prompt = self._own(record, messages[:turn], generation_prompt=True)
        if not (upto.startswith(prompt) and text.startswith(upto)):
            return None
        # A line break after the end-of-turn token is the template's, not the model's: generation has stopped before it.
        trimmed = upto.rstrip()
        end = len(trimmed) if trimmed.endswith(self.tokenizer.eos_token or "\0") else len(upto)
        return len(prompt), end

    def _own(self, record: Record, messages: list[Message], *, generation_prompt: bool) -> str:
        try:
            with told():
                return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generation_prompt))
        except TemplateRefusal as error:
            raise refused(record, error) from error
