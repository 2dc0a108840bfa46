"""The Modelfile that Ollama makes a model from: the GGUF file, how a conversation is written, and where an answer ends. Pure.

Ollama's templates are Go's (its docs/template.md). What stands around each message is taken from the model's own chat template.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

Render = Callable[[list[dict[str, str]]], str]
_TEXTS = ("homelabQUESTIONone", "homelabANSWERone", "homelabQUESTIONtwo", "homelabANSWERtwo", "homelabQUESTIONthree")


@dataclass(frozen=True)
class ChatForm:
    """Text before the first question, after a question, before an answer that was given already, and between that and the next question."""

    head: str
    to_answer: str
    before_answer: str
    to_question: str


def chat_form(render: Render, beginning: str) -> ChatForm | None:
    """From what a chat template makes of one, two and three questions. `beginning`: the token that llama.cpp puts first by itself, or "".

    None where the template writes something else between messages than their position says (a Modelfile cannot hold that).
    """
    turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant") * 2 + ("user",), _TEXTS, strict=True)]
    try:
        one, two, three = render(turns[:1]), render(turns[:3]), render(turns)
    except Exception:  # noqa: BLE001 - templates raise what they like
        return None
    head, _, to_answer = one.partition(_TEXTS[0])
    before_answer, _, to_question = (
        two.removeprefix(f"{head}{_TEXTS[0]}{to_answer}").removesuffix(f"{_TEXTS[2]}{to_answer}").partition(_TEXTS[1])
    )
    form = ChatForm(head, to_answer, before_answer, to_question)
    if (one, two, three) != tuple(_written(form, _TEXTS[:count]) for count in (1, 3, 5)) or any(
        mark in part for part in astuple(form) for mark in ("{{", '"""')
    ):
        return None
    return replace(form, head=head.removeprefix(beginning))


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
        before = f"{{{{ if $number }}}}{form.to_question}{{{{ else }}}}{form.head}{{{{ end }}}}"
        question = f'{{{{ if eq $message.Role "user" }}}}{before}{{{{ $message.Content }}}}{form.to_answer}'
        answer = '{{ else if eq $message.Role "assistant" }}' + form.before_answer + "{{ $message.Content }}{{ end }}"
        lines.append(f'TEMPLATE """{{{{ range $number, $message := .Messages }}}}{question}{answer}{{{{ end }}}}"""')
    lines += [f'PARAMETER stop "{end}"' for end in ends if end and '"' not in end and "\n" not in end]
    return "\n".join(lines) + "\n"
