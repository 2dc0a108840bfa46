"""Conversations as people have them, brought to the one form that chat templates read: role, content, tool_calls.

OpenAI's form (content null beside tool_calls, arguments as JSON text, content as a list of text parts, the older function_call) and
ShareGPT's (from and value; function_call and observation) are read. What a message holds beside that reaches the template as it stands.
"""

from __future__ import annotations

import json
from typing import Any

from homelab.shared.protocol.file_kind import half_character
from homelab.worker.errors import WorkerError

Message = dict[str, Any]
_HINT = 'write [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
# ShareGPT's names, and those that older data has in the place of OpenAI's.
_SHARED_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bot": "assistant", "chatbot": "assistant", "ai": "assistant",
    "model": "assistant", "system": "system", "developer": "developer", "tool": "tool", "observation": "tool", "function": "tool", "ipython": "ipython",
    "function_response": "tool", "tool_response": "tool", "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
_CALLS = ("function_call", "tool_call")
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant"}
# in any spelling but that of the templates
_SPEAKERS = ("user", "assistant", "system", "human", "gpt", "chatgpt", "bot", "chatbot", "ai")
_CONTENTS = ("text", "value", "message", "body")
REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = ("text", "input_text", "output_text")


def conversation(value: Any, where: str, *, role: str = "role", content: str = "content", column: str = "messages") -> list[Message]:
    """The messages of a row. `role` and `content` are the keys that they have; `column` is for errors. Raises WorkerError with the place."""
    if isinstance(value, str):  # a CSV cell holds JSON
        value = from_json(value, where, column, hint='the cell is a JSON list: [{"role": "user", "content": "..."}, ...]')
    if not isinstance(value, list) or not value:
        raise WorkerError("the messages must be a list with at least one message", where=where, hint=_HINT)
    return [_message(message, f"{where}, message {number}", role, content) for number, message in enumerate(value, start=1)]


def text(value: Any, where: str, key: str) -> str:
    """The text of a column. Raises WorkerError with the place."""
    if not isinstance(value, str):
        raise WorkerError(
            f'"{key}" must be text, here it is {type(value).__name__}', where=f"{where}, key {key}", hint=f'write "{key}": "..."'
        )
    check_characters(value, f"{where}, key {key}")
    return value


def from_json(value: str, where: str, key: str, hint: str) -> Any:
    """What the JSON text in a column says. Raises WorkerError."""
    try:
        return json.loads(value)
    except ValueError as error:
        raise WorkerError(f'"{key}" is not JSON: {error}', where=where, hint=hint) from error


def without_nulls(value: Any) -> Any:
    """The same without the keys that a table has filled with null, however deep: a model would learn to write them."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def check_characters(value: Any, where: str) -> None:
    """Raises WorkerError for text, however deep, that no tokenizer takes."""
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list | tuple):
        for inner in value:
            check_characters(inner, where)
    elif isinstance(value, str) and (half := half_character(value)) is not None:
        hint = f'write the whole character: an emoji is two such halves ("\\ud83d\\ude00"), or write the emoji itself; or remove {half}'
        raise WorkerError(f"this text has half of a character, {half}, which UTF-8 cannot store", where=where, hint=hint)


def _message(message: Any, where: str, role: str, content: str) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get(role), str):
        hint = _HINT if role == "role" else f'write {{"{role}": "...", "{content}": "..."}}'
        raise WorkerError(f'a message is an object with "{role}" and "{content}"', where=where, hint=hint)
    for key, value in message.items():  # a template may use any of them
        check_characters(value, f"{where}, key {key}")
    said = message[role]
    # An empty field of a table (Parquet) is no field: many templates write "None" for it.
    plain = {key: value for key, value in message.items() if key not in (role, content) and value is not None}
    name = _SHARED_ROLES.get(said.lower()) if role != "role" else _ROLES.get(said, said)
    if role == "role" and said not in ("user", "assistant", "system") and said not in _ROLES and said.lower() in _SPEAKERS:
        meant = _SHARED_ROLES[said.lower()]
        raise WorkerError(f'no chat template knows the role "{said}"', where=where, hint=f'write "role": "{meant}" instead, in every row')
    if name is None:
        known = ", ".join(sorted(set(_SHARED_ROLES)))
        raise WorkerError(f'the speaker "{said}" is not known', where=where, hint=f'write one of {known} for "{role}"')
    spoken: Any = message.get(content)
    if role != "role" and said.lower() in _CALLS and isinstance(spoken, str) and (calls := _called(spoken)):
        plain["tool_calls"], spoken = calls, None
    call = plain.pop("function_call", None)
    if call is not None and "tool_calls" not in plain:
        plain["tool_calls"] = [call]
    if plain.get("tool_calls"):
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], where)
    else:
        plain.pop("tool_calls", None)  # an empty list says that there is none
    return {"role": name, "content": _content(spoken, name, plain, content, where), **plain}


def _content(value: Any, role: str, plain: Message, key: str, where: str) -> str | None:
    """The text of a message; None beside tool calls, where there is none."""
    if isinstance(value, list) and value:
        return "\n".join(_part(part, number, key, where) for number, part in enumerate(value, start=1))
    if value is None and role == "assistant" and (plain.get("tool_calls") or any(plain.get(name) for name in REASONING)):
        return None
    if not isinstance(value, str):
        other = next((name for name in _CONTENTS if value is None and isinstance(plain.get(name), str)), None)
        hint = f'the text is under "{other}": [data] columns = {{ content = "{other}" }} in the recipe' if other else _HINT
        raise WorkerError(f'"{key}" must be text, here it is {type(value).__name__}', where=where, hint=hint)
    return value


def _part(part: Any, number: int, key: str, where: str) -> str:
    """The text of one part of a content that is a list."""
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and kind in _TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    hint = 'homelab trains on text: leave this part out, or write {"type": "text", "text": "..."}'
    raise WorkerError(f'part {number} of "{key}" is not text, it is {kind!r}', where=where, hint=hint)


def _tool_calls(calls: Any, where: str) -> list[Message]:
    """Tool calls with their arguments as an object."""
    if isinstance(calls, str):
        calls = from_json(calls, where, "tool_calls", hint='write [{"type": "function", "function": {"name": "...", "arguments": {}}}]')
    if isinstance(calls, dict):
        calls = [calls]
    checked = []
    for number, call in enumerate(calls if isinstance(calls, list) else [calls], start=1):
        inner = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
            hint = 'write {"type": "function", "function": {"name": "...", "arguments": {}}}'
            raise WorkerError(f"tool call {number} has no function with a name", where=where, hint=hint)
        inner = {**inner, "arguments": _arguments(inner.get("arguments"), f"{where}, tool call {number}")}
        checked.append({**call, "function": inner} if "function" in call else inner)
    return checked


def _arguments(value: Any, where: str) -> Any:
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    if not isinstance(value, str):
        return value
    hint = 'write "arguments" as an object, or as its JSON text: "{\\"city\\": \\"Rome\\"}"'
    return from_json(value, where, "arguments", hint)


def _called(said: str) -> list[Message]:
    """The tool calls that a ShareGPT message of the kind function_call says as JSON; none where it says them in another way."""
    try:
        calls = json.loads(said)
    except ValueError:
        return []
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return []
    return [{"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments")}} for call in calls]
