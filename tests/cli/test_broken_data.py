"""A broken line in the training data: the worker's own words reach `status`, `logs` and the exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from homelab.lab import Lab
from scripts.practice.desk import Desk
from tests.cli.conftest import LAW, complaint
from tests.worker import harness

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture(scope="module")
def model(cli_lab: Lab) -> Path:
    """Below the lab's folder, which the nodes see."""
    return harness.tiny_llama(cli_lab.folder / "tiny-llama")


@pytest.mark.parametrize(
    ("line", "words"), [('{"messages": [{"role": "user", "con', "line 3"), ("\xff", "not UTF-8")], ids=["cut short", "not UTF-8"]
)
def test_a_broken_line(desk: Desk, model: Path, line: str, words: str) -> None:
    good = [json.dumps(row) for row in harness.chat_rows(20)]
    (desk.folder / "chats.jsonl").write_text("\n".join([*good[:2], line, *good[2:]]) + "\n", encoding="latin-1")
    desk.write("broken.toml", LAW.replace("/nowhere/model", str(model)))
    refused = desk.homelab("launch", "broken.toml", code=1, timeout_s=120)
    assert words in refused.stderr and "data.parses" in refused.stderr, "the look before the launch finds it too, in the same words"
    desk.homelab("launch", "broken.toml", "--wait", "--skip", "data.parses", code=1, timeout_s=120)
    seen = desk.json("status", code=1)
    assert seen["state"] == "failed"
    said = json.dumps(seen["diagnosis"], ensure_ascii=False)
    assert words in said and "chats.jsonl" in said, said
    shown = desk.homelab("status", "--once", code=1).stdout
    assert "Traceback" not in shown and seen["diagnosis"]["title"] in " ".join(shown.split()), shown
    assert desk.json("stop")["clean"]
    if line == "\xff":
        return  # asking the model takes its time: once is enough
    error = complaint(desk, "chat", "--prompt", 'it\'s "$(touch pwned)" `touch pwned`\nwho is ä \\ ?', code=1, as_json=False, timeout_s=120)
    assert "no checkpoint" in error["message"] and error["hint"], error
