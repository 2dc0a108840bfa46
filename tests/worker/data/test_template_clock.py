"""Whatever clock or chance a chat template reaches: the rows are the same on every node, at every time, in every attempt."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from homelab.worker.data import row_agreement, template_clock
from homelab.worker.data.encoding import load_data
from homelab.worker.errors import WorkerError
from homelab.worker.model.pretrained import load_tokenizer
from homelab.worker.tools import data_sample
from scripts.practice.tiny_model import CHAT_TEMPLATE
from tests.worker import harness

MOMENT = "2026-11-25T23:30:05+00:00"
WRITTEN = {
    "date": ('{{ strftime_now("%d %b %Y") }}', "25 Nov 2026"),
    "if-defined": ('{% if strftime_now is defined %}{{ strftime_now("%B %Y") }}{% endif %}', "November 2026"),
    "second": ('{{ strftime_now("%Y-%m-%d %H:%M:%S %j") }}', "2026-11-25 23:30:05 329"),
    "epoch": ('{{ strftime_now("%s %%s") }}', "1795649405 %s"),
    "zone": ('{{ strftime_now("[%z%Z]") }}', "[]"),
    "macro": ('{% macro today() %}{{ strftime_now("%x") }}{% endmacro %}{{ today() }}', "11/25/26"),
    "by-name": ('{% set clock = strftime_now %}{{ clock("%A") }}', "Wednesday"),
    "random": ('{{ range(90000) | random }}', None),
    "lipsum": ("{{ lipsum(n=1, html=false, min=2, max=4) }}", None),
}  # fmt: skip


@pytest.fixture
def zones() -> Iterator[None]:
    before = os.environ.get("TZ")
    yield
    os.environ.pop("TZ", None) if before is None else os.environ.update(TZ=before)
    time.tzset()


def rows_of(folder: Path, run: Path, zone: str, seed: int) -> tuple[dict, list[str]]:
    """(digests of the rows, dates that the template has written) as a node in this time zone makes them; `seed`: of what drew before."""
    os.environ["TZ"] = zone
    time.tzset()
    random.seed(seed)
    tokenizer = load_tokenizer(json.loads((run / "run.json").read_text()), str(folder))
    return row_agreement.of(load_data(json.loads((run / "run.json").read_text()), tokenizer)), tokenizer.written_dates


@pytest.mark.parametrize("kind", WRITTEN)
def test_rows_do_not_depend_on_the_node_or_the_day(zones: None, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    written, expected = WRITTEN[kind]
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    (folder / "chat_template.jinja").write_text(written + CHAT_TEMPLATE)
    run = harness.make_run(tmp_path / "run", folder, harness.write_jsonl(tmp_path / "d.jsonl", harness.chat_rows(3)))
    described = json.loads((run / "run.json").read_text()) | {"moment": MOMENT}
    (run / "run.json").write_text(json.dumps(described))

    first, dates = rows_of(folder, run, "Pacific/Kiritimati", seed=1)
    later = type("Later", (datetime,), {"now": classmethod(lambda cls, tz=None: datetime(2031, 1, 2, 3, 4, 5, tzinfo=tz))})
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", later)  # the day after, on another node

    assert rows_of(folder, run, "America/Los_Angeles", seed=2) == (first, dates)
    if expected is not None:
        assert dates == [expected]
        tokenizer = load_tokenizer(described, str(folder))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False).startswith(expected)
        load_data(described, tokenizer)
        assert repr(dates[0]) in str(template_clock.note_of(tokenizer)) and str(template_clock.note_of(tokenizer)).startswith("law: ")
        assert expected in data_sample.load(str(folder), None, MOMENT).apply_chat_template(
            [{"role": "user", "content": "a"}], tokenize=False
        )


def test_a_template_without_a_clock_needs_no_line(model: Path):
    tokenizer = load_tokenizer({"recipe": {"model": {"name": str(model)}}, "moment": MOMENT}, str(model))
    tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)

    assert template_clock.note_of(tokenizer) is None


def test_rendering_leaves_the_stream_of_others_alone(model: Path):
    tokenizer = load_tokenizer({"recipe": {"model": {"name": str(model)}}, "moment": MOMENT}, str(model))
    random.seed(3)
    expected = random.random()
    random.seed(3)
    tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)

    assert random.random() == expected


def test_a_transformers_with_another_clock_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch):
    from transformers.utils import chat_template_utils

    plain = chat_template_utils.render_jinja_template

    def render(*arguments, **options):  # as a version would that asks the clock elsewhere
        texts, marks = plain(*arguments, **options)
        return [text.replace("2026", "1999") for text in texts], marks

    monkeypatch.setattr("transformers.tokenization_utils_base.render_jinja_template", render)
    with pytest.raises(WorkerError, match="this node's clock"):
        load_tokenizer({"recipe": {"model": {"name": str(model)}}, "moment": MOMENT}, str(model))


@pytest.mark.parametrize("moment", ["yesterday", 7, "", ["2026"], None])
def test_a_moment_that_is_none_is_refused(moment: object):
    with pytest.raises(WorkerError, match="when the run was launched"):
        template_clock.moment_of({"moment": moment})
