"""What rows hold and nobody reads: columns, keys of messages, tools and whole messages that the chat template leaves out. Counted, and said."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from homelab.worker.data.chat_messages import REASONING, Message
from homelab.worker.data.readers import Record
from homelab.worker.data.samples import Sample
from homelab.worker.data.template_traits import Traits

_MOST_NAMED = 8
_WORD = re.compile(r"\w+")


class Unused:
    """Rows that hold something which is not read, by its name."""

    def __init__(self) -> None:
        self._rows: Counter[str] = Counter()

    def count(
        self, record: Record, sample: Sample, traits: Traits | None = None, options: Mapping[str, Any] | None = None, text: str = ""
    ) -> None:
        """Count one row. With `traits`, it was rendered as `text` by the template that has them, with these options."""
        read = sample.used | frozenset(options or ())
        names = {f'"{key}"' for key, value in record.fields.items() if key not in read and value not in (None, "", [], {})}
        if traits is not None:
            names |= {f'"{name}"' for name in options or () if name not in traits.names}
            for message in (*sample.before, *sample.messages):
                names |= _unread(message, traits, text)
        self._rows.update(names)

    @property
    def said(self) -> list[str]:
        """Each in words with the number of its rows, the most frequent first."""
        listed = sorted(self._rows.items(), key=lambda entry: (-entry[1], entry[0]))
        words = [f"{name} (in {count} rows)" for name, count in listed[:_MOST_NAMED]]
        return [*words, f"and {len(listed) - _MOST_NAMED} more"] if len(listed) > _MOST_NAMED else words


def _unread(message: Message, traits: Traits, text: str) -> set[str]:
    """What of a message is not in the text."""
    found = set()
    for key, value in message.items():
        if key in ("role", "content", "tool_calls", "tool_call_id") or value in (None, "", [], {}):
            continue
        spellings = REASONING if key in REASONING else (key,)  # transformers gives a template each of them
        if not any(name in traits.names for name in spellings):
            found.add(f'"{key}" of {message["role"]} messages')
    calls = message.get("tool_calls") or ()
    if calls and (not traits.calls or any(call.get("function", call)["name"] not in text for call in calls)):
        found.add('"tool_calls"')
    words = _WORD.findall(message["content"] or "") if message["role"] != "assistant" else []
    if words and max(words, key=len) not in text:
        found.add(f"messages of the role {message['role']}")
    return found
