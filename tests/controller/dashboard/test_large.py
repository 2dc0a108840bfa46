"""What a large terminal shows beyond what everybody needs, and who is left out and why on any."""

from __future__ import annotations

import math
from typing import Any

import pytest
from rich.cells import cell_len

from homelab.controller.dashboard import chart, step_rate, view
from homelab.controller.dashboard.measured import Measured
from homelab.controller.dashboard.snapshot import LossPoint, Snapshot
from homelab.controller.features.recover.resume import left_out_events
from homelab.controller.features.status.failure import since
from homelab.controller.planning.types import Plan, RankTime, TimeEstimate
from homelab.controller.remote.poll_reply import parse_replies
from homelab.controller.run import events
from homelab.shared.protocol.rank_messages import Metric
from tests.controller.dashboard import sample

TIME = TimeEstimate(
    is_measured=True, steps=1000, row_tokens=512, rows_because="", compute_s=3, wire_s=1, wire_because="", step_s=4.1, best_step_s=4,
    equal_step_s=6, tokens_per_s=4100, efficiency=0.93, equal_efficiency=0.6, save_s=1, evaluate_s=1, hours=1, gains=(),
    ranks=tuple(
        RankTime(rank=rank, node=node, source="measured", alone_tokens_per_s=2500 * sample.SHARES[node] / 18, tokens=1, busy_s=3.0)
        for rank, node in enumerate(sample.CARDS)
    ),
)  # fmt: skip
NOTE = "fp16: this card has no bf16"
WHY = "its clock is 599.9 s ahead of the others, so that no sign of life of it could be told from an old one"


def plan(**changes: Any) -> Plan:
    return sample.plan(2).model_copy(update={"time": TIME, "left_out": ("attic",), "left_out_because": {"attic": WHY}, **changes})


def shot() -> Snapshot:
    raw = {node: sample.raw_reply(node, rank, attempt=2) for rank, node in enumerate(sample.CARDS)}
    for rank, reply in enumerate(raw.values()):
        reply["gpus"][0] |= {"power_w": 212.3, "power_limit_w": 300.0}
        its = reply["run"]["ranks"][str(rank)]
        for line in its["metrics"]:
            line["attempt"] = 2
        its["metrics"].append({"kind": "save", "time": sample.NOW - 49 - rank, "attempt": 2, "rank": rank, "step": 400})
        its["metrics"].append({"kind": "note", "time": sample.NOW - 490, "attempt": 2, "rank": rank, "message": NOTE})
        gloo = "[W1122 socket.cpp:767] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
        its["log_tail"]["stdout"] = [*its["log_tail"]["stdout"], f"note: {NOTE}", gloo]
    return sample.snapshot(replies=parse_replies(raw), plan=plan())


def text(width: int, height: int | None) -> str:
    return "\n".join(line.plain for line in view.lines(shot(), width, height))


def test_200_by_50_has_what_a_person_misses_on_a_small_one() -> None:
    seen = text(200, 50)
    for wanted in (
        "212/300 W", "peak memory", "7.0 GB", "90 % of the sum of the cards (planned 93 %)", "epoch 1.03", "4.10 s per step", "saved 49 s ago", "restarts 1",
        "loss by step", "◆ held-out rows", "step 1 ", " step 412", "2.508 ┤", "host cpu", "host memory", f"attic  left out: {WHY}",
    ):  # fmt: skip
        assert wanted in seen, wanted
    assert "x3, ranks 0 to 2  step 411 of 1000" in seen


def test_the_logs_repeat_no_note_and_nothing_that_means_nothing() -> None:
    seen = text(200, 50)
    assert seen.count(NOTE) == 1 and "client socket" not in seen
    assert "step 412 of 1000" in seen, "what comes before stays"


@pytest.mark.parametrize(("width", "height"), [(40, 8), (60, 20), (80, 24), (120, 40), (200, 50)])
def test_all_fits(width: int, height: int) -> None:
    lines = view.lines(shot(), width, height)
    assert len(lines) == height and max(cell_len(line.plain) for line in lines) <= width


def test_80_by_24_stays_complete_with_a_node_left_out() -> None:
    seen = text(80, 24)
    for wanted in (
        "ETA 40 min", "newest checkpoint step 400", "old", "attic  left out: its clock is 599.9 s ahead", "749", "recover", "attempt 1 started",
    ):  # fmt: skip
        assert wanted in seen, wanted


def test_60_columns_do_not_cut_the_number_of_the_newest_checkpoint() -> None:
    assert "newest checkpoint step 400" in text(60, 20) and "ETA 40 min" in text(60, 20)
    assert "newest checkpoint step 400" in text(40, 20)


def test_who_is_left_out_is_a_row_and_no_rank_is_missed() -> None:
    assert text(80, None).count("left out") == 1
    assert [row.name for row in shot().nodes] == list(sample.CARDS)
    old = sample.snapshot(plan=plan(left_out_because={}))
    assert "attic  left out\n" in "\n".join(line.plain for line in view.lines(old, 80, 24)) + "\n", "a plan of before has no reasons"


def test_who_is_left_out_and_why_is_told_of_a_recovery() -> None:
    (left_out,) = left_out_events(2, ["tower", "attic"], {"attic": f"{WHY}\n", "new": "--nodes does not name it"})
    assert left_out.sentence == f"attic is left out of attempt 2: {WHY}"
    resumed = events.resumed(2, 4, is_program=False)
    lines = [{"time": at, **told.line()} for at, told in ((1.0, events.state("failed", 1, "x")), (2.0, resumed), (2.0, left_out))]
    assert [row.text for row in since(lines, 1)][-1] == left_out.sentence


def metric(step: int, tokens: int | None, step_s: float | None, rate: float | None, rank: int = 0) -> Metric:
    return Metric(kind="train", attempt=1, rank=rank, step=step, tokens=tokens, step_s=step_s, tokens_per_s=rate)


def test_tokens_per_second_are_those_of_the_last_steps() -> None:
    jumping = [metric(step, 5000 if step % 2 else 800, 1.0, 5000.0 if step % 2 else 800.0) for step in range(1, 101)]
    assert step_rate.tokens_per_s(jumping) == pytest.approx(2900.0) and step_rate.tokens_per_s(jumping[:-1]) == pytest.approx(
        2900.0, rel=0.1
    )
    assert step_rate.tokens_per_s([metric(1, None, None, 7.0), metric(2, None, None, 9.0)]) == 8.0
    assert step_rate.tokens_per_s([]) is None and step_rate.tokens_per_s([metric(1, None, None, None)]) is None


def test_a_step_is_as_long_as_its_slowest_rank() -> None:
    train = [metric(step, 1, 1.0 + rank, 1.0, rank) for step in range(1, 6) for rank in (0, 1)]
    assert Measured(train).pace(1).step_s == 2.0 and Measured(train).pace(2).step_s is None


def test_efficiency_needs_the_speeds_of_the_plan() -> None:
    assert step_rate.efficiency(sample.plan(), 4000.0) == (None, None)
    reached, planned = step_rate.efficiency(plan(), 2500 * 33 / 18 * 0.5)
    assert reached == pytest.approx(0.5) and planned == 0.93
    assert step_rate.efficiency(plan(), None) == (None, 0.93)


def test_the_age_of_a_checkpoint_is_by_the_clock_that_wrote_it() -> None:
    replies = sample.replies()
    saved = Metric(kind="save", time=sample.NOW - 49, rank=0, step=400)
    assert step_rate.checkpoint_age_s(Measured([saved]).saved(400), replies) == pytest.approx(49)
    assert step_rate.checkpoint_age_s(Measured([saved]).saved(410), replies) is None
    assert step_rate.checkpoint_age_s(Measured([saved.replace(time=sample.NOW + 9)]).saved(400), replies) is None


def test_a_curve_falls_from_its_upper_left_to_its_lower_right() -> None:
    points = [LossPoint(step=step, loss=3.0 - step / 100) for step in range(0, 201)]
    drawn = [line.plain for line in chart.lines(points, [LossPoint(step=200, loss=1.0)], 80, 10)]
    assert len(drawn) == 10 and max(map(cell_len, drawn)) <= 80
    assert drawn[1].startswith("   3.000 ┤") and drawn[8].startswith("   1.000 ┤") and drawn[8].endswith("◆")
    assert drawn[1][10] != " " and drawn[1].rstrip()[-1] != "◆" and drawn[9].split() == ["step", "0", "step", "200"]


@pytest.mark.parametrize("losses", [[], [1.0], [math.nan, math.nan], [1.0, math.inf], [1e308, -1e308]])
def test_without_two_steps_there_is_no_curve(losses: list[float]) -> None:
    assert chart.lines([LossPoint(step=step, loss=loss) for step, loss in enumerate(losses)], [], 80, 10) == []
    assert chart.lines([LossPoint(step=step, loss=1.0) for step in range(9)], [], 50, 10) == []
    assert chart.lines([LossPoint(step=step, loss=1.0) for step in range(9)], [], 80, 7) == []
