"""Every field of a message is filled by who sends it and read by who gets it: else it costs bytes, and nobody sees when it is wrong."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from homelab.shared.protocol.message import Message, defaults
from homelab.shared.protocol.network_messages import Listening
from homelab.shared.protocol.request import Request
from homelab.shared.protocol.run_messages import Exit, RunAtWork, RunRecovered
from homelab.shared.protocol.verb_table import VERBS

HOMELAB = Path(__file__).resolve().parents[3] / "homelab"
OF_THE_NODE = {"step_still_s"}  # the node itself decides by it (`homelab.node.run.peer_probe`)
# Who fills the messages of a node: its program, the worker's programs, and the one that tries the ways of a supervisor there.
SENDERS = ("node", "worker", "controller/remote")


class Sample(Message):
    only_of_this_test: Exit | None = None


class SampleRequest(Request):
    only_of_this_test: int = 0


def kinds_in(kind: Any) -> Iterator[type[Message]]:
    """The messages in a type."""
    if isinstance(kind, type) and issubclass(kind, Message):
        yield kind
        for hint in get_type_hints(kind, include_extras=True).values():
            yield from kinds_in(hint)
    for part in get_args(kind):
        yield from kinds_in(part)


def answers() -> set[type[Message]]:
    shapes = [*(verb.answer_type() for verb in VERBS.values()), Listening, RunAtWork, RunRecovered, Sample]
    return {kind for shape in shapes for kind in kinds_in(shape)}


def requests() -> set[type[Message]]:
    return {kind for kind in (*(verb.request_type() for verb in VERBS.values()), SampleRequest) if kind is not None}


def fields_of(kinds: set[type[Message]]) -> set[tuple[type[Message], str]]:
    return {(kind, name) for kind in kinds for name in defaults(kind)}


def shown(found: set[tuple[type[Message], str]]) -> set[str]:
    return {f"{kind.__name__}.{name}" for kind, name in found}


@functools.cache
def names_read(*rooms: str) -> frozenset[str]:
    """Every attribute and every key that these rooms read."""
    files = [file for room in rooms for file in (HOMELAB / room).rglob("*.py")]
    return frozenset(name for file in files for name in re.findall(r'[."](\w+)', file.read_text()))


@functools.cache
def names_set(*rooms: str) -> dict[str, frozenset[str]]:
    """Name of what is called -> the names that it is called with; "" -> those of all calls of `replace`, and keys of dicts. "*": of any of them."""
    found: dict[str, set[str]] = {"": set(), "*": set()}
    for file in (file for room in rooms for file in (HOMELAB / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "?")
                names = {keyword.arg or "**" for keyword in node.keywords}
                found.setdefault("" if called == "replace" else called, set()).update(names)
                found["*"] |= names
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found["*"].add(node.value)
    return {called: frozenset(names) for called, names in found.items()}


def is_filled(kind: type[Message], name: str, *rooms: str) -> bool:
    """Where the message is made by its name, there or by `replace`; one that no call makes (a file of a worker), by any name of these rooms."""
    told = names_set(*rooms)
    own = told.get(kind.__name__)
    return name in (told["*"] if own is None or "**" in own else own | told[""])


def test_every_field_of_an_answer_is_read() -> None:
    known = names_read("controller", "cli", "shared/protocol") | OF_THE_NODE
    assert shown({field for field in fields_of(answers()) if field[1] not in known}) == {"Sample.only_of_this_test"}


def test_every_field_of_an_answer_is_filled() -> None:
    lacking = shown({field for field in fields_of(answers()) if not is_filled(*field, *SENDERS)})
    assert lacking == {"Sample.only_of_this_test"}, "a field that the node never fills has its default for ever"


def test_every_field_of_a_request_is_read_by_the_node() -> None:
    known = names_read("node", "shared/protocol")
    assert shown({field for field in fields_of(requests()) if field[1] not in known}) == {"SampleRequest.only_of_this_test"}


def test_every_field_of_a_request_is_filled_by_the_controller() -> None:
    own = {(kind, name) for kind, name in fields_of(requests()) if name not in defaults(Request)}
    lacking = shown({field for field in own if not is_filled(*field, "controller", "cli")})
    assert lacking == {"SampleRequest.only_of_this_test"}
