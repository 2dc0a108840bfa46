"""What it takes to add a strategy: one class and its registration. Planned and printed by the real command line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from homelab.cli.main import run
from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.planning.machines import machines
from homelab.controller.planning.strategy import registry
from homelab.controller.planning.strategy.base import Assignment, Strategy
from homelab.controller.planning.types import Choice, RankPlan
from homelab.controller.planning.work import job as jobs
from homelab.controller.planning.work.job import Job, TrainingJob
from homelab.shared.recipe import parallel
from tests import builders

RECIPE = """[model]
name = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"
[data]
train = "/data/train.jsonl"
[method]
kind = "lora"
[train]
global_batch = 12
steps = 10
learning_rate = 1e-3
[parallel]
strategy = "{strategy}"
"""
CLUSTER = "".join(
    f'[[nodes]]\nname = "{name}"\nhost = "192.168.1.{number}"\ngpus = [{{ model = "RTX 4090", vram_gb = 24 }}]\n'
    for number, name in enumerate("abc", 1)
)


class Pipeline(Strategy):
    """A toy: every rank takes some of the layers and all of the batch; activations go from rank to rank."""

    name = "toy-pipeline"
    checkpoint_layout = "sharded"

    def assign(self, job: Job) -> Assignment:
        if not isinstance(job, TrainingJob):
            raise InputError("a pipeline needs layers", where="recipe, [script]", hint='strategy = "ddp"')
        batch = job.recipe.train.global_batch
        ranks = tuple(
            RankPlan(
                rank=slot.rank, node=slot.node.name, local_rank=slot.local_rank, device_name=slot.name, share=batch, micro_batch=1,
                speed=(job.workload.speeds.speeds or {})[slot.node.name][slot.local_rank],
            )
            for slot in job.machines.slots
        )  # fmt: skip
        return Assignment(
            ranks, (Choice(subject="layers", value="in order", because="the toy divides them evenly"),), ("the toy cannot train",)
        )

    def step_bytes(self, job: TrainingJob, passes: int) -> int | None:
        return 1_000_000

    def wire_s(self, size_bytes: float, ranks: int, bytes_per_s: float) -> float:
        return (ranks - 1) * size_bytes / bytes_per_s

    def because(self, job: Job) -> str:
        return f"activations pass through {job.machines.world_size} ranks"

    def worker_settings(self, job: Job) -> Mapping[str, str]:
        return {"HOMELAB_TOY": "1"}


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    monkeypatch.setattr(registry, "STRATEGIES", dict(registry.STRATEGIES))
    strategy = Pipeline()
    registry.register(strategy)
    yield strategy
    parallel.STRATEGY_NAMES.remove(strategy.name)


def planned(folder: Path, capsys: pytest.CaptureFixture[str], strategy: str, *options: str) -> tuple[int, str]:
    (folder / "cluster.toml").write_text(CLUSTER)
    (folder / "toy.toml").write_text(RECIPE.format(strategy=strategy))
    code = run(["plan", str(folder / "toy.toml"), "--offline", "--cluster", str(folder / "cluster.toml"), *options])
    captured = capsys.readouterr()
    return code, captured.out or captured.err


def test_the_recipe_names_it_and_plan_prints_it(toy: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = planned(tmp_path, capsys, toy.name, "--why", "--commands")
    assert code == 0
    assert "toy-pipeline over nccl" in shown
    assert "activations pass through 3 ranks" in " ".join(shown.split())
    assert "! the toy cannot train" in shown
    assert "HOMELAB_TOY=1" in shown
    assert "HOMELAB_DDP" not in shown


def test_its_time_is_that_of_its_own_wire(toy: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = planned(tmp_path, capsys, toy.name, "--json")
    assert code == 0
    assert json.loads(shown)["time"]["wire_s"] == pytest.approx(2 * 1_000_000 / 117.6e6)


def test_its_checkpoint_layout_is_in_the_plan(toy: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layouts = [json.loads(planned(tmp_path, capsys, name, "--json")[1])["checkpoint_layout"] for name in (toy.name, "ddp")]
    assert layouts == ["sharded", "replicated"]


def test_auto_takes_the_cheapest_that_is_feasible_and_names_the_others(
    toy: Pipeline, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, shown = planned(tmp_path, capsys, "auto", "--json")
    plan = json.loads(shown)
    assert code == 0
    choice = next(choice for choice in plan["choices"] if choice["subject"] == "strategy")
    others = {"ddp", "toy-pipeline"} - {plan["strategy"]}
    assert choice["value"] == plan["strategy"]
    assert f"{others.pop()} would take" in choice["because"]


def test_what_is_not_feasible_is_no_candidate_of_auto(toy: Pipeline) -> None:
    script = builders.script_recipe()
    inputs = builders.plan_inputs(builders.cluster(), script, {})
    work = jobs.of(inputs, machines.choose(inputs), "fp32")
    assert isinstance(toy.feasible(work), HomelabError)
    assert registry.choose_strategy(work).strategy.name == "ddp"


def test_a_name_that_nobody_has_registered_is_refused_as_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = planned(tmp_path, capsys, "toy-pipeline")
    assert code == 2
    assert "'auto', 'ddp', 'fsdp', 'hsdp', 'pipeline', 'zero2' or 'zero3'" in shown
