"""`scripts/bench gpu` around its parts: refusal without a card, limits, what is kept of a part that does not end well. On the CPU its parts run at all."""

from __future__ import annotations

import ast
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gpu
from benchmarks.gpu_parts import catalogue, nccl, runner
from benchmarks.gpu_parts.catalogue import PARTS, Part
from benchmarks.gpu_parts.runner import Outcome, run

from tests.worker import harness

FOLDER = Path(catalogue.__file__).parent


class Fake(Part):
    @property
    def module(self) -> str:
        return "tests.benchmarks.gpu_part"


def fake(name: str, least_s: int = 0, limit_s: int = 30) -> Fake:
    return Fake(name, f"a part that is {name}", least_s, limit_s)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    def these(*names: Part) -> None:
        monkeypatch.setattr(gpu, "PARTS", names)
        monkeypatch.setattr(gpu, "sees_a_card", lambda: True)

    return these


def bench(tmp_path: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = gpu.main(["--json", str(tmp_path / "gpu.json"), "--folder", str(tmp_path), *arguments])
    assert not list(tmp_path.glob("homelab-bench-gpu-*")), "its folder is left behind"
    return code, json.loads((tmp_path / "gpu.json").read_text())


def test_without_a_card_it_refuses_in_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "sees_a_card", lambda: False)
    assert gpu.main(["--json", str(tmp_path / "gpu.json")]) == 2 and not (tmp_path / "gpu.json").exists()
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("error: torch sees no CUDA card") and said[1].startswith("fix: ") and len(said) == 2


def test_what_parts_tell_is_in_the_file(parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts(fake("good"))
    code, document = bench(tmp_path)
    assert code == 0 and document["parts"]["good"]["state"] == "done"
    assert document["figures"] == {"good.answer": 42} and document["gates"] == {"good.holds": True}
    assert document["runs"] == [{"part": "good", "what": "seen", "device": "cuda", "is_card": True}]
    assert document["machine"]["packages"]["torch"] and "answer" in capsys.readouterr().out


def test_a_part_that_fails_keeps_what_it_told_and_the_next_one_begins(parts: Any, tmp_path: Path) -> None:
    parts(fake("broken"), fake("missed"), fake("good"))
    code, document = bench(tmp_path)
    assert code == 1 and [part["state"] for part in document["parts"].values()] == ["failed", "done", "done"]
    assert document["parts"]["broken"]["problem"] == "RuntimeError: the card fell off"
    assert document["figures"]["broken.answer"] == 42 and document["gates"] == {"missed.holds": False, "good.holds": True}
    assert "Traceback" in next(line["text"] for line in document["runs"] if line["what"] == "output")


def test_a_gate_that_does_not_hold_is_told_by_the_exit_code(parts: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts(fake("missed"))
    assert bench(tmp_path)[0] == 1 and "missed: missed.holds" in capsys.readouterr().out


def test_only_what_is_asked_for_and_only_what_fits(parts: Any, tmp_path: Path) -> None:
    parts(fake("good"), fake("missed"), fake("long", least_s=3600))
    code, document = bench(tmp_path, "--only", "good", "--only", "long", "--limit", "100")
    assert code == 0 and list(document["parts"]) == ["good", "long"]
    assert document["parts"]["long"]["state"] == "not begun" and "wants 3600 s" in document["parts"]["long"]["problem"]


@pytest.mark.timeout(60)
def test_at_its_limit_a_part_is_ended_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner, "_KEEP_S", 0.3)
    outcome, kept = Outcome(), []
    began = time.monotonic()
    run(fake("stuck"), outcome, tmp_path, "cuda", 1.5, lambda: kept.append(dict(outcome.figures)))
    assert time.monotonic() - began < 10 and outcome.state == "out of time" and outcome.figures == {"answer": 42}
    assert kept.count({"answer": 42}) > 1, "it is kept while the part runs"
    (child,) = [line["pid"] for line in outcome.runs if line["what"] == "child"]
    harness.wait_for(lambda: not is_running(child), timeout_s=10)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_every_part_is_there_and_limits_are_limits() -> None:
    for part in PARTS:
        tree = ast.parse((FOLDER / f"{part.name}.py").read_text(encoding="utf-8"))
        assert "measure" in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, part.name
        assert 0 < part.least_s < part.limit_s
    assert sum(part.limit_s for part in PARTS[:2]) <= 600, "the two most telling parts fit into one call of ten minutes"


def test_the_plans_own_variables_are_measured() -> None:
    assert nccl.planned().keys() & {"NCCL_SOCKET_IFNAME"}


@pytest.mark.timeout(100)
def test_a_part_really_runs_on_the_cpu(tmp_path: Path) -> None:
    """Its figures mean nothing there."""
    code, document = bench(tmp_path, "--device", "cpu", "--only", "norm")
    assert code == 0, document
    assert document["figures"]["norm.norm_float64_distinct"] == 1 and document["gates"]["norm.float64_norms_are_the_same_bits"]


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", [part.name for part in PARTS])
def test_all_parts_run_on_the_cpu(name: str, tmp_path: Path) -> None:
    code, document = bench(tmp_path, "--device", "cpu", "--only", name)
    assert code == 0, document
    assert document["parts"][name]["state"] == "done" and document["runs"]


@pytest.mark.thorough
def test_the_real_question_for_a_card() -> None:
    assert gpu.sees_a_card() is Path("/dev/nvidia0").exists()
