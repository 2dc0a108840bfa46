"""The bases of the types that rooms share: every value is frozen.

Validators are built when a model is used first (`defer_build`): a command uses few of the models that it imports, and building all of
them is a quarter of its start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, PlainSerializer, PlainValidator, field_validator

from homelab.controller.base.hint import Command, Hint, cleaned
from homelab.controller.base.sanitize import plain_text

# Plain text in JSON, and readable from it: the names of the commands in a stored sentence are known, and a stored command's own name.
HintField = Annotated[Hint, PlainValidator(Hint.said), PlainSerializer(str)]
CommandField = Annotated[Command, PlainValidator(Command.said), PlainSerializer(str)]


class WireModel(BaseModel):
    """What comes from a node or a file. Unknown keys are ignored: a node with another agent version must still be readable."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class ConfigModel(BaseModel):
    """What a person writes. Unknown keys are faults: a misspelt key that is ignored costs its owner an evening."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        schema = handler(source)
        _as_toml_has_it(schema, handler.resolve_ref_schema)
        return schema


def _as_toml_has_it(schema: Any, resolve: Callable[[Any], Any]) -> None:
    """A section (a dataclass) may be a table and a tuple a list, which strict validation forbids; everything inside stays strict."""
    if isinstance(schema, list | tuple):
        for part in schema:
            _as_toml_has_it(part, resolve)
    elif isinstance(schema, dict):
        kind = schema.get("type")
        if kind in ("dataclass", "tuple"):
            schema["strict"] = False
        parts = {"": resolve(schema)} if kind == "definition-ref" else schema
        for name, part in parts.items():
            if name not in ("metadata", "config", "serialization"):
                _as_toml_has_it(part, resolve)


class Value(BaseModel):
    """What this program decides: never changed afterwards."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)


class DisplayValue(Value):
    """What goes to a terminal. Its words come from nodes and from files; control characters are removed."""

    @field_validator("*", mode="before")
    @classmethod
    def _harmless(cls, value: object) -> object:
        if isinstance(value, tuple | list):
            return tuple(cleaned(entry, plain_text) if isinstance(entry, str) else entry for entry in value)
        return cleaned(value, plain_text) if isinstance(value, str) else value
