"""The mask of a chat whose template marks no answers: which characters the model learns, found by rendering parts of the chat.

The text that a template adds for one more assistant message, after the generation prompt, is the model's answer. What the template writes
behind the last message alone (Phi-3's end of text) belongs to no earlier turn. An answer that stands otherwise in the whole chat than the
model once said it (thoughts that were dropped) is not learned. White space behind the mark that ends a turn is the template's: generation
has stopped before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from homelab.worker.data.chat_messages import Message
from homelab.worker.data.template import Span, Template, TemplateRefusal


class Turns:
    """The assistant's turns of one chat. `marks`: the tokens that stand as one in the text (special and added ones)."""

    def __init__(self, template: Template, options: Mapping[str, Any], marks: re.Pattern[str] | None) -> None:
        self._template = template
        self._options = options
        self._marks = marks
        self._ends_marked = template.traits(options).ends_marked

    def spans(self, messages: Sequence[Message], text: str, first: int) -> list[Span | None]:
        """A span of `text` for each assistant message from number `first` on; None where the template has rewritten it. Raises TemplateRefusal."""
        turns = [number for number in range(first, len(messages)) if messages[number]["role"] == "assistant"]
        spans = [self._span(messages, text, turn) for turn in turns]
        if spans and spans[-1] is None:
            spans[-1] = self._by_content(str(messages[turns[-1]]["content"] or ""), text)
        return spans

    def _span(self, messages: Sequence[Message], text: str, turn: int) -> Span | None:
        upto = text
        if turn + 1 < len(messages):
            try:
                upto = self._template.render(messages[: turn + 1], self._options)
            except TemplateRefusal:  # it does not end with such a message
                return None
        start = self._start(messages, upto, turn)
        end = self.common(upto, text)
        if start is None or end <= start or not self._is_mark(upto[end:]):
            return None
        closed = max(len(text[:end].rstrip()), start)
        if self._marks is not None and not any(mark.end() == closed for mark in self._marks.finditer(text, start, closed)):
            # the mark that ends it stands in the next message (GLM-4), or is another one there (gpt-oss)
            after = self._marks.match(text, end)
            if after is not None and (end < len(upto) or not self._ends_marked):
                return start, after.end()
        return start, closed if self._ends_marked else end

    def _start(self, messages: Sequence[Message], upto: str, turn: int) -> int | None:
        """Where the answer begins: behind what asks for it, as far as the chat has that."""
        if turn == 0:  # there is no message before it to render a prompt from: the text before the content is the prompt
            return max(upto.find(str(messages[0]["content"] or "")), 0)
        before = self._template.render(messages[:turn], self._options, generation_prompt=True)
        if upto.startswith(before):
            return len(before)
        # The prompt opens something that the chat does not have (DeepSeek-R1's thoughts), or the chat ends otherwise there.
        base = self._template.render(messages[:turn], self._options)
        place = self.common(base, upto)
        if place == len(base):
            return self.common(before, upto)
        asked = before[len(base) :] if before.startswith(base) else ""
        found = upto.find(asked, place) if asked else -1
        return found + len(asked) if found >= 0 else None

    def _by_content(self, content: str, text: str) -> Span | None:
        """The last answer of a chat that is no prefix of itself: from its content to the end."""
        start = text.rfind(content.strip())
        return (start, len(text)) if content.strip() and start >= 0 else None

    def common(self, one: str, other: str) -> int:
        """Characters that both begin with, ending before a mark that only one of them has whole."""
        length = _common(one, other)
        for text in (one, other):
            for mark in self._marks.finditer(text, max(0, length - 200)) if self._marks else ():
                if mark.start() >= length:
                    break
                if mark.end() > length:
                    length = mark.start()
                    break
        return length

    def _is_mark(self, tail: str) -> bool:
        """Whether nothing but marks and white space is left of an answer."""
        return not (self._marks.sub("", tail) if self._marks else tail).strip()


def _common(one: str, other: str) -> int:
    """Characters that both begin with."""
    if other.startswith(one) or one.startswith(other):
        return min(len(one), len(other))
    return next(place for place, (mine, its) in enumerate(zip(one, other, strict=False)) if mine != its)


def marks_of(tokenizer: Any) -> re.Pattern[str] | None:
    """The tokens that stand as one in a text, longest first."""
    tokens = {token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values()} | set(tokenizer.all_special_tokens)
    words = sorted((token for token in tokens if token.strip()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words))) if words else None
