"""Reads what the controller asks into the requests of `homelab.shared.protocol`: types and limits, by the standard library alone."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin

from homelab.shared.protocol.message import REQUIRED, Message, defaults

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject

M = TypeVar("M", bound=Message)


def read(kind: type[M], said: JsonObject) -> M:
    """The request in a JSON object. Raises ValueError for anything else.

    An unknown field is refused, too: the controller ships this program, so that both have the same fields.
    """
    declared = defaults(kind)
    if unknown := sorted(set(said) - set(declared)):
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}")
    if lacking := [name for name, default in declared.items() if default is REQUIRED and name not in said]:
        raise ValueError(f"{kind.__name__} lacks {', '.join(lacking)}")
    return kind(**{name: _value(_type_of(kind, name), value, f"{kind.__name__}.{name}") for name, value in said.items()})


def _type_of(kind: type[Message], field: str) -> Any:
    """The type of a field. `typing.get_type_hints` reads those of all fields, which takes half a millisecond."""
    for base in kind.__mro__:
        text = base.__dict__.get("__annotations__", {}).get(field)  # noqa: RUF063 (of this class alone, on Python 3.9 too)
        if text is not None:
            known = vars(sys.modules[base.__module__])
            return known[text] if text in known else eval(text, known)
    raise TypeError(f"{kind.__name__}.{field} has no type")


def _value(hint: Any, value: Any, where: str) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        read_value = _value(parts[0], value, where)
        for mark in parts[1:]:
            try:
                mark.check(read_value)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        return read_value
    if origin is Union:  # Optional: this runs on Python 3.9
        return None if value is None else _value(parts[0], value, where)
    if origin is tuple and isinstance(value, (list, tuple)):
        return tuple(_value(parts[0], entry, where) for entry in value)
    if origin is dict and isinstance(value, dict):
        return {_value(parts[0], key, where): _value(parts[1], entry, where) for key, entry in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if hint is Any or type(value) is hint:
        return value
    raise ValueError(f"{where}: {str(value)[:100]!r} is no {getattr(hint, '__name__', hint)}")
