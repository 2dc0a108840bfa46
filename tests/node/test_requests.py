"""A request is validated on the node, by the standard library alone: its fields, their types and their limits."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import Annotated, Any, Optional, get_type_hints

import pytest

from homelab.node import requests
from homelab.shared import markers
from homelab.shared.protocol import marks
from homelab.shared.protocol.message import as_json, defaults
from homelab.shared.protocol.request import Request, RunRequest
from homelab.shared.protocol.verb_table import VERBS
from tests.fakes import ask_node


class Sample(RunRequest):
    count: Annotated[int, markers.AtLeast(1), markers.Below(10)]
    seconds: Annotated[float, markers.Above(0), markers.AtMost(5), marks.FINITE] = 1.0
    words: Annotated[tuple[str, ...], markers.Shortest(1), markers.Longest(2)] = ("a",)
    table: Annotated[dict[str, int], markers.Longest(1)] = {}
    is_so: bool = False
    perhaps: Optional[int] = None  # noqa: UP045 - as the requests have it
    anything: marks.Json = {}


RIGHT: dict[str, Any] = {"run": "r", "count": 1}


def test_it_is_read_as_it_was_written() -> None:
    sample = Sample(
        node="a", run="r", count=9, seconds=5, words=("x", "y"), table={"z": 1}, is_so=True, perhaps=3, anything={"b": [None, {}]}
    )
    assert requests.read(Sample, as_json(sample)) == sample
    assert requests.read(Sample, RIGHT) == Sample(run="r", count=1) and requests.read(Sample, {**RIGHT, "perhaps": None}).perhaps is None
    assert isinstance(requests.read(Sample, {**RIGHT, "seconds": 2}).seconds, float)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"run": "r"}, "Sample lacks count"),
        ({**RIGHT, "cuont": 1}, "Sample has no field cuont"),
        ({**RIGHT, "count": "1"}, "Sample.count: '1' is no int"),
        ({**RIGHT, "count": True}, "Sample.count: 'True' is no int"),
        ({**RIGHT, "count": 0}, r"Sample.count: '0' is beyond AtLeast\(1\)"),
        ({**RIGHT, "count": 10}, r"Sample.count: '10' is beyond Below\(10\)"),
        ({**RIGHT, "seconds": 0}, r"beyond Above\(0\)"),
        ({**RIGHT, "seconds": 5.1}, r"beyond AtMost\(5\)"),
        ({**RIGHT, "seconds": float("nan")}, "Sample.seconds"),
        ({**RIGHT, "words": []}, r"beyond Shortest\(1\)"),
        ({**RIGHT, "words": ["a", "b", "c"]}, r"beyond Longest\(2\)"),
        ({**RIGHT, "words": "ab"}, "Sample.words"),
        ({**RIGHT, "words": [1]}, "Sample.words: '1' is no str"),
        ({**RIGHT, "table": {"a": 1, "b": 2}}, r"beyond Longest\(1\)"),
        ({**RIGHT, "table": {"a": "b"}}, "Sample.table: 'b' is no int"),
        ({**RIGHT, "table": []}, "Sample.table"),
        ({**RIGHT, "is_so": 1}, "Sample.is_so"),
        ({**RIGHT, "run": "../x"}, "Sample.run: not a usable name: '../x'"),
        ({**RIGHT, "run": None}, "Sample.run"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_place(said: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        requests.read(Sample, said)


@pytest.mark.parametrize("verb", [verb for verb, declared in VERBS.items() if declared.request])
def test_every_limit_of_a_request_is_one_that_a_node_knows(verb: str) -> None:
    """Nonsense in every field is a ValueError, and never a TypeError."""
    kind = VERBS[verb].request_type()
    assert kind is not None and issubclass(kind, Request)
    hints = get_type_hints(kind, include_extras=True)
    for name in defaults(kind):
        with pytest.raises(ValueError, match=name):
            requests._value(hints[name], object(), name)
        for value in (-1, 1e400, 1, "x", "\0", [], ["x"], [object()], {}, {"x": "y"}, {"x": {"y": "z"}}, {1: object()}, None):
            with contextlib.suppress(ValueError):
                requests._value(hints[name], value, name)


@pytest.mark.parametrize("kind", {kind for verb in VERBS.values() if (kind := verb.request_type())}, ids=lambda kind: kind.__name__)
def test_the_types_of_a_request_can_be_read_on_python_3_9(kind: type[Request]) -> None:
    assert not [hint for base in kind.__mro__ for hint in inspect.get_annotations(base).values() if "|" in hint]


def test_a_request_that_is_none_reaches_no_verb(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="RunRequest lacks run"):
        ask_node("describe", {"workdir": str(tmp_path)})
