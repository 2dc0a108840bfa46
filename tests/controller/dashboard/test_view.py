"""The picture: it fits every terminal, shows what matters, and colours only what means something."""

from __future__ import annotations

import math
import re
from io import StringIO
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from homelab.controller.base.hint import Hint
from homelab.controller.dashboard import view, words
from homelab.controller.dashboard.columns import Column, lay, wrap
from homelab.controller.dashboard.event_rows import event_row
from homelab.controller.dashboard.snapshot import LossPoint, Snapshot
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.remote.poll_reply import parse_replies
from homelab.controller.run import events as run_events
from tests.controller.dashboard import sample

BAD = {"agent_alive": False, "torchrun_alive": False,
       "exit": {"returncode": 1, "signal": None, "ended_at": sample.NOW - 5, "stopped": False}}  # fmt: skip
WHY = Diagnosis(
    cause="disk-full", title="the disk of laptop is full", first_node="laptop", first_rank=1, retryable=False,
    because=("rank 1 on laptop: OSError: [Errno 28] No space left on device",), hint=Hint("make room: ssh laptop df -h"),
)  # fmt: skip


def failed() -> Snapshot:
    replies = sample.replies(laptop=BAD)
    del replies["old"]
    return sample.snapshot(replies=replies, unreachable={"old": "no route to host"}, diagnosis=WHY)


def many(nodes: int) -> Snapshot:
    shot = sample.snapshot()
    rows = tuple(shot.nodes[0].model_copy(update={"name": f"node{number}"}) for number in range(nodes))
    last = rows[-1].model_copy(update={"torchrun": "exit code 1", "needs_action": True})
    ranks = tuple(shot.ranks[0].model_copy(update={"rank": n, "node": f"node{n}"}) for n in range(nodes))
    return shot.model_copy(update={"nodes": (*rows[:-1], last), "ranks": ranks})


def text(shot: Snapshot, width: int, height: int | None) -> str:
    return "\n".join(line.plain for line in view.lines(shot, width, height))


def drawn(shot: Snapshot, width: int, height: int | None) -> list[str]:
    """As it arrives on a terminal, after wrapping and cropping by rich."""
    console = Console(width=width, height=height or 100, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(view.render(shot, width, height))
    return capture.get().rstrip("\n").split("\n")


def colours(shot: Snapshot) -> dict[str, str]:
    """Visible word -> the style it has."""
    found = {}
    for line in view.lines(shot, 120, 40):
        for span in line.spans:
            found[line.plain[span.start : span.end].strip()] = str(span.style)
    return found


SHOTS = {"running": sample.snapshot(), "failed": failed(), "many": many(10), "empty": sample.snapshot(replies={})}


@pytest.mark.parametrize("height", [8, 14, 24, 40, 60])
@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
@pytest.mark.parametrize("name", SHOTS)
def test_it_fits(name: str, width: int, height: int) -> None:
    lines = view.lines(SHOTS[name], width, height)
    assert len(lines) == height
    assert max(cell_len(line.plain) for line in lines) <= width
    assert len(drawn(SHOTS[name], width, height)) == height


def test_80_by_24_has_all_that_matters() -> None:
    seen = text(sample.snapshot(), 80, 24)
    for wanted in (
        sample.RUN, "● trains: step 412 of 1000, 40 min left, 3 of 3 nodes well", "step 412/1000   41 %", "ETA 40 min", "4\u202f121 tokens/s", "perplexity 3.25",
        "tower", "RTX 5070 Ti", "14.3/16 GB", "laptop", "old", "━compute┄wire·wait", "━━━━━━━━━━━┄┄┄┄·", "attempt 1 started",
        "status|stop|recover",
    ):  # fmt: skip
        assert wanted in seen, wanted


def test_a_larger_terminal_shows_the_log_and_whole_commands() -> None:
    seen = text(sample.snapshot(), 120, 40)
    assert "x3, ranks 0 to 2  step 412 of 1000" in seen
    assert f"homelab stop {sample.RUN}" in seen
    assert f"homelab recover {sample.RUN}" in seen


def test_without_a_height_everything_is_printed_and_commands_are_never_cut() -> None:
    shot = sample.snapshot().with_options(lambda name: " --cluster " + "x" * 100)
    seen = text(shot, 60, None)
    assert f"homelab recover --cluster {'x' * 100} {sample.RUN}" in seen


@pytest.mark.parametrize("width", [80, 140])
def test_the_best_held_out_loss_is_said_whole_where_it_is_neither_the_first_nor_the_last(width: int) -> None:
    def line(*losses: float) -> str:
        points = tuple(LossPoint(step=10 * number, loss=loss) for number, loss in enumerate(losses))
        shot = sample.snapshot().model_copy(update={"eval_losses": points})
        return next(line for line in text(shot, width, None).splitlines() if "eval" in line)

    assert "eval 5.212 \u2192 0.542, best 0.406 in step 20" in line(5.2124, math.nan, 0.4056, 0.5417)
    assert ("perplexity" in line(5.2124, 0.4056, 0.5417)) is (width == 140)
    assert "best" not in line(math.nan, math.nan) and "best 0.406 in step 10" in line(math.nan, 0.4056, math.nan)
    assert "best" not in line(5.2124, 0.5417, 0.4056) and "perplexity" in line(5.2124, 0.4056)


def test_a_failure_shows_cause_and_cure_first_even_on_a_small_terminal() -> None:
    seen = text(failed(), 80, 14)
    assert "✗ failed" in seen
    assert "the disk of laptop is full" in seen
    assert "make room: ssh laptop df -h" in seen


def test_a_long_cure_is_wrapped_and_not_cut() -> None:
    hint = " ".join(f"word{number}" for number in range(22))
    shot = failed().model_copy(update={"diagnosis": WHY.model_copy(update={"hint": hint})})
    seen = " ".join(text(shot, 80, 24).split())
    assert hint in seen


def test_the_node_that_needs_somebody_is_kept_when_there_is_no_room_for_all() -> None:
    seen = text(many(10), 80, 18)
    assert "node9" in seen and "exit code 1" in seen
    assert "more nodes" in seen
    assert "more ranks" in seen  # a long table leaves the other its place


def test_red_is_only_for_what_needs_somebody() -> None:
    calm = colours(sample.snapshot())
    assert not [word for word, style in calm.items() if "red" in style]
    assert calm["● trains"] == "green"
    assert calm["! 88 °C"] == "yellow"
    alarmed = colours(failed())
    assert {word for word, style in alarmed.items() if "red" in style} >= {
        "✗ failed", "exit code 1", "unreachable: no route to host", "the disk of laptop is full",
    }  # fmt: skip


def test_a_silent_rank_is_worth_a_look() -> None:
    replies = sample.replies()
    stale = replies["old"].replace(time=sample.NOW + 90)
    seen = colours(sample.snapshot(replies={**replies, "old": stale}))
    assert seen["silent 2 min"] == seen["rank 2 silent"] == "yellow"


def test_what_others_wrote_is_never_markup() -> None:
    raw = sample.raw_reply("tower", 0, 3)
    raw["run"]["ranks"]["0"]["log_tail"]["stdout"] = ["[red]not red[/red] [link=x]y[/link]", "\x1b[2Jwiped"]
    shot = sample.snapshot(replies=parse_replies({"tower": raw}), expected_nodes=("tower",))
    seen = "\n".join(drawn(shot, 120, 40))
    assert "[red]not red[/red] [link=x]y[/link]" in seen
    assert "wiped" in seen and "\x1b" not in seen


def test_wide_characters_are_counted_as_two_cells() -> None:
    raw = sample.raw_reply("tower", 0, 3)
    raw["run"]["ranks"]["0"]["log_tail"]["stdout"] = ["木" * 200, "🏖️" * 200]
    shot = sample.snapshot(replies=parse_replies({"tower": raw}), expected_nodes=("tower",))
    assert max(cell_len(line) for line in drawn(shot, 80, 24)) <= 80


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(20, 220),
    height=st.integers(3, 70),
    losses=st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=50),
    step=st.integers(0, 10**7),
    total=st.one_of(st.none(), st.integers(1, 10**6)),
    name=st.text(max_size=200),
)
@example(width=69, height=3, losses=[0.0, 3e292, -1.7976931348623155e308, 0.0], step=0, total=None, name="")
@example(width=220, height=70, losses=[1.7e308] * 50 + [0.0], step=0, total=None, name="")
@example(width=220, height=70, losses=[0.0, *[1.7e308] * 500], step=0, total=None, name="")
def test_it_fits_whatever_it_is_told(width: int, height: int, losses: list[float], step: int, total: int | None, name: str) -> None:
    update: dict[str, Any] = {
        "recipe": name.replace("\n", " "), "step": step, "total_steps": total,
        "loss_history": tuple(LossPoint(step=at, loss=loss) for at, loss in enumerate(losses)),
        "loss": losses[-1] if losses else None, "eta_s": losses[0] if losses else None,
    }  # fmt: skip
    lines = view.lines(sample.snapshot().model_copy(update=update), width, height)
    assert len(lines) == height
    assert max(cell_len(line.plain) for line in lines) <= width


def test_one_line() -> None:
    seen = view.one_line(sample.snapshot())
    assert seen.startswith("running  step 412/1000  loss 1.177  4121 tokens/s  ETA 40 min")
    assert "old: no route to host" in view.one_line(failed())


def test_sparkline() -> None:
    assert words.sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert words.sparkline(list(range(1000)), 4) == "▁▃▆█"
    assert words.sparkline([1.0, math.nan, 2.0], 3) == "▁ █"
    assert words.sparkline([5.0, 5.0], 5) == "▁▁"
    assert words.sparkline([], 5) == "" and words.sparkline([math.nan], 5) == " "


def test_the_bar_keeps_the_proportion() -> None:
    assert words.bar((2.0, 1.0, 1.0), 8) == ("━━━━", "┄┄", "··")
    assert words.bar((1.0, 0.0, 0.0), 4) == ("━━━━", "", "")
    assert "".join(words.bar((1.0, 1.0, 1.0), 16)) == "━━━━━┄┄┄┄┄┄·····"
    assert words.bar((None, 1.0, 1.0), 4) == ("", "", "") == words.bar((0.0, 0.0, 0.0), 4) == words.bar((math.inf, 1.0, 1.0), 4)


@pytest.mark.parametrize(
    ("seconds", "seen"),
    [(0.4, "0 s"), (89, "89 s"), (90, "2 min"), (3599, "1 h 00 min"), (5400, "1 h 30 min"), (200_000, "2 d 7 h"),
     (None, "–"), (math.nan, "–"), (-3, "0 s")],
)  # fmt: skip
def test_durations(seconds: float | None, seen: str) -> None:
    assert words.duration(seconds) == seen


def test_a_table_gives_up_its_least_important_column_first() -> None:
    columns = (Column("a"), Column("big", importance=2), Column("b", "right", importance=1))
    rows = [[Text("x"), Text("y" * 10), Text("7")]]
    assert [line.plain for line in lay(columns, rows, 40)] == [" a  big         b", " x  yyyyyyyyyy  7"]
    assert [line.plain for line in lay(columns, rows, 12)] == [" a  b", " x  7"]


def test_what_the_supervisor_does_is_read_whole_where_the_line_has_no_room() -> None:
    doing = "recovering: nothing is heard of laptop, and tower cannot reach it"
    narrow = text(sample.snapshot(supervisor=doing), 80, None).split("\n")
    assert f" supervisor: {doing}" in narrow and not any("supervisor" in line for line in narrow[:2])
    assert "supervisor: watching" in text(sample.snapshot(supervisor="watching"), 120, None).split("\n")[1]


def test_an_event_is_read_whole_under_its_time() -> None:
    words = [f"word{number}" for number in range(60)]
    events = [{"time": sample.NOW, "event": "trouble", "because": " ".join(words), "what": f"trouble: {' '.join(words)}"}]
    seen = text(sample.snapshot(events=events), 80, None).split("\n")
    first = next(number for number, line in enumerate(seen) if "✗ trouble: word0" in line)
    later = [line for line in seen[first + 1 :] if line.startswith(" " * 12)]
    assert " ".join(seen[first : first + 1 + len(later)]).split()[3:] == words and "…" not in "".join(seen)


def test_where_an_event_has_no_room_the_oldest_is_left_out_whole() -> None:
    events = [{"time": sample.NOW + number, "event": "note", "what": f"{number} {'long ' * 40}end{number}"} for number in range(6)]
    section = view._events(sample.snapshot(events=events), 80, 24)
    lines = [line.plain for line in section.draw(8)]
    assert len(lines) <= 8 and " 4 long" in lines[0] and lines[-1].endswith("end5")
    assert len(section.draw(2)) == 2, "of one that is longer than the room its beginning"


@pytest.mark.parametrize(
    ("kind", "values", "sign", "style"),
    [
        ("trouble", {"because": "x"}, "✗", "bold red"), ("state", {"state": "failed"}, "✗", "bold red"), ("state", {"state": "done"}, "✓", "green"),
        ("waiting", {"message": "x"}, "!", "yellow"), ("left-out", {"node": "a", "why": "b"}, "!", "yellow"), ("launched", {}, " ", ""),
    ],
)  # fmt: skip
def test_what_an_event_is_has_a_sign_and_a_colour(kind: Any, values: dict[str, str], sign: str, style: str) -> None:
    row = event_row({"time": sample.NOW, **run_events.event(kind, 1, **values).line()})
    line = view._event(row)
    assert line.plain[10] == sign and (not style or any(str(span.style) == style and span.start == 10 for span in line.spans))


def test_only_colours_of_the_terminals_own_theme_are_used() -> None:
    """Black, white and backgrounds are the owner's; what has a colour has a sign or a word, too."""
    used = set()
    for shot in (*SHOTS.values(), sample.snapshot(events=[{"time": 1.0, "event": "trouble", "because": "x", "what": "trouble: x"}])):
        for width in (80, 100, 140):
            for line in view.lines(shot, width, 40):
                used |= {word for span in line.spans for word in str(span.style).split()}
                coloured = [line.plain[span.start : span.end] for span in line.spans if {"red", "yellow"} & set(str(span.style).split())]
                assert all(words.strip(" ─") or not words.strip() for words in coloured if "─" not in words)
    assert used <= {"none", "bold", "dim", "red", "yellow", "green", "cyan"}


@pytest.mark.parametrize("width", [80, 100, 140])
def test_without_colours_and_in_a_pipe_no_colour_is_sent(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def sent(**of_console: Any) -> str:
        console = Console(file=StringIO(), width=width, height=100, **of_console)
        console.print(view.render(failed(), width, None))
        assert isinstance(console.file, StringIO)
        return console.file.getvalue()

    assert "\x1b" not in sent()
    assert "\x1b[1;31m" in sent(force_terminal=True, color_system="standard")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[[\d;]*3\d", sent(force_terminal=True, color_system="standard")), "bold and dim are no colours"


def test_blocks() -> None:
    assert words.blocks(0.5, 6) == ("███", "░░░") and words.blocks(1.0, 6) == ("██████", "") and words.blocks(0.0, 6) == ("", "░░░░░░")
    assert words.blocks(0.97, 6) == ("█████▉", "") and words.blocks(7.0, 2) == ("██", "") and words.blocks(None, 6) == ("", "")
    assert {len(filled + rest) for filled, rest in (words.blocks(part / 100, 6) for part in range(101))} == {6}


def test_each_card_has_a_bar_of_its_load_and_of_its_memory() -> None:
    assert "█████▉ 97 %  █████▍ 14.3/16 GB" in text(sample.snapshot(), 80, 24)


@given(
    content=st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=300),
    width=st.integers(8, 60),
    indent=st.integers(0, 20),
)
def test_wrapped_lines_fit_and_lose_nothing(content: str, width: int, indent: int) -> None:
    lines = [line.plain for line in wrap(Text(content), width, indent)]
    assert max(map(cell_len, lines)) <= width
    assert "".join("".join(lines).split()) == "".join(content.split())


def test_of_pairs_it_says_how_often_the_better_answer_is_found() -> None:
    seen = text(sample.snapshot().model_copy(update={"accuracy": 0.875, "eval_accuracy": 0.95}), 100, None)
    assert "judged rightly 88 %" in seen and "perplexity" not in seen
    assert re.search(r"eval \S+ .*, 95 %", seen)
