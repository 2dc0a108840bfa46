"""The limits of a value, as marks in the type of a field: `Annotated[int, AtLeast(1)]`. Pure.

A node and a worker carry these marks and pay nothing for them. The controller validates with pydantic, which asks each mark for its part of the schema.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Callable


class NotOneOf(ValueError):
    """A word that is none of the allowed ones."""

    def __init__(self, allowed: Sequence[str]) -> None:
        *others, last = (repr(one) for one in allowed)
        super().__init__(f"{', '.join(others)} or {last}")


class Mark:
    """One limit. Two marks of one kind and one value are equal."""

    constraint = ""
    """The limit's name in pydantic's schema."""
    kinds: tuple[str, ...] = ("int", "float")
    """The types that it limits, by their names in pydantic's schema."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def check(self, value: Any) -> None:
        """What a node does in place of pydantic. Raises ValueError where the value is beyond this limit."""
        if not self.admits(value):
            raise ValueError(f"{str(value)[:100]!r} is beyond {self}")

    def admits(self, value: Any) -> bool:
        """Whether the value is within this limit. Raises TypeError for a limit that only the controller knows."""
        raise TypeError(f"{self} is no limit of a request")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash((type(self), repr(self.value)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.value!r})"

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return self._into(handler(source))

    def _into(self, schema: Any) -> Any:
        """The schema with this limit in every branch that it can limit: `Optional`, a union, a function around a type."""
        if schema.get("type") in self.kinds:
            return {**schema, self.constraint: self.value}
        if schema.get("type") == "union":
            return {**schema, "choices": [self._into(choice) for choice in schema["choices"]]}
        return {**schema, "schema": self._into(schema["schema"])} if "schema" in schema else schema


class AtLeast(Mark):
    """A number, this or more."""

    constraint = "ge"

    def admits(self, value: Any) -> bool:
        return bool(value >= self.value)


class Above(Mark):
    """A number, more than this."""

    constraint = "gt"

    def admits(self, value: Any) -> bool:
        return bool(value > self.value)


class AtMost(Mark):
    """A number, this or less."""

    constraint = "le"

    def admits(self, value: Any) -> bool:
        return bool(value <= self.value)


class Below(Mark):
    """A number, less than this."""

    constraint = "lt"

    def admits(self, value: Any) -> bool:
        return bool(value < self.value)


class Longest(Mark):
    """A text, list or object of at most so many characters or entries."""

    constraint = "max_length"
    kinds = ("str", "list", "tuple", "dict")

    def admits(self, value: Any) -> bool:
        return bool(len(value) <= self.value)


class Shortest(Mark):
    """A text, list or object of at least so many characters or entries."""

    constraint = "min_length"
    kinds = ("str", "list", "tuple", "dict")

    def admits(self, value: Any) -> bool:
        return bool(len(value) >= self.value)


class Matches(Mark):
    """A text that this regular expression matches."""

    constraint = "pattern"
    kinds = ("str",)


class Holds(Mark):
    """What needs more than a comparison: a function that gives the value back, or raises ValueError with what is allowed."""

    def check(self, value: Any) -> None:
        self.value(value)

    def _into(self, schema: Any) -> Any:
        return {"type": "function-after", "function": {"type": "no-info", "function": self.value}, "schema": schema}


class OneOf(Mark):
    """One of these words. Unlike a `Literal` the list may grow while the program runs."""

    def _into(self, schema: Any) -> Any:
        metadata = {"pydantic_js_updates": {"enum": list(self.value)}}
        return {
            "type": "function-after",
            "function": {"type": "no-info", "function": self._is_known},
            "schema": schema,
            "metadata": metadata,
        }

    def _is_known(self, word: str) -> str:
        if word not in self.value:
            raise NotOneOf(self.value)
        return word
