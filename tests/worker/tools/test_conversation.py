"""A conversation with a run's model: answers in pieces, the base without its adapter, an answer that is stopped. The real program, the small model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from homelab.worker.model.build import load_model
from homelab.worker.tools import run_model
from tests.worker import harness

pytestmark = pytest.mark.timeout(120)


class Program:
    """The program as the node starts it."""

    def __init__(self, run_dir: Path, *models: str, silent_s: float | None = None) -> None:
        request = json.dumps({"run_dir": str(run_dir), "models": models, "silent_s": silent_s})
        self.process = subprocess.Popen(
            [sys.executable, "-m", "homelab.worker.tools.conversation", request], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip

    def write(self, message: dict[str, Any]) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self.process.stdout
        message: dict[str, Any] = json.loads(self.process.stdout.readline())
        return message

    def ask(self, text: str, model: str = "trained", most: int = 12) -> tuple[str, dict[str, Any]]:
        self.write({"messages": [{"role": "user", "content": text}], "model": model, "max_new_tokens": most})
        pieces = []
        while "piece" in (message := self.read()):
            pieces.append(message["piece"])
        return "".join(pieces), message


@pytest.fixture
def run_dir(tmp_path: Path, model: Path, data: Path) -> Path:
    """Of a run whose adapter does something."""
    folder = harness.make_run(tmp_path / "run", model, data, method__kind="lora")
    harness.make_plan(folder, 1, [12])
    built = load_model(run_model.task_of(run_model.read_run(folder), folder), str(model), lambda note: None)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in built.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    built.save_pretrained(folder / "final", save_embedding_layers=False)
    return folder


@pytest.fixture
def program(run_dir: Path) -> Iterator[Program]:
    started = Program(run_dir, "trained", "base")
    try:
        yield started
    finally:
        started.process.kill()
        started.process.wait()


def test_questions_are_answered_until_nobody_asks(program: Program) -> None:
    assert re.fullmatch(r"it needs about 0\.\d\d GB; RAM has \d+\.\d\d GB free", program.read()["loading"])
    assert "ready" in program.read()
    answers = {name: program.ask("hello", name) for name in ("trained", "base")}
    assert all(
        end == {"end": {"tokens": end["end"]["tokens"], "stopped": False}} and 0 < end["end"]["tokens"] <= 12 for _, end in answers.values()
    )
    assert answers["trained"][0] != answers["base"][0] and program.ask("hello") == answers["trained"]
    error = program.ask("hello " * 5000)[1]["error"]
    assert "the conversation has" in error["message"] and "/new" in error["hint"]
    assert program.ask("hello", "base") == answers["base"], "the conversation goes on after an error"
    program.write({"messages": [{"role": "user", "content": "hello"}], "model": "base", "max_new_tokens": 100_000})
    program.write({"stop": True})
    while "piece" in (message := program.read()):
        pass
    assert message["end"]["stopped"]
    assert program.ask("hello") == answers["trained"], "and after a stop"
    assert program.process.stdin
    program.process.stdin.close()
    assert program.process.wait(30) == 0


def test_who_leaves_while_it_loads_or_asks_no_more_does_not_leave_it_behind(run_dir: Path) -> None:
    program = Program(run_dir, "trained")
    assert "loading" in program.read() and program.process.stdin
    program.process.stdin.close()
    assert program.process.wait(30) == 0
    forgotten = Program(run_dir, "trained", silent_s=0.5)
    assert "loading" in forgotten.read() and "ready" in forgotten.read()
    assert forgotten.process.wait(30) == 0, "although its stdin is open"


def test_without_a_model_it_says_so_and_ends(tmp_path: Path, model: Path, data: Path) -> None:
    folder = harness.make_run(tmp_path / "run", model, data, method__kind="lora")
    harness.make_plan(folder, 1, [12])
    program = Program(folder, "trained")
    assert "no checkpoint yet" in program.read()["error"]["message"]
    assert program.process.wait(30) == 1
