"""Marks in the types of a standard-library dataclass are limits for pydantic, in every branch of a type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from pydantic import TypeAdapter, ValidationError

from homelab.shared.markers import Above, AtLeast, AtMost, Below, Holds, Longest, Mark, Matches, Shortest


def _even(number: int) -> int:
    if number % 2:
        raise ValueError("an even number")
    return number


@dataclass(frozen=True)
class Sample:
    count: Annotated[int | None, AtLeast(1), AtMost(5)] = None
    rate: Annotated[float, Above(0), Below(1)] = 0.5
    name: Annotated[str, Shortest(1), Longest(3), Matches("^[a-z]*$")] = "a"
    rows: Annotated[tuple[int, ...], Longest(2)] = ()
    mixed: Annotated[Literal["auto"] | int, AtLeast(1)] = "auto"
    pair: Annotated[int, Holds(_even)] = 2


@pytest.mark.parametrize(("key", "good", "bad", "kind"), [
    ("count", 5, 6, "less_than_equal"), ("count", 1, 0, "greater_than_equal"), ("count", None, 0, "greater_than_equal"),
    ("rate", 0.1, 0, "greater_than"), ("rate", 0.9, 1, "less_than"), ("name", "abc", "abcd", "string_too_long"), ("name", "a", "", "string_too_short"),
    ("name", "b", "B", "string_pattern_mismatch"), ("rows", (1, 2), (1, 2, 3), "too_long"), ("mixed", 1, 0, "greater_than_equal"), ("pair", 4, 3, "value_error"),
])  # fmt: skip
def test_a_mark_is_a_limit(key: str, good: Any, bad: Any, kind: str) -> None:
    adapter = TypeAdapter(Sample)
    assert getattr(adapter.validate_python({key: good}), key) == good
    with pytest.raises(ValidationError) as caught:
        adapter.validate_python({key: bad})
    assert kind in [error["type"] for error in caught.value.errors()]


def test_limits_stand_in_the_json_schema() -> None:
    schema = TypeAdapter(Sample).json_schema()["properties"]
    assert schema["count"]["anyOf"][0] == {"type": "integer", "minimum": 1, "maximum": 5}
    assert (schema["rate"]["exclusiveMinimum"], schema["rate"]["exclusiveMaximum"]) == (0, 1)
    assert (schema["name"]["minLength"], schema["name"]["maxLength"], schema["name"]["pattern"]) == (1, 3, "^[a-z]*$")
    assert schema["rows"]["maxItems"] == 2


def test_marks_of_one_value_are_equal() -> None:
    assert AtLeast(1) == AtLeast(1) and hash(AtLeast(1)) == hash(AtLeast(1))
    assert AtLeast(1) != AtLeast(2) and AtLeast(1) != AtMost(1) and repr(Mark(1)) == "Mark(1)"
