"""What a person reads of a chat across stages: the answer, or the stage that is in its way."""

from __future__ import annotations

import json
import queue
from collections.abc import Mapping
from typing import Any

import pytest

from homelab.controller.base.errors import HomelabError, UnreachableError
from homelab.controller.features.chat import stage_chat
from homelab.shared.protocol.collective_stages import ANSWERING, DONE, LOADING
from tests.builders import plan, rank_plan

pytestmark = pytest.mark.timeout(20)
# The stages are not in the order of the ranks.
LAYERS = {"tower": (1, 4, 10), "laptop": (2, 10, 12), "nas": (0, 0, 4)}
PLAN = plan(
    rank_plan(rank, node, stage={"number": number, "begin": begin, "end": end, "layers": 12, "work": 0.3, "in_flight": 1})
    for rank, (node, (number, begin, end)) in enumerate(LAYERS.items())
)
NODES = list(LAYERS)


def line(rank: int, stage: str = ANSWERING, *, ended: Mapping[str, Any] | None = None, **state: Any) -> tuple[str, bytes]:
    whole = None if ended is None else {"returncode": 1, "left": [], "log": [], "errors": [], **ended}
    return NODES[rank], json.dumps({"phase": "waiting", "ranks": {rank: {"pid": 1, "stage": stage, **state}}, "ended": whole}).encode()


def watched(*lines: tuple[str, bytes | None]) -> stage_chat._Watch:
    waiting: queue.Queue[tuple[str, bytes | None]] = queue.Queue()
    for one in lines:
        waiting.put(one)
    watch = stage_chat._Watch(PLAN)
    watch.until_done(waiting, lambda text: None)
    return watch


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is waited for does not come."""
    monkeypatch.setattr(stage_chat, "_SETTLE_S", 0.2)
    monkeypatch.setattr(stage_chat, "_LAST_WORDS_S", 0.2)


def test_the_answer_is_that_of_the_last_stage_and_the_others_may_end_as_they_like() -> None:
    watch = watched(
        line(0, results=[{"note": "answered on the CPU, slowly"}]), line(2, DONE, ended={}), line(0, error="RuntimeError: Connection closed by peer", ended={}),
        line(1, DONE, results=[{"answer": "red"}], ended={}),
    )  # fmt: skip
    assert (watch.answering_node(), watch.answer(), watch.clean) == ("laptop", "red", set(NODES))
    assert stage_chat.layers(PLAN) == "layers 0 to 3 on nas, 4 to 9 on tower, 10 to 11 on laptop"


def test_the_words_of_a_stage_count_more_than_those_of_ranks_that_lost_it() -> None:
    with pytest.raises(HomelabError) as refused:
        watched(
            line(0, error="RuntimeError: Connection closed by peer", ended={}),
            line(2, LOADING, error="error: the model needs about 9.00 GB\nwhere: /m\nfix: free RAM"),
        )
    assert (refused.value.message, refused.value.where, refused.value.hint) == (
        "the model needs about 9.00 GB",
        "node nas, /m",
        "node nas says: free RAM",
    )


def test_a_rank_that_was_killed_is_named_not_those_that_lost_it() -> None:
    with pytest.raises(HomelabError) as refused:
        watched(
            line(0, error="RuntimeError: Connection closed by peer", ended={}), line(2, DONE, ended={}),
            line(1, ended={"log": ["Signal 9 (SIGKILL) received by PID 7", "more"]}),
        )  # fmt: skip
    assert (refused.value.message, refused.value.where) == (
        "a stage of the model failed: a rank was ended by SIGKILL",
        "node laptop, layers 10 to 11 on laptop",
    )


@pytest.mark.parametrize("last", [None, b"no JSON", b'{"error": {"message": "the disk is full"}}'])
def test_a_node_that_is_away_is_named_with_its_layers(last: bytes | None) -> None:
    with pytest.raises(UnreachableError) as refused:
        watched(line(0, error="RuntimeError: Connection closed by peer", ended={}), (NODES[2], last))
    assert refused.value.where == "node nas" and "it has layers 0 to 3 on nas" in refused.value.message
