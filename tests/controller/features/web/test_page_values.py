"""What a page says: an answer first, everything with an end, and words of others as text only."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import homelab
from homelab.controller.base.hint import Hint
from homelab.controller.dashboard.run_list import RunRow
from homelab.controller.dashboard.snapshot import LossPoint
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.facts import reading
from homelab.controller.features.report import report_builder
from homelab.controller.features.report.report_builder import RunAbout, Sources
from homelab.controller.features.web import first_sentence, long_run, page_values
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.rank_messages import Metric
from tests.controller.dashboard import sample

pytestmark = pytest.mark.timeout(30)
PAGE = (Path(homelab.__file__).parent / "controller" / "features" / "web" / "page.html").read_text(encoding="utf-8")
EVIL = "</script><img src=x onerror=alert(1)>"
KILLED = Diagnosis(
    cause="killed", title="rank 1 on laptop was killed (signal 9)", first_node="laptop", hint=Hint("homelab recover"), retryable=True
)


def read(text: str) -> Any:
    """As a browser reads it: no NaN, and one line."""
    assert "\n" not in text and "\r" not in text

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_the_best_held_out_loss_is_a_number() -> None:
    """A training that diverges writes others: the lowest of the numbers is the best, and without one there is none."""

    def note(*losses: float) -> str:
        points = tuple(LossPoint(step=10 * number, loss=loss) for number, loss in enumerate(losses))
        figures = read(page_values.run(sample.snapshot().model_copy(update={"eval_losses": points}), is_asked=True))["figures"]
        return next(str(figure[2]) for figure in figures if figure[0] == "held-out loss")

    assert note(float("nan"), 0.5, float("inf")) == "best 0.500 in step 10" and note(float("nan")) == ""


@pytest.mark.parametrize(
    ("state", "more", "said", "tone"),
    [
        ("running", {}, "llama7b-lora trains: step 412 of 1\u202f000, about 40 min left, 3 of 3 nodes well.", "well"),
        ("running", {"eta_s": None, "loss": float("nan")}, "llama7b-lora trains: step 412 of 1\u202f000, the loss is not a number, 3 of 3 nodes well.", "well"),
        ("failed", {"diagnosis": KILLED}, "llama7b-lora failed at step 412 of 1\u202f000: rank 1 on laptop was killed (signal 9).", "trouble"),
        ("failed", {"supervisor": "waits 5 s"}, "llama7b-lora failed at step 412 of 1\u202f000. Its supervisor: waits 5 s.", "waits"),
        ("done", {}, "llama7b-lora is done: 412 steps, loss 2.448 to 1.177.", "well"),
        ("stopped", {"total_steps": None}, "llama7b-lora was stopped at step 412.", "waits"),
        ("starting", {"ranks": ()}, "llama7b-lora starts: no rank has said anything yet.", "waits"),
        ("lost", {}, "llama7b-lora cannot be seen: 3 of 3 nodes answer. It may still train, after step 412 of 1\u202f000.", "trouble"),
    ],
)  # fmt: skip
def test_the_first_sentence_is_the_answer(state: str, more: dict[str, Any], said: str, tone: str) -> None:
    snapshot = sample.snapshot().model_copy(update={"state": state, **more})
    assert (first_sentence.of_run(snapshot, is_asked=True), first_sentence.tone(snapshot)) == (said, tone)
    assert read(page_values.run(snapshot, is_asked=True))["answer"] == said


def test_a_node_that_does_not_answer_is_named_first() -> None:
    snapshot = sample.snapshot(
        replies={name: reply for name, reply in sample.replies().items() if name != "old"}, unreachable={"old": "off"}
    )
    assert (
        first_sentence.of_run(snapshot, is_asked=True).endswith("2 of 3 nodes well (not old).")
        and first_sentence.tone(snapshot) == "trouble"
    )
    assert first_sentence.of_run(snapshot, is_asked=False) == "llama7b-lora was training at step 412 of 1\u202f000 when it was seen last."


def test_all_runs_in_one_sentence() -> None:
    rows = [RunRow(f"2026-11-21-140{number}-{name}", state, 1, 0.0) for number, (name, state) in enumerate([("a", "done"), ("b", "running"), ("c", "running")])]  # fmt: skip
    assert first_sentence.of_runs([]) == "There is no run yet."
    assert first_sentence.of_runs(rows[:1]) == "Nothing trains now. The newest run, a, is done."
    assert first_sentence.of_runs(rows[:2]) == "b trains now." and first_sentence.of_runs(rows) == "2 runs train now: b and c."
    told = read(page_values.overview([], ["tower"], {}, 0.0, lambda name: " --cluster x", is_asked=True))
    assert told["begin"][0] == "homelab new --cluster x DATA" and told["nodes"] == [{"name": "tower", "why_not": ""}]


def test_words_of_others_stay_text() -> None:
    snapshot = sample.snapshot()
    ranks = tuple(row.model_copy(update={"log_tail": (EVIL, "b")}) for row in snapshot.ranks)
    nodes = tuple(row.model_copy(update={"name": EVIL}) for row in snapshot.nodes)
    snapshot = snapshot.model_copy(update={"ranks": ranks, "nodes": nodes, "run": EVIL})
    assert read(page_values.logs(snapshot))["together"][0] == ["x3, ranks 0 to 2", EVIL]
    assert read(page_values.run(snapshot, is_asked=True))["nodes"][0]["name"] == EVIL


MAKES_HTML = re.compile(
    r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|srcdoc|DOMParser|createContextualFragment|setTimeout\(['\"`]|javascript:"
)


def test_the_page_can_put_a_text_in_no_other_way() -> None:
    assert not MAKES_HTML.findall(PAGE)
    assert MAKES_HTML.findall("node.innerHTML = text") and MAKES_HTML.findall("node.insertAdjacentHTML('x')"), "the rule is awake"
    markup = re.sub(r"<(script|style)>.*?</\1>", "", PAGE, flags=re.DOTALL)
    assert not re.findall(r"\s(?:on\w+|style|src|integrity)=", markup), "nothing that the policy would refuse"
    assert set(re.findall(r"https?://[^\"\s]+", PAGE)) == {"http://www.w3.org/2000/svg"} and "url(" not in PAGE and "@import" not in PAGE


def test_a_tab_that_is_hidden_from_the_start_pauses_as_well() -> None:
    """No event tells a page that it was opened in the background: what pauses it also runs once behind the first stream."""
    handler = re.search(r'addEventListener\("visibilitychange", (\w+)\)', PAGE)
    assert handler and re.search(rf"^listen\(\);\n{handler[1]}\(\);", PAGE, re.MULTILINE)


def test_everything_has_an_end() -> None:
    snapshot = sample.snapshot()
    row, event, node = snapshot.ranks[0], snapshot.events[0], snapshot.nodes[0]
    many = snapshot.model_copy(update={
        "ranks": tuple(row.model_copy(update={"rank": number, "log_tail": tuple(f"{number} {place} {'x' * 9000}" for place in range(150))}) for number in range(80)),
        "events": (event,) * 5000, "notes": (Hint("note"),) * 500, "nodes": (node,) * 8,
    })  # fmt: skip
    told = read(page_values.run(many, is_asked=True))
    assert (len(told["ranks"]), told["rank_count"], len(told["events"]), len(told["notes"])) == (64, 80, 200, 20)
    assert len(page_values.logs(snapshot.model_copy(update={"ranks": many.ranks[:8]}))) < 1_000_000
    rows = [RunRow(f"run-{number}", "done", 1, 1.0) for number in range(5000)]
    assert len(read(page_values.overview(rows, [], {}, 2.0, lambda name: "", is_asked=True))["runs"]) == 200


def test_what_is_not_a_number_is_json() -> None:
    snapshot = sample.snapshot().model_copy(update={"loss": float("inf"), "tokens_per_s": float("nan")})
    told = read(page_values.run(snapshot, is_asked=True))
    assert told["loss"] is None and ["loss", "inf"] in [figure[:2] for figure in told["figures"]]


def report_of(lines: long_run.FewLines) -> Any:
    metrics = [reading.read(Metric, line) for line in lines.lines]
    sources = Sources(run="r", state="done", now=2000.0, about=RunAbout(), plans={1: sample.plan()}, metrics=metrics)
    return long_run.whole(report_builder.build(sources), lines)


def test_a_long_run_has_its_whole_loss_and_a_part_of_the_rest(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    lines = [
        {"attempt": 1, "kind": "train", "loss": 9.0 if step == 4321 else 2.0, "rank": rank, "step": step, "time": 1.0, "tokens": 10, "tokens_per_s": 5.0}
        for step in range(1, 5001) for rank in range(3)
    ]  # fmt: skip
    lines.insert(7, {"attempt": 1, "eval_loss": 1.0, "kind": "eval", "rank": 0, "step": 2, "time": 1.0})
    paths.metrics_jsonl.write_text("".join(json.dumps(line, sort_keys=True) + "\n" for line in lines) + '{"cut": ')
    few, whole = long_run.LineSample(paths, short_bytes=1000).read(), long_run.LineSample(paths).read()
    assert (few.every, whole.every, len(whole.lines)) == (8, 1, 15001) and len(few.lines) == 3 * 625 + 1
    thin, all_ = report_of(few), report_of(whole)
    drawn, drawn_of_all = thin.curves[0].series[0].points, all_.curves[0].series[0].points
    assert (drawn[0], drawn[-1]) == (drawn_of_all[0], drawn_of_all[-1]) and 9.0 in [point.value for point in drawn], (
        "a spike of one step stays"
    )
    assert {point.value for point in thin.curves[1].series[0].points} == {15.0}
    assert "one step in 8" in thin.missing[-1] and thin.shares[0].tokens is None and thin.step_count == 5000
    assert len(page_values.report(thin)) < 200_000
    first = long_run.glimpse(paths, short_bytes=1000)
    assert first is not None and long_run.glimpse(paths) is None and {point.loss for point in first.losses} <= {2.0, 9.0}
    assert (first.losses[0].step, first.losses[-1].step, max(line["step"] for line in first.lines)) == (1, 5000, 5000)
    (curve,) = long_run.first_look(report_of(whole), first).curves
    assert curve.name == "Loss" and len(curve.series[0].points) > 200


def test_the_lines_of_a_growing_run_are_read_once(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()

    def write(steps: range) -> None:
        with paths.metrics_jsonl.open("a") as stream:
            stream.writelines(
                json.dumps({"attempt": 1, "kind": "train", "loss": 1.0 + 1 / step, "rank": rank, "step": step, "time": 1.0}) + "\n"
                for step in steps for rank in (0, 1)
            )  # fmt: skip

    def read_on(sample: long_run.LineSample, last: int) -> int:
        before = sample.bytes_read
        write(range(last + 1, last + 3))
        few = sample.read()
        assert few == long_run.LineSample(paths, short_bytes=1000).read() and few.step_count == last + 2
        assert max(line["step"] for line in few.lines) == last + 2 and len(few.lines) <= 2 * 1001 + 2
        return sample.bytes_read - before

    sample, costs = long_run.LineSample(paths, short_bytes=1000), []
    for first, last in ((1, 1000), (1003, 20_000)):
        write(range(first, last + 1))
        sample.read()
        costs.append(read_on(sample, last))
    assert abs(costs[1] - costs[0]) < 100
    paths.metrics_jsonl.write_text("")
    write(range(1, 3))
    assert [line["step"] for line in sample.read().lines] == [1, 1, 2, 2]
