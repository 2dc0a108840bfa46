"""Reads what a node says into the messages of `homelab.shared.protocol`: the one place where the limits beside their fields are enforced. Pure.

Unknown fields are ignored: a node with another agent version must still be readable. A text that a program on a node wrote is made harmless
where its type says so: escape sequences and control characters are taken out, and of a progress bar that redrew itself with carriage
returns only the last picture is kept.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, GetCoreSchemaHandler, TypeAdapter, ValidationError, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema, SchemaValidator, core_schema

from homelab.controller.base.sanitize import plain, plain_lines
from homelab.controller.facts import base
from homelab.shared.markers import Mark
from homelab.shared.protocol import marks
from homelab.shared.protocol.message import REQUIRED, Message, as_json, defaults

M = TypeVar("M", bound=Message)
_PLAIN_TYPES: dict[Any, Callable[[], CoreSchema]] = {
    Any: core_schema.any_schema,
    str: core_schema.str_schema,
    int: core_schema.int_schema,
    float: core_schema.float_schema,
    bool: core_schema.bool_schema,
}


def read(kind: type[M], value: Any) -> M:
    """The message in a decoded JSON object. Raises pydantic.ValidationError (a ValueError) for anything else."""
    message: M = _validator(kind).validate_python(value)
    return message


def is_readable(kind: type[Message], value: Any) -> bool:
    """Whether this is such a message."""
    return _validator(kind).isinstance_python(value)


class AsMessage:
    """Beside a message in the type of a pydantic model's field: it is read by this module. `Annotated[Exit, AsMessage]`."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        written = core_schema.plain_serializer_function_ser_schema(as_json)
        return {**_schema(source), "serialization": written}


_validators: dict[Any, SchemaValidator] = {}


def _validator(kind: type[Message]) -> SchemaValidator:
    """It is built when a message is read first: a command reads few kinds of them."""
    if kind not in _validators:
        _validators[kind] = SchemaValidator(_schema(kind))
    return _validators[kind]


def _schema(hint: Any) -> CoreSchema:
    if hint in _PLAIN_TYPES:
        return _PLAIN_TYPES[hint]()
    if isinstance(hint, type) and issubclass(hint, Message):
        return _of_message(hint)
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return TypeAdapter(hint).core_schema
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return functools.reduce(_marked, parts[1:], _schema(parts[0]))
    if origin in (Union, types.UnionType):
        (inner,) = (part for part in parts if part is not type(None))
        return core_schema.nullable_schema(_schema(inner))
    if origin is tuple and parts[1:] == (...,):
        return core_schema.tuple_schema([_schema(parts[0])], variadic_item_index=0)
    if origin is tuple:
        return core_schema.tuple_schema([_schema(part) for part in parts])
    if origin is dict:
        return core_schema.dict_schema(_schema(parts[0]), _schema(parts[1]))
    if origin is Literal:
        return core_schema.literal_schema(list(parts))
    raise TypeError(f"a message has no fields of the type {hint}")


def _of_message(kind: type[Message]) -> CoreSchema:
    hints = get_type_hints(kind, include_extras=True)
    fields = [
        core_schema.dataclass_field(name, _with_default(_schema(hints[name]), default), kw_only=True)
        for name, default in defaults(kind).items()
    ]
    arguments = core_schema.dataclass_args_schema(kind.__name__, fields, extra_behavior="ignore")
    schema: CoreSchema = core_schema.dataclass_schema(kind, arguments, list(defaults(kind)), frozen=True)
    if kind.check is not Message.check:
        schema = core_schema.no_info_after_validator_function(_checked, schema)
    for mark in kind.MARKS:
        schema = _marked(schema, mark)
    return schema


def _checked(message: M) -> M:
    message.check()
    return message


def _with_default(schema: CoreSchema, default: Any) -> CoreSchema:
    if default is REQUIRED:
        return schema
    if isinstance(default, dict):  # each message has its own
        return core_schema.with_default_schema(schema, default_factory=default.copy)
    return core_schema.with_default_schema(schema, default=default)


def _marked(schema: CoreSchema, mark: Mark) -> CoreSchema:
    """The schema with one mark more."""
    if isinstance(mark, marks.NamedMark) and mark != marks.FINITE:
        return _RULES[mark](schema)
    word, value, kinds = ("allow_inf_nan", False, ("float",)) if mark == marks.FINITE else (mark.constraint, mark.value, mark.kinds)
    if schema["type"] not in kinds:
        raise TypeError(f"{type(mark).__name__} is no limit of a {schema['type']}")
    return {**schema, word: value}


def _after(clean: Callable[[Any], Any]) -> Callable[[CoreSchema], CoreSchema]:
    return lambda schema: core_schema.no_info_after_validator_function(clean, schema)


def _else(instead: Any) -> Callable[[CoreSchema], CoreSchema]:
    """What cannot be read becomes `instead`."""

    def read_or(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(value)
        except ValidationError:
            return instead

    return lambda schema: core_schema.no_info_wrap_validator_function(read_or, schema)


def _readable(schema: CoreSchema) -> CoreSchema:
    """A list without the entries that cannot be read."""
    (item,) = schema["items_schema"]
    entries = {**schema, "items_schema": [_else(None)(item)]}
    return core_schema.no_info_after_validator_function(lambda read: tuple(entry for entry in read if entry is not None), entries)


def _few_lines(run: Any) -> Any:
    """A run before an object is made of any of it."""
    ranks = run.get("ranks") if isinstance(run, dict) else None
    entries = [rank for rank in ranks.values() if isinstance(rank, dict)] if isinstance(ranks, dict) else []
    lines = sum(len(part) for rank in entries for part in (rank.get("metrics"), rank.get("before")) if isinstance(part, list))
    if len(entries) > marks.MOST_RANKS or lines > marks.MOST_LINES:
        raise ValueError(f"it has {len(entries)} ranks with {lines} lines of metrics")
    return run


_RULES: dict[Mark, Callable[[CoreSchema], CoreSchema]] = {
    marks.FINITE_OR_NONE: _after(lambda value: value if value is not None and math.isfinite(value) else None),
    marks.PLAIN: _after(plain),
    marks.PLAIN_LINES: _after(plain_lines),
    marks.OR_NONE: _else(None),
    marks.OR_EMPTY: _else(""),
    marks.READABLE: _readable,
    marks.FEW_LINES: lambda schema: core_schema.no_info_before_validator_function(_few_lines, schema),
    marks.ADDRESS: _after(base.address),
    marks.PROCESS: _after(lambda pid: pid if pid is None or pid > 0 else None),
}
