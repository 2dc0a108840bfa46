"""From a record to the text that the model will see, and which of its characters carry loss.

What the assistant says carries loss. The chat template marks it ({% generation %}, its own or TRL's training template), or it is found by
rendering parts of the chat (`turns`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from homelab.shared.protocol import row_forms
from homelab.shared.protocol.row_forms import RowForm
from homelab.worker.data import samples
from homelab.worker.data.assistant_mask import Turns, marks_of
from homelab.worker.data.readers import Record
from homelab.worker.data.samples import Sample
from homelab.worker.data.template import Template, TemplateRefusal
from homelab.worker.data.unused import Unused
from homelab.worker.errors import WorkerError


@dataclass(frozen=True, slots=True)
class Text:
    """A rendered sample: the text, the spans of characters that carry loss, and what the tokenizer adds around it."""

    text: str
    spans: tuple[tuple[int, int], ...]
    special_tokens: bool


class Renderer:
    """Renders rows of one form with a tokenizer's chat template; `tokenizer` None: rows are only checked (`sample`).

    `rewritten` counts rows whose template rewrites history, `unused` what rows hold and nobody reads. `is_plain` ([data] template = "none"):
    plain prompts and completions are joined without changes, as in TRL (trl/trainer/sft_trainer.py, tokenize_fn: the end token behind
    them, and no template).
    """

    def __init__(self, tokenizer: Any, settings: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        self.rewritten = 0
        self.unused = Unused()
        self.is_plain = settings.get("template") == "none"
        self.template: Template | None = None
        if tokenizer is not None and tokenizer.chat_template:
            self.template = Template(tokenizer, learns_answers=settings["completion_only"])
            self._marks = marks_of(tokenizer)

    def sample(self, record: Record, form: RowForm) -> Sample:
        """The row as what is trained on. Raises WorkerError where it does not fit its file's form or the recipe."""
        sample = samples.sample(record, form)
        if sample.must_be_chat and self.is_plain:
            raise WorkerError(
                'this row has messages, which need the chat template, but the recipe says [data] template = "none"',
                where=record.where,
                hint='give "prompt" and "completion" as text, or set [data] template = "auto"',
            )
        return sample

    def render(self, record: Record, form: RowForm) -> Text:
        """The text of a row. Raises WorkerError with its place."""
        sample = self.sample(record, form)
        if self.is_chat(form, sample):
            return self._as_chat(record, sample)
        self.unused.count(record, sample)
        start = len(sample.prompt) if self.settings["completion_only"] else 0
        text = sample.prompt + sample.completion
        return Text(text, ((start, len(text)),), special_tokens=True)

    def is_chat(self, form: RowForm, sample: Sample) -> bool:
        """Whether the row goes through the chat template."""
        return sample.must_be_chat or (form.kind != row_forms.TEXT and self.template is not None and not self.is_plain)

    def how(self, form: RowForm) -> list[str]:
        """How rows are rendered, for a person, where their own columns do not say it."""
        notes = []
        is_chat = self.template is not None and not self.is_plain
        if form.name == "Alpaca":
            asked = "instruction, blank line, input are the question" if is_chat else "in the published text of Alpaca"
            notes.append(f"instructions are used as a question and its answer: {asked}")
        family = self.template.family if self.template is not None and is_chat and form.kind != row_forms.TEXT else None
        if family:
            notes.append(f"rendered with TRL's training template of {family}: every answer is trained, with its thoughts")
        return notes

    def _as_chat(self, record: Record, sample: Sample) -> Text:
        template = self.template
        if template is None:
            hint = "give prompt and completion as strings, or use a model with a chat template"
            raise WorkerError("messages need a chat template, and this tokenizer has none", where=record.where, hint=hint)
        try:
            options = {**template.asked_of(record.fields, sample.used), **sample.options}
            text, spans = self._spans(template, sample, options)
        except TemplateRefusal as error:
            raise refused(record, error) from error
        self.unused.count(record, sample, template.traits(options), options, text)
        return Text(text, tuple(spans), special_tokens=False)

    def _spans(self, template: Template, sample: Sample, options: dict[str, Any]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and what carries loss in it: the assistant's turns in `sample.messages`."""
        whole = [*sample.before, *sample.messages]
        if not self.settings["completion_only"]:
            text = template.render(whole, options)
            return text, [(0, len(text))]
        turns = Turns(template, options, self._marks)
        if template.has_marks(options):
            text, marked = template.marked(whole, options)
            start = turns.common(template.render(sample.before, options, generation_prompt=True), text) if sample.before else 0
            return text, [(max(begin, start), end) for begin, end in marked if end > max(begin, start)]
        text = template.render(whole, options)
        spans = turns.spans(whole, text, len(sample.before))
        self.rewritten += None in spans[:-1]
        return text, [span for span in spans if span]


def refused(record: Record, why: TemplateRefusal) -> WorkerError:
    """The error for a row that the template does not take."""
    if why.is_meant:
        hint = "most templates want user and assistant in turn, and a system message only first"
        return WorkerError(f"the chat template refuses this row: {why}", where=record.where, hint=hint)
    hint = (
        "is this row like the others? If every row fails, the template is wrong (chat_template.jinja or tokenizer_config.json of the model's folder): copy the folder "
        'again; or give the rows as prompt and completion, with [data] template = "none"'
    )
    return WorkerError(f"the chat template breaks on this row: {why}", where=record.where, hint=hint)
