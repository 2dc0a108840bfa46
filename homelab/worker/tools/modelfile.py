"""The Modelfile that Ollama makes a model from: the GGUF file, how a conversation is written, and where an answer ends. Pure.

Ollama's templates are Go's (its docs/template.md). What stands around each message is taken from the model's own chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

Render = Callable[[list[dict[str, str]]], str]
_SYSTEM = "homelabSYSTEM"
_TEXTS = ("homelabQUESTIONone", "homelabANSWERone", "homelabQUESTIONtwo", "homelabANSWERtwo", "homelabQUESTIONthree")
_COUNTS = (1, 3, 5)  # messages of a conversation that ends with a question


@dataclass(frozen=True)
class ChatForm:
    """Text before the first question, after a question, before an answer that was given already, and between that and the next question.

    `before_system` and `after_system` stand around a system message in the place of `head`; `before_system` None: the template has no place for one.
    """

    head: str
    to_answer: str
    before_answer: str
    to_question: str
    before_system: str | None = None
    after_system: str = ""


def chat_form(render: Render, beginning: str) -> ChatForm | None:
    """From what a chat template makes of one, two and three questions. `beginning`: the token that llama.cpp puts first by itself, or "".

    None where the template writes something else between messages than their position says (a Modelfile cannot hold that).
    """
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2 + ("user",), _TEXTS, strict=True)]
    try:
        one, two, three = (render(turns[:count]) for count in _COUNTS)
    except Exception:  # noqa: BLE001 - templates raise what they like
        return None
    head, _, to_answer = one.partition(_TEXTS[0])
    before_answer, _, to_question = (
        two.removeprefix(f"{head}{_TEXTS[0]}{to_answer}").removesuffix(f"{_TEXTS[2]}{to_answer}").partition(_TEXTS[1])
    )
    form = ChatForm(head, to_answer, before_answer, to_question)
    if not _holds(form, [one, two, three]):
        return None
    form = _with_system(render, turns, form)
    before_system = None if form.before_system is None else form.before_system.removeprefix(beginning)
    return replace(form, head=head.removeprefix(beginning), before_system=before_system)


def _with_system(render: Render, turns: Sequence[dict[str, str]], form: ChatForm) -> ChatForm:
    """The form with the place of a system message, where the template has one before the first question."""
    try:
        written = [render([{"role": "system", "content": _SYSTEM}, *turns[:count]]) for count in _COUNTS]
    except Exception:  # noqa: BLE001 - many templates refuse one
        return form
    head = written[0].partition(_TEXTS[0])[0]
    before, found, after = head.partition(_SYSTEM)
    return replace(form, before_system=before, after_system=after) if found and _holds(replace(form, head=head), written) else form


def _holds(form: ChatForm, written: Sequence[str]) -> bool:
    """Whether this form writes these conversations of `_COUNTS` messages, and a Modelfile can hold it."""
    is_same = [_written(form, _TEXTS[:count]) for count in _COUNTS] == list(written)
    return is_same and not any(mark in part for part in astuple(form) if part for mark in ("{{", '"""'))


def _written(form: ChatForm, texts: Sequence[str]) -> str:
    """A conversation in this form, questions and answers in turn, up to where the next answer begins."""
    parts = [form.head]
    for number, text in enumerate(texts):
        parts += [form.before_answer, text, form.to_question] if number % 2 else [text, form.to_answer]
    return "".join(parts)


def text(file: str, form: ChatForm | None, ends: Sequence[str], *, is_chat: bool) -> str:
    """The Modelfile. `ends`: tokens that end an answer; `is_chat` false: the model was trained on plain text. Without a form Ollama's own guess holds."""
    lines = [f"FROM ./{file}"]
    if not is_chat:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
    elif form:
        lines.append(f'TEMPLATE """{_template(form)}"""')
    lines += [f'PARAMETER stop "{end}"' for end in ends if end and '"' not in end and "\n" not in end]
    return "\n".join(lines) + "\n"


def _template(form: ChatForm) -> str:
    """Go's text of a form. Ollama leaves a system message in .Messages, so the first message need not be the first question."""
    content = "{{ $message.Content }}"
    system = ""
    if form.before_system is not None:
        inside = f"{form.before_system}{content}{form.after_system}{{{{ $begun = true }}}}"
        system = f'{{{{ if eq $message.Role "system" }}}}{{{{ if not $begun }}}}{inside}{{{{ end }}}}{{{{ else }}}}'
    before = f"{{{{ if $asked }}}}{form.to_question}{{{{ else if not $begun }}}}{form.head}{{{{ end }}}}"
    question = f'{{{{ if eq $message.Role "user" }}}}{before}{content}{form.to_answer}{{{{ $begun = true }}}}{{{{ $asked = true }}}}'
    answer = f'{{{{ else if eq $message.Role "assistant" }}}}{form.before_answer}{content}{{{{ end }}}}'
    begin = "{{ $begun := false }}{{ $asked := false }}{{ range $message := .Messages }}"
    return f"{begin}{system}{question}{answer}{'{{ end }}' if system else ''}{{{{ end }}}}"
