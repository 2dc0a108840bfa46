"""From the agents' answers to one Snapshot."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from homelab.controller.base.sanitize import plain
from homelab.controller.dashboard import tables, view
from homelab.controller.dashboard.event_rows import event_row
from homelab.controller.dashboard.snapshot import Snapshot
from homelab.controller.dashboard.snapshot_builder import next_commands
from homelab.controller.facts.reading import read
from homelab.controller.planning.types import SpareCard
from homelab.controller.remote.poll_reply import parse_replies
from homelab.shared.protocol.rank_messages import Metric
from tests.controller.dashboard import sample


def reply_with(metrics: list[dict[str, Any]], **run: Any) -> dict[str, Any]:
    raw = sample.raw_reply("tower", 0, 3, **run)
    raw["run"]["ranks"]["0"]["metrics"] = metrics
    return raw


def train(step: int, loss: float, attempt: int = 1, rank: int = 0, step_s: float = 1.0) -> dict[str, Any]:
    return {"kind": "train", "time": step, "attempt": attempt, "rank": rank, "step": step, "loss": loss, "step_s": step_s}


def test_a_running_run() -> None:
    shot = sample.snapshot()
    assert (shot.state, shot.step, shot.total_steps, shot.attempt) == ("running", 412, 1000, 1)
    assert shot.loss == shot.loss_history[-1].loss
    assert len(shot.loss_history) == 412
    assert [point.step for point in shot.eval_losses] == [1, 200, 400]
    assert shot.checkpoint_steps == (350, 400)
    assert shot.tokens_per_s == pytest.approx(512 * 33 / 4.1)
    assert shot.eta_s == pytest.approx((1000 - 412) * 4.1)
    assert shot.started_at == sample.NOW - 1750


def test_the_rows() -> None:
    shot = sample.snapshot()
    tower, laptop, _ = shot.nodes
    assert (tower.name, tower.torchrun, tower.address) == ("tower", "running", "192.168.1.100")
    assert laptop.gpus[0].memory_total_bytes == 8 << 30
    rank = shot.ranks[1]
    assert (rank.rank, rank.node, rank.share, rank.phase, rank.step) == (1, "laptop", 9, "training", 412)
    assert rank.heartbeat_age_s == 2.0
    assert rank.log_tail[-1] == "step 412 of 1000"


def test_what_a_program_prints_is_not_hidden_by_its_progress_bar() -> None:
    """tqdm draws on stderr, and each drawing arrives as a line."""
    raw = sample.raw_reply("tower", 0, 3)
    bars = [line for n in range(200) for line in (f" {n // 2:2}%|▎    | {n}/200 [00:{n % 60:02}<01:00,  3.1it/s, loss=1.{n}]", " " * 60)]
    said = [f"epoch {n}" for n in range(300)]
    other = "Map:  50%|████ | 5/10 [00:01<00:01, 5.0 examples/s]"
    raw["run"]["ranks"]["0"]["log_tail"] = {"stdout": said[:20], "stderr": ["a warning", other, *bars, "12it [00:04,  3.0it/s]"]}
    (row,) = sample.snapshot(replies=parse_replies({"tower": raw}), expected_nodes=("tower",)).ranks[:1]
    assert row.log_tail == (*said[:20], "a warning", other, bars[-2], "12it [00:04,  3.0it/s]")
    raw["run"]["ranks"]["0"]["log_tail"] = {"stdout": said, "stderr": [f"w {n}" for n in range(300)]}
    (row,) = sample.snapshot(replies=parse_replies({"tower": raw}), expected_nodes=("tower",)).ranks[:1]
    assert row.log_tail == (*said[-100:], *(f"w {n}" for n in range(200, 300)))
    raw["run"]["ranks"]["0"]["log_tail"] = {"stdout": said, "stderr": [f"{bars[0]}Traceback (most recent call last):", "", "KeyError: 'x'"]}
    (row,) = sample.snapshot(replies=parse_replies({"tower": raw}), expected_nodes=("tower",)).ranks[:1]
    assert row.log_tail[-3:] == (f"{bars[0]}Traceback (most recent call last):", "", "KeyError: 'x'") and len(row.log_tail) == 200


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_the_eta_follows_the_slowest_rank_and_not_one_hiccup(slow_rank: int) -> None:
    raw = sample.raw_reply("tower", 0, 3)
    slow = [train(step, 1.0, rank=slow_rank, step_s=3.0) for step in range(1, 31)]
    slow[-1]["step_s"] = 300.0
    quick = [train(step, 1.0, rank=1 - slow_rank) for step in range(1, 31)]
    beat = {"time": sample.NOW, "phase": "training", "step": 30, "total_steps": 130}
    by_rank = {slow_rank: slow, 1 - slow_rank: quick}
    raw["run"]["ranks"] = {str(rank): {"heartbeat": beat, "metrics": by_rank[rank]} for rank in (0, 1)}
    shot = sample.snapshot(replies=parse_replies({"tower": raw}), expected_nodes=("tower",))
    assert shot.eta_s == pytest.approx(100 * 3.0)


def test_no_eta_before_the_first_step_and_after_the_end() -> None:
    start = sample.snapshot(replies=parse_replies({"tower": reply_with([])}), expected_nodes=("tower",))
    assert start.eta_s is None
    ended = {"agent_alive": False, "exit": {"returncode": 1, "signal": None, "ended_at": 1.0, "stopped": False}}
    assert sample.snapshot(replies=sample.replies(tower=ended)).eta_s is None


def test_lines_gathered_before_are_joined_with_the_new_ones() -> None:
    old = [read(Metric, line) for line in sample.metric_lines(0, "tower", 300)]
    new = [line for line in sample.metric_lines(0, "tower", 310) if line["step"] > 298]
    shot = sample.snapshot(replies=parse_replies({"tower": reply_with(new)}), expected_nodes=("tower",), metrics=old)
    assert [point.step for point in shot.loss_history] == list(range(1, 311))


def test_steps_that_were_done_again_replace_the_lost_ones() -> None:
    first = [read(Metric, train(step, 9.0)) for step in range(1, 51)]
    again = [train(step, 1.0, attempt=2) for step in range(41, 45)]
    replies = parse_replies({"tower": reply_with(again, attempt=2)})
    shot = sample.snapshot(replies=replies, expected_nodes=("tower",), metrics=first)
    assert [point.step for point in shot.loss_history] == list(range(1, 45))
    assert [point.loss for point in shot.loss_history[38:]] == [9.0, 9.0, 1.0, 1.0, 1.0, 1.0]
    assert (shot.attempt, shot.step, shot.loss) == (2, 44, 1.0)


def test_an_unreachable_node_keeps_its_row_with_the_reason_and_its_ranks() -> None:
    replies = sample.replies()
    del replies["old"]
    shot = sample.snapshot(replies=replies, unreachable={"old": "no route to host\nmore"})
    row = shot.nodes[2]
    assert (row.reachable, row.why_not, row.needs_action) == (False, "no route to host", True)
    assert (shot.ranks[2].node, shot.ranks[2].share, shot.ranks[2].step) == ("old", 6, None)


def test_how_torchrun_ended() -> None:
    def words(exit_json: dict[str, Any]) -> tuple[str, bool]:
        ended = {"agent_alive": False, "torchrun_alive": False, "exit": exit_json}
        row = sample.snapshot(replies=sample.replies(tower=ended)).nodes[0]
        return row.torchrun, row.needs_action

    assert words({"returncode": 0, "signal": None, "ended_at": 1.0, "stopped": False}) == ("done", False)
    assert words({"returncode": 1, "signal": None, "ended_at": 1.0, "stopped": False}) == ("exit code 1", True)
    assert words({"returncode": None, "signal": 9, "ended_at": 1.0, "stopped": False}) == ("signal 9", True)
    assert words({"returncode": None, "signal": 15, "ended_at": 1.0, "stopped": True}) == ("stopped", False)


def test_a_loss_that_is_not_a_number_goes_through() -> None:
    shot = sample.snapshot(replies=parse_replies({"tower": reply_with([train(1, 2.0), train(2, math.nan)])}), expected_nodes=("tower",))
    assert shot.loss is not None and math.isnan(shot.loss)
    assert json.loads(shot.model_dump_json())["loss"] is None  # JSON has no NaN


def test_the_json_of_a_snapshot_reads_back() -> None:
    shot = sample.snapshot()
    assert Snapshot.model_validate_json(shot.model_dump_json()) == shot


def test_notes_are_said_once() -> None:
    note = {"kind": "note", "time": 1.0, "rank": 0, "message": "fp16: this card has no bf16"}
    replies = parse_replies({"tower": reply_with([note, {**note, "rank": 1}])})
    assert sample.snapshot(replies=replies, expected_nodes=("tower",)).notes == ("fp16: this card has no bf16",)


def test_the_next_commands_fit_the_state() -> None:
    assert [command.purpose for command in next_commands("running", "r")] == ["follow", "stop", "recover"]
    assert next_commands("failed", "r")[0].with_options(lambda name: " --cluster c.toml").command == "homelab recover --cluster c.toml r"
    assert [command.purpose for command in next_commands("done", "r", is_script=True)] == ["logs"]
    assert [command.purpose for command in next_commands("done", "r", scores=True)] == ["fetch", "logs"]
    assert next_commands("done", "r")[0].command == "homelab chat r --prompt '...'"


def test_rows_that_move_between_ranks_are_events() -> None:
    moved = {
        "kind": "shares",
        "time": sample.NOW - 60,
        "attempt": 1,
        "rank": 0,
        "step": 400,
        "message": "after step 400: rank 1 (laptop) is 3.00 times as slow as expected",
    }
    raw = sample.raw_reply("tower", 0, 412)
    raw["run"]["ranks"]["0"]["metrics"].append(moved)
    shot = sample.snapshot(replies=parse_replies({"tower": raw}))
    assert shot.events[-1].text == moved["message"] and shot.events[-1].time == moved["time"]
    assert "3.00 times as slow" in "\n".join(line.plain for line in view.lines(shot, 120, 50))


def test_events_keep_their_details() -> None:
    assert sample.snapshot().events[0].text == "launched: recipe llama7b-lora.toml · nodes tower, laptop, old"


@pytest.mark.parametrize(
    ("raw", "seen"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07text", "text"),
        ("\x1b[2J\x1b[1;1Hgone", "gone"),
        ("10%\r50%\r100%", "100%"),
        ("100%\r\n", "100%"),
        ("a\tb\x00\x08c", "a   bc"),
    ],
)
def test_what_a_program_prints_cannot_steer_the_terminal(raw: str, seen: str) -> None:
    assert plain(raw) == seen


def test_an_attempt_without_a_step_is_where_it_goes_on_from() -> None:
    loading = {
        "attempt": 2,
        "ranks": {"0": {"heartbeat": {"time": sample.NOW, "phase": "loading", "step": 0}, "metrics": sample.metric_lines(0, "tower", 412)}},
    }
    shot = sample.snapshot(replies=sample.replies(tower=loading), plan=sample.plan(2).model_copy(update={"resume_step": 420}))
    assert shot.step == 420, "not the last line of the first attempt that came here"


def test_what_is_only_for_programs_is_not_shown() -> None:
    row = event_row({"time": 1.0, "what": "trouble: the process of rank 1 on b is gone", "kind": "dead-rank", "ranks": [1], "clean": True})
    assert row.text == "trouble: the process of rank 1 on b is gone"


def test_events_stand_as_they_were_written_when_the_clock_goes_back() -> None:
    events = [
        {"time": sample.NOW + at, "what": what}
        for at, what in ((0, "launched"), (100, "trouble"), (-7000, "attempt 2 continues"), (-6990, "done"))
    ]
    moved = {"kind": "shares", "time": sample.NOW + 50, "rank": 0, "step": 4, "message": "rows move"}
    replies = parse_replies({"tower": reply_with([moved])})
    seen = sample.snapshot(replies=replies, expected_nodes=("tower",), events=events).events
    assert [event.text for event in seen] == ["launched", "rows move", "trouble", "attempt 2 continues", "done"]
    assert seen[-1].time == sample.NOW - 6990, "what was written down is shown"


def test_ages_are_those_of_the_nodes_own_clock_and_never_negative() -> None:
    shot = sample.snapshot(now=sample.NOW - 7200)
    assert shot.running_s == 1750.0 and "29 min" in view.lines(shot, 80, 24)[0].plain
    ahead = sample.replies(tower={"started_at": sample.NOW + 3600})
    assert sample.snapshot(replies=ahead).running_s == 1750.0, "by the clocks of the others"
    raw = sample.raw_reply("tower", 0, 3, started_at=sample.NOW + 3600)
    raw["run"]["ranks"]["0"]["heartbeat"]["time"] = sample.NOW + 3600
    back = sample.snapshot(replies=parse_replies({"tower": raw}), expected_nodes=("tower",))
    assert back.running_s is None and back.ranks[0].heartbeat_age_s is None
    assert "0 s" not in "\n".join(line.plain for line in view.lines(back, 80, 24))


def test_a_card_that_takes_no_part_is_marked() -> None:
    raw = sample.raw_reply("tower", 0)
    raw["gpus"].append({**raw["gpus"][0], "index": 1, "name": "NVIDIA GeForce GT 1030"})
    planned = sample.plan()
    spare = planned.nodes[0].model_copy(update={"spare_cards": (SpareCard(index=1, name="NVIDIA GeForce GT 1030"),)})
    planned = planned.model_copy(update={"nodes": (spare, *planned.nodes[1:])})
    shot = sample.snapshot(replies=parse_replies({"tower": raw}), expected_nodes=("tower",), plan=planned)
    assert [gpu.is_left_out for gpu in shot.nodes[0].gpus] == [False, True]
    assert any("GT 1030 left out" in line.plain for line in tables.nodes(shot.nodes, 160, 1).draw(9))
