"""What a chat template reads of a row, and in which shape: found by rendering a few messages of our own, once for each template.

Templates differ in all of it: arguments of a tool call as an object or as JSON text, a content that is missing or null beside tool calls,
content as text or as a list of parts, functions bare or inside {"type": "function", "function": ...}. A shape that a template does not know is
left out or written as Python's repr, without an error. What a row gives is passed on as it stands wherever the template shows it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from homelab.worker.data.chat_messages import Message

Render = Callable[[Sequence[Message], Mapping[str, Any]], str]
_ASKED, _SAID, _NAME, _VALUE = "probeasked", "probesaid", "probename", "probevalue"
_RESULT = "probedresult"
_FUNCTION = {
    "name": _NAME,
    "description": "probes",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "c"}}, "required": ["city"]},
}
_USER, _ASSISTANT = {"role": "user", "content": _ASKED}, {"role": "assistant", "content": _SAID}
_OTHERWISE = {"developer": "system", "function": "tool", "ipython": "tool"}  # one role under a newer and an older name
ABSENT = object()


@dataclass(frozen=True)
class CallShape:
    """How a tool call has to be given: `content` beside it where it says nothing (ABSENT, None or ""), and arguments as JSON text or as an object."""

    content: Any
    as_json: bool


@dataclass(frozen=True)
class Traits:
    """What one template reads. `names` are all names and keys in it, `variables` those that it takes from outside.

    `calls` has the shape for tool calls inside {"function": ...} (True) and for bare ones (False), as far as they are shown; `tools` says
    the same of functions. `takes_parts`: content is a list of parts. `ends_marked`: an answer ends with a mark, and not with white space alone.
    `roles`: those of the rows that it leaves out, with the one that it shows in their place.
    """

    names: frozenset[str]
    variables: frozenset[str]
    takes_parts: bool
    calls: Mapping[bool, CallShape]
    tools: frozenset[bool]
    ends_marked: bool
    roles: Mapping[str, str]

    def fit(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the shape that the template reads."""
        return [self._fit(message) for message in messages]

    def fit_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options in the shape that the template reads."""
        if not options.get("tools"):
            return dict(options)
        return {**options, "tools": [_shaped(tool, self.tools) for tool in options["tools"]]}

    def _fit(self, message: Message) -> Message:
        fitted = {**message, "role": self.roles.get(message["role"], message["role"])}
        if message.get("tool_calls"):
            inside = "function" in message["tool_calls"][0]
            shape = self.calls.get(inside) or self.calls.get(not inside) or CallShape("", False)
            fitted["tool_calls"] = [_call(_shaped(call, frozenset(self.calls)), as_json=shape.as_json) for call in message["tool_calls"]]
            if message["content"] is None:
                fitted["content"] = shape.content
        elif message["content"] is None:
            fitted["content"] = ""
        if fitted["content"] is ABSENT:
            del fitted["content"]
        elif self.takes_parts and isinstance(fitted["content"], str):
            fitted["content"] = [{"type": "text", "text": fitted["content"]}]
        return fitted


def probed(source: str, render: Render) -> Traits:
    """The traits of the template `source`; `render` gives its text, and may raise anything."""
    tried = _Tries(render)
    names, variables = _names(source)
    takes_parts = not tried.shows([_USER, _ASSISTANT], {}, _ASKED, _SAID) and tried.shows(
        [_in_parts(_USER), _in_parts(_ASSISTANT)], {}, _ASKED, _SAID
    )
    as_given = _in_parts if takes_parts else dict
    tools = frozenset(
        inside
        for inside in (True, False)
        if tried.shows([as_given(_USER), as_given(_ASSISTANT)], {"tools": [_inside(_FUNCTION, inside)]}, _NAME)
    )
    calls = {inside: shape for inside in (True, False) if (shape := _call_shape(tried, as_given, inside)) is not None}
    tail = (tried([as_given(_USER), as_given(_ASSISTANT)], {}) or "").rpartition(_SAID)[2]
    roles = {
        role: other
        for role, other in _OTHERWISE.items()
        if not tried.shows_role(role, calls, as_given) and tried.shows_role(other, calls, as_given)
    }
    return Traits(names, variables, takes_parts, calls, tools, bool(tail.strip()), roles)


class _Tries:
    """Renders, and gives None where the template raises."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def __call__(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str | None:
        try:
            return self._render(messages, options)
        except Exception:  # noqa: BLE001 - templates raise what they like
            return None

    def shows(self, messages: Sequence[Message], options: Mapping[str, Any], *words: str) -> bool:
        """Whether all words are in the text, and nothing in it is Python's repr of a value."""
        text = self(messages, options)
        return text is not None and all(word in text for word in words) and "{'" not in text

    def shows_role(self, role: str, calls: Mapping[bool, CallShape], as_given: Callable[[Message], Message]) -> bool:
        """Whether a message of this role is in the text: before a question, or as the result of a call."""
        if role in ("developer", "system"):
            return self.shows([as_given({"role": role, "content": _RESULT}), as_given(_USER), as_given(_ASSISTANT)], {}, _RESULT)
        called = [_call_of(shape, inside) for inside, shape in list(calls.items())[:1]] or [as_given(_ASSISTANT)]
        return self.shows([as_given(_USER), *called, as_given(_answer(role)), as_given(_ASSISTANT)], {}, _RESULT)


def _call_of(shape: CallShape, inside: bool) -> Message:
    """A message that calls a function, in this shape."""
    call = _call(_inside({"name": _NAME, "arguments": {"city": _VALUE}}, inside), as_json=shape.as_json)
    asking: Message = {"role": "assistant", "content": shape.content, "tool_calls": [{"id": "callprobe", **call}]}
    if shape.content is ABSENT:
        del asking["content"]
    return asking


def _answer(role: str) -> Message:
    return {"role": role, "name": _NAME, "tool_call_id": "callprobe", "content": _RESULT}


def _call_shape(tried: _Tries, as_given: Callable[[Message], Message], inside: bool) -> CallShape | None:
    """The first shape of a tool call that the template shows, in the order in which transformers documents them."""
    for content in (ABSENT, None, ""):
        for as_json in (False, True):
            shape = CallShape(content, as_json)
            text = tried([as_given(_USER), _call_of(shape, inside), as_given(_answer("tool")), as_given(_ASSISTANT)], {})
            # Not the repr of a value, and not JSON text inside of JSON text.
            if text and _NAME in text and _VALUE in text and not any(wrong in text for wrong in ("{'", '\\"city', "None")):
                return shape
    return None


def _shaped(function: Message, shown: frozenset[bool]) -> Message:
    """A function or a call as it was given where the template shows that, else in the other shape."""
    inside = "function" in function
    if inside in shown or not shown:
        return function
    if inside:
        return {**{key: value for key, value in function.items() if key not in ("function", "type")}, **function["function"]}
    kept = {key: value for key, value in function.items() if key == "id"}
    return {**kept, "type": "function", "function": {key: value for key, value in function.items() if key not in ("id", "type")}}


def _inside(function: Message, inside: bool) -> Message:
    return {"type": "function", "function": function} if inside else function


def _call(call: Message, *, as_json: bool) -> Message:
    if not as_json:
        return call
    inner = call.get("function", call)
    inner = {**inner, "arguments": json.dumps(inner["arguments"], ensure_ascii=False)}
    return {**call, "function": inner} if "function" in call else inner


def _in_parts(message: Message) -> Message:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _names(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """(every name and key that stands in the template, the names that it takes from outside)."""
    from jinja2 import meta, nodes
    from transformers.utils.chat_template_utils import _compile_jinja_template

    environment = _compile_jinja_template(source).environment
    tree = environment.parse(source)
    words = {node.name for node in tree.find_all(nodes.Name)} | {node.attr for node in tree.find_all(nodes.Getattr)}
    words |= {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(words), frozenset(meta.find_undeclared_variables(tree)) - frozenset(environment.globals)
