"""`scripts/bench gpu` around its parts: refusal without a card, limits, what is kept of a part that does not end well. On the CPU its parts run at all."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks import gpu
from benchmarks.gpu_parts import catalogue, divided, home, law, material, memory, nccl, ranks, runner, shards, smi, speed, stages
from benchmarks.gpu_parts.catalogue import PARTS, Part
from benchmarks.gpu_parts.environment import python_path
from benchmarks.gpu_parts.place import Place
from benchmarks.gpu_parts.runner import Outcome, run

from homelab.shared.law.pipeline_schedule import most_in_flight
from homelab.worker.runtime.task import Task, load_task
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


def test_without_a_card_it_refuses_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
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


def test_one_attempt_that_fails_is_told_and_the_part_goes_on(parts: Any, tmp_path: Path) -> None:
    parts(fake("stumbling"))
    code, document = bench(tmp_path)
    assert code == 1 and document["parts"]["stumbling"]["state"] == "done"
    assert document["gates"] == {"stumbling.the first ran": False, "stumbling.holds": True} and document["figures"]["stumbling.second"] == 2
    (problem,) = [line["problem"] for line in document["runs"] if line["what"] == "the first"]
    assert [line["text"] for line in document["runs"] if line["what"] == "output"] == ["the part stumbles\n"]
    assert problem.startswith("RuntimeError: aaa") and problem.endswith("a and fell") and len(problem) < 700


def test_a_part_finds_carried_packages_and_one_card_and_stays_in_the_session(
    parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "carried_package.py").write_text("VALUE = 7\n")
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    parts(fake("carried"))
    file = tmp_path / "not" / "there" / "gpu.json"
    assert gpu.main(["--json", str(file), "--folder", str(tmp_path / "new")]) == 0
    environment = next(line for line in json.loads(file.read_text())["runs"] if line["what"] == "environment")
    assert (environment["value"], environment["cards"], environment["session"]) == (7, "3", os.getsid(0))


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
    texts = {line["what"]: line.get("text") for line in outcome.runs}
    assert texts["output"] == "the part waits\n" and texts["output of run/rank-0.txt"] == "the rank waits"
    assert not (tmp_path / "stuck").exists(), "its files stay"
    (child,) = [line["pid"] for line in outcome.runs if line["what"] == "child"]
    harness.wait_for(lambda: not is_running(child), timeout_s=10)


@pytest.mark.timeout(60)
def test_a_benchmark_that_is_ended_ends_its_part_and_leaves_no_files(tmp_path: Path) -> None:
    def has_a_part() -> bool:
        for file in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # a process that has just ended
                if b"gpu_parts.place" in (command := file.read_bytes()) and os.fsencode(tmp_path) in command:
                    return True
        return False

    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--only", "clock", "--folder", str(tmp_path)]
    bench_process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": python_path()})
    harness.wait_for(has_a_part, timeout_s=20)
    bench_process.terminate()
    assert bench_process.wait(20) == 143
    harness.wait_for(lambda: not has_a_part(), timeout_s=10)
    assert not list(tmp_path.iterdir())


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


def place_on_a_card(tmp_path: Path) -> tuple[Place, Path]:
    """For what is only written and reckoned there."""
    return Place(tmp_path, "cuda", tmp_path / "told.jsonl"), tmp_path / "told.jsonl"


def told(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_without_the_planner_its_variables_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, file = place_on_a_card(tmp_path)
    checks = [name for name, _ in nccl._checks(place, "nccl")]
    assert (
        checks.index("start, as it is")
        < checks.index("SIGKILL, the plan's")
        < checks.index("interface =lo")
        < checks.index("SIGKILL, torch's defaults")
    )
    assert len(set(checks)) == len(checks) and checks[-1] == "subgroup" and not file.exists()
    monkeypatch.setattr(nccl, "planned", dict)
    checks = [name for name, _ in nccl._checks(place, "nccl")]
    assert not any("the plan's" in name for name in checks) and {"SIGKILL, short dump", "SIGSTOP, torch's defaults"} <= set(checks)
    assert "left out" in told(file)[0]["run"]["problem"]


def test_without_the_recipes_module_the_loss_is_that_of_a_recipe_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = speed.default_fused_loss()
    monkeypatch.setitem(sys.modules, "homelab.controller.config.recipe", None)
    assert speed.default_fused_loss() == usual == "auto"


def task_of(run_folder: Path, rank: int = 0, size: int = 1) -> Task:
    environment = {
        "HOMELAB_RUN_DIR": str(run_folder),
        "HOMELAB_ATTEMPT": "1",
        "HOMELAB_NODE": f"n{rank}",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
    }
    return load_task(environment)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", speed.MODELS, ids=lambda kind: kind.shape)
def test_a_step_of_the_speed_part_is_several_passes(kind: speed.Kind, padded: bool, tmp_path: Path) -> None:
    place, _ = place_on_a_card(tmp_path)
    balance = task_of(speed.prepare(place, kind, "plain", {}, {})).balance()
    if not padded:
        balance.join_rows()
    lengths = [len(row["prompt"]) + len(row["completion"]) for row in map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())]
    for first in range(0, len(lengths), kind.batch):
        passes = balance.passes_of(lengths[first : first + kind.batch], 0)
        assert len(passes) >= 4 and max(map(len, passes)) <= kind.rows
    packed = task_of(speed.prepare(place, kind, "packed", speed.RECIPES["packed"], {})).balance()
    assert [len(cut) for cut in packed.passes_of([kind.longest] * 4, 0)] == [1] * 4


def run_of(tmp_path: Path) -> Path:
    return material.run(tmp_path / "run", tmp_path / "model", material.rows(tmp_path / "rows.jsonl", [20] * 24))


def test_ranks_of_one_card_are_stages_or_several_of_a_node(tmp_path: Path) -> None:
    run_folder = run_of(tmp_path)
    material.plan(run_folder, 1, (12, 0, 0), device="cpu", precision="fp32", strategy="pipeline", stages=stages.cut(8, 3))
    found = [task_of(material.folder_of(run_folder, rank), rank, 3).stage for rank in range(3)]
    assert [(stage.begin, stage.end, stage.layers, stage.in_flight) for stage in found if stage] == [
        (0, 3, 8, most_in_flight(0, 3)),
        (3, 6, 8, most_in_flight(1, 3)),
        (6, 8, 8, 1),
    ]
    material.plan(run_folder, 2, (3, 3, 3, 3), device="cpu", precision="fp32", strategy="hsdp", per_node=2)
    (tmp_path / "run on n3" / "attempts" / "1").mkdir(exist_ok=True)
    environment = {
        "HOMELAB_RUN_DIR": str(tmp_path / "run on n3"),
        "HOMELAB_ATTEMPT": "2",
        "HOMELAB_NODE": "n1",
        "RANK": "3",
        "WORLD_SIZE": "4",
    }
    assert load_task(environment).nodes == ("n0", "n0", "n1", "n1")


def test_a_training_that_lacks_steps_agrees_with_nothing() -> None:
    assert divided.apart({1: 2.0, 2: 1.1}, {1: 2.0, 2: 1.0}) == pytest.approx(0.1)
    for found in ({}, {1: 2.0, 3: 1.0}):
        with pytest.raises(RuntimeError, match="were expected"):
            divided.apart(found, {1: 2.0, 2: 1.0})


def test_a_division_that_fails_tells_the_words_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are what the diagnosis gets its rules from. No rank is started here."""
    file = tmp_path / "rank-1.txt"
    file.write_text("Traceback\ntorch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB\n")
    asked: list[tuple[Any, ...]] = []

    def worker(*arguments: Any) -> list[ranks.Rank]:
        asked.append(arguments)
        return [ranks.Rank(subprocess.Popen(["true"]), tmp_path / "rank-0.txt"), ranks.Rank(subprocess.Popen(["false"]), file)]

    monkeypatch.setattr(ranks, "worker", worker)
    place, told_file = place_on_a_card(tmp_path)
    data = material.rows(tmp_path / "rows.jsonl", [20] * 24)
    with place.attempt("zero2"):
        divided.train(
            place,
            divided.Division("zero2", "zero2", (8, 4), environment={"PYTORCH_ALLOC_CONF": "x"}),
            tmp_path / "model",
            data,
            "bf16",
            limit_s=30,
        )
    (problem,) = [line["run"]["problem"] for line in told(told_file) if "run" in line]
    assert "CUDA out of memory" in problem and {"gate": "zero2 ran", "holds": False} in told(told_file)
    run_folder, attempt, size, variables, program, per_node = asked[0]
    assert (attempt, size, variables, program, per_node) == (1, 2, {"PYTORCH_ALLOC_CONF": "x"}, divided.WATCHED, 1)
    plan = json.loads((run_folder / "attempts" / "1" / "plan.json").read_text())
    assert (plan["backend"], plan["strategy"], plan["device"]) == ("nccl", "zero2", "cuda"), "gloo carries nothing that a card holds"


def test_a_torch_that_cannot_shard_begins_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not shards.is_too_old()
    monkeypatch.setattr(shards, "is_too_old", lambda: True)
    place, file = place_on_a_card(tmp_path)
    shards.measure(place)
    assert told(file)[-1] == {"gate": "torch_shards", "holds": False} and len(told(file)) == 2 and not (tmp_path / "model").exists()


def test_what_a_person_types_is_kept_and_ended_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "told.jsonl"
    typing = home.Home.of(Place(tmp_path, "cpu", file))
    said = typing.type("explain", "hang", limit_s=30)
    assert said.code == 0 and said.output and not said.has_traceback
    assert (typing.folder / "0-explain.txt").read_text().startswith("$ homelab explain hang\n")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "program"))
    (tmp_path / "program").write_text("#!/bin/sh\ntrap 'echo interrupted; exit 130' INT\necho begun\nwhile :; do sleep 0.1; done\n")
    (tmp_path / "program").chmod(0o755)
    late = typing.type("launch", limit_s=0.5)
    assert (late.code, late.output) == (124, "begun\ninterrupted\n")
    assert [line["run"]["code"] for line in told(file)] == [0, 124]


@pytest.mark.parametrize("passes", [1, 3])
def test_the_second_gradient_is_seen_in_passes_of_one_size(passes: int, tmp_path: Path) -> None:
    run_folder = memory.second_gradient_run(tmp_path, tmp_path / "model", passes, "cpu")
    for rank in (0, 1):
        folder = run_folder if rank == 0 else tmp_path / f"{run_folder.name} on n1"
        balance = task_of(folder, rank, 2).balance()
        balance.join_rows()
        assert [len(cut) for cut in balance.passes_of([128] * balance.shares[rank], rank)] == [2] * passes


def test_steps_run_side_by_side_as_far_as_the_card_has_room() -> None:
    gb = 10**9
    assert not memory.must_wait([], 200 * gb, 80 * gb), "what is too large is tried alone"
    assert not memory.must_wait([20 * gb] * 2, 20 * gb, 80 * gb) and memory.must_wait([20 * gb] * 3, 20 * gb, 80 * gb)
    assert not memory.must_wait([gb] * 3, gb, 80 * gb) and memory.must_wait([gb] * 4, gb, 80 * gb)


def test_a_group_of_the_law_is_told_though_one_of_its_cases_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def result(run_folder: Path, size: int, steps: int) -> dict[str, Any]:
        if run_folder.name.endswith("8+4"):
            raise RuntimeError("no result")
        return {
            "losses": [2.0 if run_folder.name.endswith("again") else 1.0],
            "skipped": [],
            "weights": {"w": torch.ones(1)},
            "samples": [],
            "seconds": 1.0,
        }

    torch = pytest.importorskip("torch")
    monkeypatch.setattr(material, "model", lambda folder, *_: folder)
    monkeypatch.setattr(ranks, "worker", lambda *_: [])
    monkeypatch.setattr(law, "_result", result)
    file = tmp_path / "told.jsonl"
    law.measure(Place(tmp_path, "cpu", file))
    lines = told(file)
    compared = [line["run"]["what"] for line in lines if "loss_apart" in line.get("run", {})]
    assert compared == ["again", "padded", "lora, fused loss"]
    assert {line["gate"]: line["holds"] for line in lines if "gate" in line} == {"fp32, 8+4 ran": False, "fp32_losses_agree": True}
    assert {line["figure"]: line["value"] for line in lines if "figure" in line}["fp32_loss_noise"] == 1.0
    assert next(line["run"]["one_kernel"] for line in lines if line.get("run", {}).get("what") == "attention") is False
    assert not list(tmp_path.glob("fp32, again*")) and (tmp_path / "fp32, 8+4").exists(), "what a failed case said is kept for the report"


def test_nvidia_smi_that_hangs_or_fails_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    program.write_text("#!/bin/sh\necho '12, 3 MiB'\necho '345, 67 MiB'\n")
    program.chmod(0o755)
    assert smi.held_bytes([345, 6]) == [67 * 2**20] and smi.cards()
    with pytest.raises(RuntimeError, match="card GPU-1"):
        smi.used_bytes("GPU-1")
    program.write_text("#!/bin/sh\ntest \"$2\" = --id=3 && echo '812 MiB'\n")
    assert smi.used_bytes("3") == 812 * 2**20
    monkeypatch.setattr(smi, "_LIMIT_S", 0.2)
    program.write_text("#!/bin/sh\nexec sleep 5\n")
    assert smi.held_bytes([345]) == [] and smi.cards() == ""
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert smi.cards() == ""


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
