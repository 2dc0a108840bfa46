"""Whatever a chat template raises, the row that it happened at is named, with an edit: never a traceback of Jinja or Python."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from homelab.worker.data.encoding import load_data
from homelab.worker.errors import WorkerError
from scripts.practice.tiny_model import CHAT_TEMPLATE
from tests.worker import harness

LAST = "{% if messages[0].content == 'boom' %}"
BROKEN = {
    "arithmetic": "{{ 1 // 0 }}",
    "overflow": "{{ 2.0 ** 5000 }}",
    "a range without end": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "a macro that calls itself": "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
    "a type": "{{ 'a' + 1 }}",
    "a call of no function": "{{ messages() }}",
    "an unknown name": "{{ nobody.at_all.here }}",
    "a form of strftime": "{{ '%d' % 'x' }}",
    "a filter over nothing": "{{ messages | map('no_such_filter') | list }}",
    "letters that are none": "{{ ('%c' % 1114112) }}",
    "a private attribute": "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}",
    "an index": "{{ messages[99]['content'].x }}",
    "its own words": "{{ raise_exception('user and assistant must alternate') }}",
    "its own silence": "{{ raise_exception('') }}",
}  # fmt: skip
UNREADABLE = {
    "syntax": "{% for m in messages %}{{ m.content }",
    "a tag of nobody": "{% thinking %}{{ messages[0].content }}{% endthinking %}",
    "a filter of nobody": "{{ messages[0].content | shout_loud }}",
    "nested without end": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "a choice without default": {"tool_use": CHAT_TEMPLATE, "rag": CHAT_TEMPLATE},
}  # fmt: skip


def encoded(tokenizer: Any, template: Any, tmp_path: Path, *, completion_only: bool) -> Any:
    broken = copy.copy(tokenizer)
    broken.chat_template = template
    rows = harness.chat_rows(2) + [{"messages": [{"role": "user", "content": "boom"}, {"role": "assistant", "content": "no"}]}]
    data = harness.write_jsonl(tmp_path / "chats.jsonl", rows)
    run = harness.make_run(tmp_path / "work" / "runs" / "run", tmp_path, data, data__completion_only=completion_only)
    return load_data(json.loads((run / "run.json").read_text()), broken)


@pytest.mark.parametrize("completion_only", [True, False])
@pytest.mark.parametrize("name", BROKEN)
def test_an_error_of_a_template_is_one_of_its_row(name: str, completion_only: bool, tokenizer: Any, tmp_path: Path) -> None:
    template = LAST + BROKEN[name] + "{% endif %}" + CHAT_TEMPLATE

    with pytest.raises(WorkerError) as refused:
        encoded(tokenizer, template, tmp_path, completion_only=completion_only)

    assert "line 3" in refused.value.where and refused.value.hint
    assert ("refuses this row" if name.startswith("its own") else "breaks on this row") in refused.value.message
    assert refused.value.message.rstrip()[-1] != ":"


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_template_that_cannot_be_read_is_no_traceback(name: str, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as refused:
        encoded(tokenizer, UNREADABLE[name], tmp_path, completion_only=True)

    assert "line 1" in refused.value.where and "copy the folder again" in refused.value.hint
