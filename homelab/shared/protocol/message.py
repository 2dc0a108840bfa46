"""The base of every message between node and controller: a frozen value with declared fields, like a dataclass.

It is none of `dataclasses`: making one of those costs a millisecond, and a node answers a question in 30. A class costs microseconds here.
The types of the fields, with their limits (`homelab.shared.protocol.marks`), are read by the controller alone: the node builds, the controller
validates (`homelab.controller.facts.reading`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from typing import TypeVar, dataclass_transform

    Self = TypeVar("Self", bound="Message")
else:

    def dataclass_transform(**_: object) -> Any:
        """Says to mypy alone what a subclass is."""
        return lambda cls: cls


REQUIRED = object()
"""The default of a field that has none."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Message:
    """Fields are annotations; a default is the value beside one. Names that begin with an underscore are no fields."""

    MARKS: ClassVar[tuple[Any, ...]] = ()
    """Marks (`homelab.shared.protocol.marks`) of the message as a whole."""
    _defaults: ClassVar[dict[str, Any]] = {}

    def __init_subclass__(cls) -> None:
        defaults = dict(cls._defaults)
        for name in cls.__dict__.get("__annotations__", {}):  # noqa: RUF063 (of this class alone, on Python 3.9 too)
            if not name.startswith("_") and (name in cls.__dict__ or name not in defaults):
                defaults[name] = cls.__dict__.get(name, REQUIRED)
        cls._defaults = defaults

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            found = {name: values.pop(name) if name in values else _own(default) for name, default in self._defaults.items()}
            lacking = [name for name, value in found.items() if value is REQUIRED]
            if values or lacking:
                raise TypeError(
                    f"{type(self).__name__}: {', '.join(values)} is no field" if values else f"{type(self).__name__} needs {lacking}"
                )
            self.__dict__.update(found)

        def __setattr__(self, name: str, *value: Any) -> None:
            raise AttributeError(f"{type(self).__name__} is frozen: {name}")

        __delattr__ = __setattr__

        def __eq__(self, other: object) -> bool:
            return type(self) is type(other) and self.__dict__ == other.__dict__

        def __hash__(self) -> int:
            return hash((type(self), *self.__dict__.values()))

        def __repr__(self) -> str:
            return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"

    def check(self) -> None:
        """Raises ValueError where fields do not go together. The reader of a message calls it."""

    def replace(self: Self, **changes: Any) -> Self:
        """The same with other values in some fields."""
        return type(self)(**{**self.__dict__, **changes})


class Done(Message):
    """The answer of a verb that has nothing to tell but that it is done."""


def _own(default: Any) -> Any:
    return default.copy() if isinstance(default, dict) else default


def defaults(kind: type[Message]) -> dict[str, Any]:
    """Field -> its default, `REQUIRED` where there is none."""
    return kind._defaults


def as_written(value: Any) -> Any:
    """A file of another program, as a field of a message: whoever reads the message validates it."""
    return value


def fields(value: Any) -> dict[str, Any]:
    """The fields of a message, for `json.dumps(answer, default=fields)`. Raises TypeError for what is no message."""
    if not isinstance(value, Message):
        raise TypeError(f"{type(value).__name__} is not a message")
    return value.__dict__


def as_json(value: Any) -> Any:
    """A message, or what holds some, as JSON objects."""
    if isinstance(value, Message):
        return {name: as_json(entry) for name, entry in value.__dict__.items()}
    if isinstance(value, dict):
        return {str(key): as_json(entry) for key, entry in value.items()}
    return [as_json(entry) for entry in value] if isinstance(value, (list, tuple)) else value
