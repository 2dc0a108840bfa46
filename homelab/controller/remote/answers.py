"""What each verb of the agent is asked, and what it may answer. A node that says anything else is not believed: its words become paths and commands here. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from homelab.controller.facts.node import Facts
from homelab.controller.facts.reading import read
from homelab.shared.protocol.message import REQUIRED, Message, as_json, defaults
from homelab.shared.protocol.request import Request
from homelab.shared.protocol.run_messages import Runs
from homelab.shared.protocol.verb_table import VERBS


def said(verb: str, request: Request | Mapping[str, Any] | None) -> dict[str, Any]:
    """The fields of a request as they are sent: without those that have their defaults. Raises TypeError for that of another verb."""
    if not isinstance(request, Request):
        return dict(request or {})
    kind = VERBS[verb].request_type()
    if kind is not type(request):
        raise TypeError(f"{verb} is asked with {kind and kind.__name__}, not with {type(request).__name__}")
    return {name: value for name, value in as_json(request).items() if value != as_json(defaults(kind)[name])}


def shape(verb: str) -> type[Facts] | type[Message] | None:
    """What the answer to a verb must be; None where nobody relies on it, or it is bytes."""
    if verb == "facts":
        return Facts
    return VERBS[verb].answer_type() if verb in VERBS else None


def without_damage(verb: str, answer: Any) -> Any:
    """The answer without what damaged files on the node gave to it, where it is used as it is; `poll` is read through its models."""
    try:
        return as_json(read(Runs, answer)) if verb == "runs" else answer
    except ValidationError:
        return answer


def with_defaults(verb: str, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer with all keys of its shape: who reads one finds it, whatever the node has left out."""
    kind = shape(verb)
    if kind is None:
        return answer
    if issubclass(kind, Message):
        left_out = {name: value for name, value in defaults(kind).items() if value is not REQUIRED}
    else:
        left_out = {
            name: field.get_default(call_default_factory=True) for name, field in kind.model_fields.items() if not field.is_required()
        }
    return {name: value.model_dump() if isinstance(value, BaseModel) else as_json(value) for name, value in left_out.items()} | answer


def fault(verb: str, answer: Any) -> str | None:
    """None for an answer that can be used, else what is wrong with it."""
    if not isinstance(answer, dict):
        return "it is not a JSON object"
    kind = shape(verb)
    try:
        if kind is not None and issubclass(kind, Message):
            read(kind, answer)
        elif kind is not None:
            kind.model_validate(answer)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where, message = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
        return f"{where}{': ' if where else ''}{message[0].lower()}{message[1:]}"
    return None
