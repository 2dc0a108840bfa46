"""The report of a run: steps that were done again count once, hostile names are harmless, and a browser opens it without a request."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import time
from html import escape
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.facts.reading import read
from homelab.controller.features.profile.rank_profile import RankProfile
from homelab.controller.features.report import page, report_builder, sections
from homelab.controller.features.report.downsampling import thinned
from homelab.controller.features.report.page_tables import Markup, ReportTable
from homelab.controller.features.report.report_builder import Asked, RunAbout, Sources
from homelab.controller.features.report.run_report import CurvePoint
from homelab.controller.run.events import Event, event, given_back, resumed
from homelab.shared.protocol.rank_messages import Metric
from homelab.shared.protocol.run_messages import CardJoules
from tests import builders
from tests.controller.dashboard import sample, test_view

EVIL = "<script>alert(1)</script>"


def train(step: int, attempt: int = 1, rank: int = 0, **more: Any) -> Metric:
    return read(Metric, {
        "kind": "train", "step": step, "rank": rank, "attempt": attempt, "node": EVIL, "time": 1000.0 + step, "loss": 3.0 - step / 1e6, "tokens": 100,
        "tokens_per_s": 50.0, "compute_s": 1.0, "communication_s": 0.1, "step_s": 1.1, "learning_rate": 1e-4, "memory_bytes": 1 << 30, **more,
    })  # fmt: skip


def sources(steps: int = 20, **more: Any) -> Sources:
    lines = [train(step, rank=rank) for step in range(1, steps + 1) for rank in (0, 1)]
    happened = [{"kind": "trouble", "text": EVIL, "time": 1010.0}]
    told: dict[str, Any] = {
        "run": EVIL, "state": "done", "now": 2000.0, "about": RunAbout(recipe_file=EVIL, homelab="0.1", created_at=990.0), "plans": {1: sample.plan()},
        "metrics": lines, "events": happened, "asked": [Asked(prompt=EVIL, base=True, answer="a"), Asked(prompt=EVIL, answer=EVIL)],
    }  # fmt: skip
    return Sources(**{**told, **more})


def test_hostile_names_are_text() -> None:
    html = page.render(report_builder.build(sources()))
    assert EVIL not in html and "&lt;script&gt;" in html and html.count("<script") == 2
    assert "default-src 'none'" in html and not re.search(r"(?:src|href)=\"?(?:https?:|//)", html)
    data = json.loads(html.partition('id="points">')[2].partition("</script>")[0])
    assert len(data) == 4


def test_a_profile_has_its_section() -> None:
    operator = {
        "name": f"aten::{EVIL}",
        "calls": 3,
        "self_s": 1.5,
        "device_s": 0,
        "share": 0.75,
        "places": [{"module": "model.mlp", "class": EVIL, "share": 1.0}],
    }
    exchange = {
        "name": "bucket 0",
        "kind": "all-reduce",
        "calls": 1,
        "payload_bytes": 9,
        "sent_bytes": 4_000_000,
        "seconds": 0.5,
        "overlap_s": 0.1,
    }
    profile = RankProfile.model_validate({
        "rank": 0, "node": EVIL, "attempt": 1, "device": "cpu", "strategy": "ddp", "world_size": 2, "torch": "2", "steps": [8, 9], "step_s": [1.0, 1.0],
        "operators": [operator], "exchanges": [exchange], "memory": {"points": [], "peak_bytes": 3 << 30},
    })  # fmt: skip
    html = page.render(report_builder.build(sources(profiles=[profile])))
    assert 'id="profile"' in html and EVIL not in html and "75.0%" in html and "it sends 2.000 MB" in html and "3.00 GiB" in html
    assert 'id="profile"' not in page.render(report_builder.build(sources()))


def test_a_step_that_was_done_again_counts_once() -> None:
    plan = sources().plans[1]
    again = plan.model_copy(update={"attempt": 2, "resume_step": 10})
    lines = [train(step) for step in range(1, 16)] + [train(step, attempt=2, loss=9.0) for step in range(11, 21)]
    report = report_builder.build(sources(metrics=lines, plans={1: plan, 2: again}))
    assert report.step_count == 20 and [row.attempt for row in report.steps if row.step in (10, 11)] == [1, 2]
    assert report.shares[0].tokens == 2000 and report.answers[0].before == "a" and report.answers[0].after == EVIL
    assert report.energy.kwh is None, "unknown is not 0"


@pytest.mark.parametrize("loss", [1.7e308, -1.7e308, float("inf"), float("nan")])
def test_a_loss_beyond_all_scales_is_in_no_picture_and_said(loss: float) -> None:
    """A training that diverges, or a node that lies."""
    built = report_builder.build(dataclasses.replace(sources(), metrics=[*sources().metrics, train(21, loss=loss), train(22, loss=1.0)]))
    text = page.render(built)
    assert "not a number in 1 steps, first in step 21" in text and "</svg>" in text


def test_each_machine_has_its_own_work_when_the_ranks_are_numbered_anew() -> None:
    """The first plan's rank 0 leaves: rank 1 is rank 0 from then on."""
    tower, laptop = builders.rank_plan(0, "tower", card="GPU-t"), builders.rank_plan(1, "laptop", card="GPU-l")
    plans = {
        1: builders.plan([tower, laptop]),
        2: builders.plan([laptop.model_copy(update={"rank": 0})], attempt=2, resume_step=10),
        3: builders.plan([laptop.model_copy(update={"rank": 0}), builders.rank_plan(1, "old")], attempt=3, resume_step=20),
    }
    lines = [train(step, rank=rank, memory_bytes=(3 - rank) << 30) for step in range(1, 11) for rank in (0, 1)]
    lines += [train(step, attempt=2, memory_bytes=2 << 30) for step in range(11, 21)]
    report = report_builder.build(sources(metrics=lines, plans=plans))
    assert [(row.rank, row.node, row.tokens) for row in report.shares] == [(0, "laptop", 2000), (1, "old", None), (None, "tower", 1000)]
    assert [row.memory_bytes for row in report.shares] == [2 << 30, None, 3 << 30] and report.shares[2].device == "RTX 3070 Ti"
    memory = next(curve for curve in report.curves if curve.name == "Memory")
    assert [(one.label, len(one.points)) for one in memory.series] == [("rank 0 on laptop", 20), ("rank 0 on tower, earlier", 10)]
    assert any(said.startswith("no step of rank 1 is here") for said in report.missing) and "tower" in page.render(report)


DAY_S = 86400.0


def told(*events: tuple[float, Event]) -> list[dict[str, Any]]:
    return [{**event.line(), "time": time} for time, event in events]


def test_a_run_that_goes_on_lasts_until_its_newest_line() -> None:
    plan = sources().plans[1]
    plans = {1: plan, 2: plan.model_copy(update={"attempt": 2, "resume_step": 10})}
    lines = [train(10), train(5000, attempt=2, time=1000.0 + 2 * DAY_S)]
    happened = told(
        (1000.0, event("attempt-started", 1)), (1600.0, event("trouble", 1, because="killed")), (1700.0, resumed(2, 10, is_program=False))
    )
    report = report_builder.build(sources(state="running", metrics=lines, plans=plans, events=happened))
    assert {row.what: row.happened for row in report.compared}["duration"] == "2 d 0 h" and report.attempts[0].ended_at == 1600.0


@pytest.mark.parametrize("fails", [False, True])
def test_a_leave_ends_with_the_stop_of_the_run(fails: bool) -> None:
    happened = told(
        (1000.0, event("attempt-started", 1)), (1300.0, given_back(1, "tower", "")), *([(1400.0, event("trouble", 1, because="killed"))] if fails else []),
        (1500.0, event("stopped", 1, clean=False)), (1600.0, event("stopped", 1, clean=True)), (1000.0 + DAY_S, event("stopped", 1, clean=True)),
    )  # fmt: skip
    report = report_builder.build(sources(state="stopped", events=happened, now=1000.0 + 9 * DAY_S))
    assert report.attempts[0].ended_at == (1400.0 if fails else 1600.0) and report.given_back[0].seconds == 300.0


def test_what_is_missing_is_said() -> None:
    report = report_builder.build(sources(metrics=[], plans={}, asked=[]))
    assert len(report.missing) == 2 and "no plan" in report.missing[0] and "no step was recorded" in report.missing[1]
    html = page.render(report)
    assert escape(report.missing[0]) in html and 'id="plan"' not in html and 'id="shares"' not in html, "what is not known has no section"


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "The run is done: 20 steps in 19 s, last loss 3.000."),
        ({"state": "running"}, "The run trains: 20 steps in 19 s, last loss 3.000."),
        ({"state": "starting", "metrics": [], "plans": {}}, "The run is starting."),
        (
            {"state": "failed", "diagnoses": {1: test_view.WHY}},
            "The run failed: the disk of laptop is full, 20 steps in 19 s, last loss 3.000.",
        ),
    ],
)
def test_the_first_line_is_the_answer(told: dict[str, Any], said: str) -> None:
    report = report_builder.build(sources(**told))
    assert sections.answer(report) == said
    assert f'</h1><p class="answer">{said}</p>' in page.render(report)


def test_no_section_is_empty() -> None:
    """Nothing is known of the energy of processors, of a plan without a time, of a node without versions."""
    report = report_builder.build(sources())
    html = page.render(report)
    assert "the energy of the cards: attempt 1 did not measure it" in report.missing and 'id="energy"' not in html
    plan = next(section for section in sections.sections(report) if section.name == "plan")
    assert [head for head, _ in plan.tables[0].heads] == ["figure", "happened"] and len(plan.tables[0].rows) == len(report.compared) - 1
    cpu = sources().plans[1].model_copy(update={"device": "cpu"})
    assert not any("energy" in line for line in report_builder.build(sources(plans={1: cpu})).missing)
    told = {(1, "tower"): [CardJoules(index=0, joules=3.6e6, measured_s=60.0)]}
    html = page.render(report_builder.build(sources(energy=told)))
    assert 'id="energy"' in html and "1 kWh" in html, "one that tells is enough"


def test_a_table_keeps_what_is_known() -> None:
    table = ReportTable("", [("node", ""), ("a", "n"), ("b", "n")], [("x", "unknown", "1"), ("y", "–", ""), ("z", "", Markup(""))])
    assert table.known() == ReportTable("", [("node", ""), ("b", "n")], [["x", "1"]])
    assert table.known().rows == [["x", "1"]] and not ReportTable("", [("node", ""), ("a", "")], [("x", "unknown")]).known().rows


def test_thinning_keeps_the_extremes() -> None:
    points = [CurvePoint(step=step, value=1.0) for step in range(100_000)]
    high, low = CurvePoint(step=54_321, value=9.0), CurvePoint(step=777, value=-9.0)
    points[54_321], points[777] = high, low
    few = thinned(points, 300)
    assert len(few) < 2000 and high in few and low in few and few[0].step == 0 and few[-1].step == 99_999


@pytest.mark.thorough
@pytest.mark.timeout(120)
@pytest.mark.parametrize("width", [390, 800, 1280])
def test_nothing_is_wider_than_the_screen(tmp_path: Path, width: int) -> None:
    """Chromium, with a script of ours in place of the policy that would forbid it."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no chromium on this machine: apt install chromium")
    plan = sources().plans[1]
    held_out = [
        read(Metric, {"kind": "eval", "step": step, "rank": 0, "attempt": 1, "time": 1000.0 + step, "eval_loss": 2.5}) for step in (1, 9)
    ]
    again = [train(step, attempt=2, rank=rank, learning_rate=1.234e-5) for step in range(11, 21) for rank in (0, 1)]
    lines = [*sources(10).metrics, *held_out, *again]
    plans = {1: plan, 2: plan.model_copy(update={"attempt": 2, "resume_step": 10})}
    html = page.render(report_builder.build(sources(metrics=lines, plans=plans, diagnoses={1: test_view.WHY})))
    measure = (
        "<script>document.title=[document.documentElement,...document.querySelectorAll('.scroll')]"
        ".filter(one=>one.scrollWidth>one.clientWidth+1).map(one=>one.innerText.slice(0,40)+one.scrollWidth+'>'+one.clientWidth).join('|')||'fits'</script></body>"
    )
    framed = tmp_path / "framed.html"  # a window of chromium is at least 500 pixels wide
    (tmp_path / "report.html").write_text(re.sub(r"<meta http-equiv=[^>]*>", "", html).replace("</body>", measure))
    framed.write_text(
        f'<iframe id="f" src="report.html" style="width:{width}px;height:900px;border:0"></iframe>'
        "<script>f.onload=()=>{document.body.dataset.said=f.contentDocument.title}</script>"
    )
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--hide-scrollbars",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    done = subprocess.run([*command, "--dump-dom", framed.as_uri()], capture_output=True, text=True, timeout=100, check=True)
    assert 'data-said="fits"' in done.stdout, re.findall(r'data-said="[^"]*"', done.stdout) or done.stdout[:500]


@pytest.mark.thorough
@pytest.mark.timeout(300)
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_opens_it_without_a_request_or_an_error(tmp_path: Path, width: int) -> None:
    """Chromium, which may look up no name; 100,000 steps within three seconds of the page's own clock."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no chromium on this machine: apt install chromium")
    html = page.render(report_builder.build(sources(metrics=[train(step) for step in range(1, 100_001)])))
    (tmp_path / "report.html").write_text(html)
    log = tmp_path / "net.json"
    began_s = time.monotonic()
    done = subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--no-first-run",
            "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},2000",
            f"--log-net-log={log}", "--dump-dom", (tmp_path / "report.html").as_uri(),
        ],
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    took_s = time.monotonic() - began_s
    assert "CONSOLE" not in done.stderr and "alert(1)</script>" not in done.stdout
    asked = set(
        re.findall(
            r"https?://[^\"\\\s]+", "\n".join(line for line in log.read_text(errors="replace").splitlines() if "report.html" in line)
        )
    )
    assert asked == set()
    assert took_s < 30, "with the browser's own start"
