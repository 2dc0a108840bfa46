"""The faults of a TOML file as one error: a sentence for each, with its line and key. Pure."""

from __future__ import annotations

import dataclasses
import shlex
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from homelab.controller.base.errors import InputError, did_you_mean
from homelab.controller.config.lines import key_lines, line_of
from homelab.shared.markers import NotOneOf

Fault = tuple[tuple[str | int, ...], str]


_MOST_SHOWN = 200


def faults_of(error: ValidationError, model: type[BaseModel]) -> list[Fault]:
    """One fault per place: pydantic reports every branch of a union it tried, and the first one says what is meant."""
    faults: dict[tuple[str | int, ...], str] = {}
    for item in error.errors():
        location = _clean(item["loc"])
        if not location:
            faults[("", len(faults))] = _message(item, model)
        faults.setdefault(location, _message(item, model))
    return [(() if key[:1] == ("",) else key, message) for key, message in faults.items() if key]


def _clean(location: Iterable[str | int]) -> tuple[str | int, ...]:
    # pydantic appends the union branch it tried ("literal['auto']", "dict[str,int]"); no key of ours looks like that.
    return tuple(part for part in location if isinstance(part, int) or not any(c in part for c in "[]'"))


# What pydantic calls by Python's names, as it is written in the file.
_WRITTEN = {
    "int_type": "a whole number", "float_type": "a number", "string_type": 'a text in quotes: "..."', "bool_type": "true or false",
    "tuple_type": "a list: [ ... ]", "list_type": "a list: [ ... ]", "dict_type": "a section of keys: { key = value }",
    "model_type": "a section of keys: { key = value }", "model_attributes_type": "a section of keys: { key = value }",
    "dataclass_type": "a section of keys: { key = value }",
}  # fmt: skip


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _message(item: Any, model: type[BaseModel]) -> str:
    kind, value, context = item["type"], item.get("input"), item.get("ctx", {})
    location = _clean(item["loc"])
    key = location[-1] if location else ""
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f'unknown key "{key}".{did_you_mean(str(key), _fields_at(model, location[:-1]))}'
    if kind == "variable":
        return str(item["msg"])
    if kind == "missing":
        return f'"{key}" is missing'
    if kind == "value_error" and isinstance(context.get("error"), NotOneOf):
        kind, context = "literal_error", {"expected": str(context["error"])}
    if kind == "value_error":
        reason = str(context.get("error", item["msg"]))
        return f"got {_shown(value)}; allowed: {reason}" if location and not isinstance(value, dict) else reason
    if kind == "literal_error":
        nearest = did_you_mean(str(value), str(context.get("expected", "")).replace("'", "").replace(" or ", ", ").split(", "))
        return f"got {_shown(value)}; allowed: {context.get('expected')}.{nearest}"
    if kind in _WRITTEN:
        return f"got {_shown(value)}; allowed: {_WRITTEN[kind]}"
    return f"got {_shown(value)}; {item['msg'][0].lower()}{item['msg'][1:]}"


def _fields_at(model: type, location: tuple[str | int, ...]) -> list[str]:
    """The keys a section may have, for "did you mean"."""
    for part in location:
        inner = next((kind for kind in _kinds_in(_types(model).get(str(part))) if _types(kind)), None)
        model = inner or model
    return list(_types(model))


def _types(kind: Any) -> dict[str, Any]:
    """Key -> type of a section; empty for what is none."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    return typing.get_type_hints(kind) if isinstance(kind, type) and dataclasses.is_dataclass(kind) else {}


def _kinds_in(annotation: Any) -> Iterator[Any]:
    """A type and all that it is made of."""
    yield annotation
    for part in typing.get_args(annotation):
        yield from _kinds_in(part)


def raise_faults(path: Path, text: str, faults: list[Fault]) -> None:
    """InputError with all faults and their lines, where there are any."""
    if not faults:
        return
    lines = key_lines(text)
    numbered: list[tuple[int, str]] = []
    for location, message in faults:
        number = line_of(lines, location)
        name = ".".join(str(part) if isinstance(part, str) else f"#{part + 1}" for part in location)
        entry = (number or 0, f"{f'line {number}, ' if number else ''}{f'{name}: ' if name else ''}{message}")
        if entry not in numbered:
            numbered.append(entry)
    numbered.sort()
    raise InputError(
        f"{len(numbered)} fault{'s' if len(numbered) > 1 else ''}:\n" + "\n".join(f"  {message}" for _, message in numbered),
        where=str(path),
        hint=f"edit {shlex.quote(str(path))}, then run the command again",
    )
