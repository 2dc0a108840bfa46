"""Keys, the log of all ranks as one, the courses of cards and networks, and what a step's seconds went into."""

from __future__ import annotations

import pytest

from homelab.controller.dashboard import card_history, node_rows, view_state
from homelab.controller.dashboard.keyboard import decoded_keys
from homelab.controller.dashboard.log_section import folded
from homelab.controller.dashboard.snapshot import GpuRow, NodeRow
from homelab.controller.dashboard.view_state import ViewState
from homelab.controller.facts.reading import read
from homelab.shared.protocol.rank_messages import Metric
from tests.controller.dashboard import sample


@pytest.mark.parametrize(
    ("text", "keys", "left"),
    [
        ("q", ["q"], ""), ("\x1b[A\x1b[6~", ["up", "page down"], ""), ("\x1bOB", ["down"], ""), ("a\x1b", ["a"], "\x1b"), ("\x1b[", [], "\x1b["),
        ("\x1b[1;5C", [], ""), ("\x1bx", ["escape", "x"], ""), ("\r\n\t\x00", [], ""), ("\x1b[" + "1" * 40 + "A", list("1" * 25) + ["A"], ""),
    ],
)  # fmt: skip
def test_what_a_terminal_sends_are_keys(text: str, keys: list[str], left: str) -> None:
    assert decoded_keys(text) == (keys, left)


def test_an_escape_alone_is_a_key_when_nothing_follows() -> None:
    assert decoded_keys("\x1b", is_all=True) == (["escape"], "")


def pressed(*keys: str, log_lines: int = 30) -> ViewState:
    state = ViewState()
    for key in keys:
        state = view_state.press(state, key, [0, 1, 2], log_lines)
    return state


@pytest.mark.parametrize(
    ("keys", "state"),
    [
        ((), ViewState()), (("q",), ViewState(is_left=True)), (("j",), ViewState(rank=0)), (("k",), ViewState(rank=2)), (("j", "j", "j", "j"), ViewState()),
        (("2",), ViewState(rank=2)), (("7",), ViewState()), (("up", "up", "down"), ViewState(lines_up=1)), (("page up",) * 9, ViewState(lines_up=29)),
        (("g", "G"), ViewState()), (("up", "1"), ViewState(rank=1)), (("p",), ViewState(is_paused=True)), (("p", " "), ViewState()),
        (("?",), ViewState(is_help=True)), (("h", "escape"), ViewState()), (("1", "escape"), ViewState()), (("x", "é"), ViewState()),
    ],
)  # fmt: skip
def test_a_key_changes_what_is_seen(keys: tuple[str, ...], state: ViewState) -> None:
    assert pressed(*keys) == state


def test_equal_lines_of_several_ranks_are_one() -> None:
    tails = {0: ["loading", "step 1", "step 2"], 1: ["loading", "a warning", "step 1", "step 2"], 2: ["step 1"], 5: ["alone"]}
    lines = [(line.text, line.ranks) for line in folded(tails)]
    assert lines == [("loading", (0, 1)), ("a warning", (1,)), ("step 1", (0, 1, 2)), ("step 2", (0, 1)), ("alone", (5,))]
    assert [line.who(is_short=False) for line in folded(tails)][:3] == ["x2, ranks 0 to 1", "rank 1", "x3, ranks 0 to 2"]
    assert [line.who(is_short=True) for line in folded(tails)][2:] == ["0-2", "0-1", "5"]
    assert folded({}) == ()


def looked(received: int | None, at_s: float, used: int | None = 10, *, reachable: bool = True) -> NodeRow:
    row = sample.snapshot().nodes[0]
    cards = (GpuRow(name="RTX 4070", index=0, memory_used_bytes=used, utilisation_percent=50.0),)
    return row.model_copy(update={
        "reachable": reachable, "received_bytes": received, "sent_bytes": 0, "counted_at_s": at_s, "gpus": cards if reachable else (),
    })  # fmt: skip


def test_a_course_grows_with_every_look_and_keeps_its_gaps() -> None:
    base, before = sample.snapshot(), None
    for row in (looked(0, 10.0), looked(2000, 12.0, 30), looked(None, 0.0, reachable=False), looked(500, 16.0, 20)):
        before = card_history.with_history(base.model_copy(update={"nodes": (row,)}), before)
    (node,) = before.nodes if before else ()
    card = node.gpus[0]
    assert card.memory_peak_bytes == 30 and card.memory.values == (10, 30, None, 20) and card.busy.values == (50.0, 50.0, None, 50.0)
    assert node.network.values[:3] == (None, 1000.0, None), "what began anew, or was not heard, has no rate"
    assert card_history.rates(looked(10, 2.0), looked(20, 1.0)) == (None, 0.0)
    for number in range(card_history.LOOKS + 5):
        before = card_history.with_history(base.model_copy(update={"nodes": (looked(0, float(number)),)}), before)
    assert before and len(before.nodes[0].gpus[0].memory.values) == card_history.LOOKS


def metric(step: int, seconds: float | None) -> Metric:
    return read(Metric, {"kind": "train", "step": step, "rank": 0, "attempt": 1, "communication_s": seconds})


def test_the_slowest_rank_waits_for_nobody() -> None:
    of_rank = {0: [metric(1, 0.2), metric(2, 0.5)], 1: [metric(1, 0.9)]}
    wire = node_rows.wire_seconds(of_rank)
    assert wire == {1: 0.2}
    assert node_rows.wire_and_wait(of_rank[1][0], wire) == (0.2, pytest.approx(0.7)) and node_rows.wire_and_wait(of_rank[0][1], wire) == (
        None,
        None,
    )
    assert node_rows.wire_seconds({0: of_rank[0]}) == {}
