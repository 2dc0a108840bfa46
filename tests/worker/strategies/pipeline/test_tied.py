"""Embeddings that are the head, too, are on the first stage and on the last: frozen, or trained as one weight with two copies. What one node has wrong ends the
attempt with one message."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.worker import harness
from tests.worker.training import test_fp16
from tests.worker.training.test_exactness import AFTER_ALL, COMMON, LENGTH, LONG, SHORT, Reference, assert_the_same, lengths, references
from tests.worker.training.test_preferences import pairs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

TABLE = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama whose head is its table of embeddings."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    folder = harness.tiny_llama(tmp_path_factory.mktemp("tied") / "model", hidden=32, intermediate=64, layers=4)
    config = AutoConfig.from_pretrained(folder)
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference(forks: harness.Forks, tmp_path_factory: pytest.TempPathFactory, tied: Path, data: Path) -> Reference:
    return references(forks, tmp_path_factory.mktemp("one"), tied, data)


def test_lora_on_two_stages_has_the_curve_of_one_process(tied: Path, data: Path, forks: harness.Forks, tmp_path: Path) -> None:
    recipe = COMMON | {"method__kind": "lora", "train__steps": 8, "checkpoint__every_steps": 8}
    one, two = (harness.make_run(tmp_path / name, tied, data, **recipe) for name in ("one", "two"))
    forks.train(one, 1, [12], micro_batch=5)
    forks.train(two, 1, [12, 0], stages=[3, 1])
    assert harness.losses(two, 1) == pytest.approx(harness.losses(one, 1), rel=AFTER_ALL)
    assert harness.relative_error(harness.weights(two, 8), harness.weights(one, 8)) < AFTER_ALL


@dataclass(frozen=True)
class Case:
    """A full training in stages."""

    stages: list[int]
    micro_batch: int
    order: list[int] = field(default_factory=list)
    recipe: dict[str, Any] = field(default_factory=dict)

    def plan(self) -> dict[str, Any]:
        """The arguments of an attempt. The plan gives all rows to the first stage."""
        order = self.order or list(range(len(self.stages)))
        shares = [12 if rank == order[0] else 0 for rank in range(len(order))]
        return {"shares": shares, "stages": self.stages, "stage_order": order, "micro_batch": self.micro_batch, "timeout_s": 150}


ON_TWO = Case([1, 3], 5)
ON_THREE = Case([2, 1, 1], 2, [2, 0, 1], {"train__gradient_checkpointing": True, "train__fused_loss": True})
CASES = {"full on 2": ON_TWO, "full on 3 in another order, checkpointed, fused loss": ON_THREE}
QUICK: dict[int, tuple[str, ...]] = {SHORT: ("full on 3 in another order, checkpointed, fused loss",), LONG: ()}


@pytest.mark.parametrize(("name", "steps"), lengths(CASES, QUICK))
def test_all_weights_are_trained_as_in_one_process(
    name: str, steps: int, forks: harness.Forks, reference: Reference, tmp_path: Path, tied: Path, data: Path
) -> None:
    """With the norm of the whole gradient, which is clipped; the two copies are the same to the last bit at each checkpoint, with their optimizer."""
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    case = CASES[name]
    run = harness.make_run(tmp_path / "run", tied, data, **COMMON | LENGTH[steps] | {"method__kind": "full"} | case.recipe)
    forks.train(run, 1, entry=f"{__name__}:with_digests", **case.plan())
    assert_the_same(run, reference("full", False, steps), {1: (1, len(case.stages))}, steps)

    digests = [json.loads(line) for line in sorted((run / "digests.jsonl").read_text().splitlines())]
    assert len(digests) == 2 * (steps // LENGTH[steps]["checkpoint__every_steps"])
    assert digests[::2] == digests[1::2] and len({str(each) for each in digests}) == len(digests) // 2
    last = run / "checkpoints" / f"step-{steps:08d}"
    assert [key for key in load_file(last / "trainable.safetensors") if "embed" in key or "head" in key] == [TABLE]
    assert json.loads((run / "final" / "config.json").read_text())["tie_word_embeddings"] is True
    final = AutoModelForCausalLM.from_pretrained(run / "final")
    assert final.lm_head.weight is final.model.embed_tokens.weight
    assert final.lm_head.weight.equal(harness.weights(run, steps)[TABLE])


def with_digests() -> int:
    """A worker that writes down the bits of its copy, and of the optimizer's state of it, at each checkpoint. It exchanges the table in pieces."""
    from homelab.worker.strategies.pipeline import shared_table
    from homelab.worker.strategies.pipeline.stages import Stages
    from homelab.worker.training.train import main

    shared_table.PIECE_ELEMENTS = 1000
    state = Stages.state

    def noted(self: Any, trainer: Any) -> Any:
        if self._table is not None:
            values = [self._table.weight.detach(), *trainer.optimizer.optimizer.state[self._table.weight].values()]
            digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in values)).hexdigest()
            with (self._task.run_dir / "digests.jsonl").open("a") as file:
                file.write(json.dumps([trainer.state.global_step, digest]) + "\n")
        return state(self, trainer)

    Stages.state = noted
    return main()


@pytest.mark.parametrize("fault", ["not_summed", "counted_twice"])
def test_a_table_whose_halves_stay_apart_is_seen(
    fault: str, forks: harness.Forks, reference: Reference, tmp_path: Path, tied: Path, data: Path
) -> None:
    """The comparison above is one that can fail."""
    run = harness.make_run(tmp_path / "run", tied, data, **COMMON | LENGTH[SHORT] | {"method__kind": "full", "train__steps": 2})
    codes, output = forks.run(run, 1, entry=f"{__name__}:{fault}", **ON_THREE.plan())
    assert codes == [0, 0, 0], output
    one = reference("full", False, SHORT)
    norms = [harness.lines(which, 1, 0, "metrics.jsonl", "train")[0]["grad_norm"] for which in (run, one)]
    assert harness.losses(run, 1)[1] == pytest.approx(harness.losses(one, 1)[1], rel=1e-6), "the forward passes are right"
    assert norms[0] != pytest.approx(norms[1], rel=1e-3)
    gradients = harness.first_gradient(run), harness.first_gradient(one)
    assert harness.relative_error(*gradients) > 1e-3
    notes = [line["message"] for line in harness.lines(run, 1, 0, "metrics.jsonl", "note")]
    said = [note for note in notes if note.startswith("the copies of the weights have become different: after step 1 ")]
    assert len(said) == (fault == "not_summed")
    assert all("rank 2 (here), rank 1 (here) differ from each other" in note for note in said), "the first stage and the last one"


def not_summed() -> int:
    """A worker whose stages keep their own half of the table's gradient."""
    from homelab.worker.strategies.pipeline.shared_table import SharedTable
    from homelab.worker.training.train import main

    SharedTable.sum_gradients = lambda _self, _after_piece: (0.0, 0)
    return main()


def counted_twice() -> int:
    """A worker whose last stage counts the table in the norm, too."""
    from homelab.worker.strategies import gradient_norm
    from homelab.worker.training.train import main

    clip = gradient_norm.clip
    gradient_norm.clip = lambda counted, most, whole, copies: clip([*counted, *copies], most, whole)
    return main()


@pytest.mark.thorough
def test_a_head_of_its_own_in_the_files_of_a_tied_model(forks: harness.Forks, tmp_path: Path, tied: Path, data: Path) -> None:
    """config.json is wrong then, and transformers believes the files. Stages say so before they train all weights; with what they advise they train."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(tied, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    head = torch.randn(tensors[TABLE].shape, generator=torch.Generator().manual_seed(3)) * 0.02
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    recipe = COMMON | LENGTH[SHORT] | {"method__kind": "full", "train__steps": 2}
    one, refused = (harness.make_run(tmp_path / name, folder, data, **recipe) for name in ("one", "refused"))
    forks.train(one, 1, [12], micro_batch=5)
    codes, output = forks.run(refused, 1, **ON_TWO.plan())
    assert codes[1] == 2 and "Traceback" not in output, output
    error = harness.error_of(refused, 1, 1)
    assert error["message"].startswith("config.json says that the head is the table of embeddings") and not harness.losses(refused, 1)

    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    run = harness.make_run(tmp_path / "run", folder, data, **recipe)
    forks.train(run, 1, **ON_TWO.plan())
    assert harness.losses(run, 1) == pytest.approx(harness.losses(one, 1), rel=AFTER_ALL)
    assert harness.relative_error(harness.weights(run, 2), harness.weights(one, 2)) < AFTER_ALL


@pytest.mark.parametrize("step", [0, pytest.param(4, marks=pytest.mark.thorough)])
def test_copies_that_differ_in_a_bit_do_not_start(step: int, forks: harness.Forks, tmp_path: Path, tied: Path, data: Path) -> None:
    run = harness.make_run(tmp_path / "run", tied, data, **COMMON | LENGTH[SHORT] | {"method__kind": "full", "train__steps": step + 1})
    if step:
        forks.train(run, 1, **ON_TWO.plan() | {"entry": "homelab.worker.training.train:main"})
    codes, output = forks.run(run, 2, entry=f"{__name__}:with_a_bit", resume_step=step, **ON_TWO.plan())
    assert codes == [1, 1] and "Traceback" not in output, output
    for rank in (0, 1):
        error = harness.error_of(run, 2, rank)
        assert error["message"].startswith("the two copies of the embeddings, which are the head, too, do not start from the same numbers")
        assert error["message"].endswith("rank 0 (here), rank 1 (here)") and f"step {step}" in error["where"]
        assert error["hint"].startswith("homelab recover run")
    assert not harness.losses(run, 2)


def with_a_bit() -> int:
    """A worker whose last stage has read one bit of the table wrong."""
    import torch

    from homelab.worker.strategies.pipeline.stages import Stages
    from homelab.worker.training.train import main

    check = Stages.check_start

    def changed(self: Any, model: Any, where: str) -> Any:
        if self.stage.is_last:
            with torch.no_grad():
                self._table.weight[7, 3] = torch.nextafter(self._table.weight[7, 3], torch.tensor(9.0))
        return check(self, model, where)

    Stages.check_start = changed
    return main()


@pytest.mark.timeout(400)
@pytest.mark.thorough
def test_killed_and_gone_on_with_another_cut_and_another_strategy(
    forks: harness.Forks, reference: Reference, tmp_path: Path, tied: Path, data: Path
) -> None:
    run = harness.make_run(tmp_path / "run", tied, data, **COMMON | LENGTH[SHORT] | {"method__kind": "full"})
    forks.killed(run, 1, rank=1, step=2, **ON_TWO.plan())
    kept = max(int(path.name[5:]) for path in (run / "checkpoints").iterdir() if path.name.startswith("step-"))
    begin = min(kept, 2)
    three = ON_THREE.plan()
    forks.train(run, 2, resume_step=begin, **three)
    forks.train(run, 3, [7, 5], micro_batch=2, resume_step=4)
    forks.train(run, 4, resume_step=5, **three)
    assert_the_same(run, reference("full", False, SHORT), {2: (begin + 1, 3), 3: (5, 2), 4: (6, 3)}, SHORT)


@pytest.mark.thorough
def test_the_best_weights_and_the_kept_checkpoints_are_those_of_one_process(
    forks: harness.Forks, tmp_path: Path, tied: Path, data: Path
) -> None:
    """A rate at which the held-out loss rises again."""
    from safetensors.torch import load_file

    recipe = COMMON | {
        "method__kind": "full", "train__steps": 12, "train__learning_rate": 0.1, "train__schedule": "constant", "train__keep_best": True,
        "train__early_stopping": 2, "tracking__eval_every_steps": 1, "checkpoint__every_steps": 2, "checkpoint__keep": 1, "checkpoint__keep_every": 2,
    }  # fmt: skip
    one, run = (harness.make_run(tmp_path / name, tied, data, **recipe) for name in ("one", "run"))
    forks.train(one, 1, [12], micro_batch=2)
    forks.train(run, 1, **ON_TWO.plan() | {"micro_batch": 2})
    losses, others = harness.losses(run, 1), harness.losses(one, 1)
    assert losses == pytest.approx(others, rel=1e-4) and len(losses) < 12, "it stopped early, at a large rate"
    best, expected = (load_file(which / "final" / "model.safetensors") for which in (run, one))
    assert harness.relative_error(best, expected) < 1e-3
    assert harness.relative_error(best, harness.weights(run, 4)) > 1e-2, "the best ones are not the newest ones"
    folders = [{path.name for path in (which / "checkpoints").iterdir() if path.name.startswith("step-")} for which in (run, one)]
    assert folders[0] == folders[1] and len(folders[0]) > 1


@pytest.mark.thorough
@pytest.mark.parametrize("case", [ON_TWO, ON_THREE], ids=["on 2", "on 3"])
def test_fp16_skips_the_steps_of_one_process(case: Case, forks: harness.Forks, tmp_path: Path, tied: Path, data: Path) -> None:
    """The halves are added before anybody judges them: a sum may overflow."""
    recipe = test_fp16.RECIPE | {"method__kind": "full"}
    one, run = (harness.make_run(tmp_path / name, tied, data, **recipe) for name in ("one", "run"))
    test_fp16.attempt(forks, one, 1, [12], micro_batch=case.micro_batch)
    plan = case.plan()
    del plan["timeout_s"]
    test_fp16.attempt(forks, run, 1, plan.pop("shares"), **plan)
    test_fp16.assert_the_same(run, one, {1: (1, len(case.stages))})


@pytest.mark.thorough
def test_a_reward_model_of_all_weights_has_no_second_copy(forks: harness.Forks, tmp_path: Path, tied: Path) -> None:
    """Its head is another one, so nothing is tied any more."""
    rows = harness.write_jsonl(tmp_path / "pairs.jsonl", pairs(44))
    recipe = COMMON | {"objective__kind": "reward", "method__kind": "full", "train__steps": 4, "checkpoint__every_steps": 1}
    one, run = (harness.make_run(tmp_path / name, tied, rows, **recipe) for name in ("one", "run"))
    forks.train(one, 1, [12], micro_batch=2)
    forks.train(run, 1, **ON_THREE.plan())
    assert harness.losses(run, 1) == pytest.approx(harness.losses(one, 1), rel=AFTER_ALL)
    assert harness.relative_error(harness.first_gradient(run), harness.first_gradient(one)) < 4e-6
    assert harness.relative_error(harness.weights(run, 4), harness.weights(one, 4)) < AFTER_ALL
    for name in ("config.json", "model.safetensors"):
        assert (run / "final" / name).stat().st_size == (one / "final" / name).stat().st_size
    assert (run / "final" / "config.json").read_text() == (one / "final" / "config.json").read_text()


def test_a_model_with_other_layers_than_the_plan_ends_every_rank_with_one_message(
    tied: Path, data: Path, forks: harness.Forks, tmp_path: Path
) -> None:
    run = harness.make_run(tmp_path / "run", tied, data, method__kind="lora")
    codes, output = forks.run(run, 1, [12, 0], stages=[3, 2])
    assert codes == [2, 2] and "Traceback" not in output, output
    for rank in (0, 1):
        error = harness.error_of(run, 1, rank)
        assert (
            error["message"] == "the plan divides 5 layers, but the model has 4"
            and error["where"] == "[model] name in the recipe"
            and error["hint"]
        )
