"""The ranks start from the same weights, to the last bit, or the error names who does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from homelab.controller.diagnose import topic_index
from homelab.worker.errors import TrainingError
from homelab.worker.runtime import process_group
from homelab.worker.strategies import replica_check
from tests.worker import harness
from tests.worker.model.test_digests import quantised

NODES = ("tower", "mini", "laptop")


def task_of(folder: Path, device: str = "cpu", cards: tuple[str, ...] = ("CPU",) * 3) -> Any:
    entries = [{"rank": rank, "node": node, "device_name": card} for rank, (node, card) in enumerate(zip(NODES, cards, strict=True))]
    return harness.task_of(folder, NODES, rank=2, plan={"ranks": entries, "device": device})


def among(monkeypatch: pytest.MonkeyPatch, *others: Any) -> None:
    """This process is the last rank; the others have these models."""
    said = [replica_check.numbers(model) for model in others]
    monkeypatch.setattr(process_group, "gather", lambda values: [*said, values])


def test_a_rank_that_starts_from_other_weights_is_named_with_its_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, other = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    other.load_state_dict(model.state_dict())
    among(monkeypatch, model, model)
    task = task_of(tmp_path)
    assert replica_check.refuse_unequal(other, task, "step 20") is None
    with torch.no_grad():
        other.weight[0, 0] = torch.nextafter(other.weight[0, 0], torch.tensor(9.0))  # one bit of one weight
    with pytest.raises(TrainingError) as caught:
        replica_check.refuse_unequal(other, task, "step 20")
    assert "rank 2" in str(caught.value) and "laptop" in str(caught.value) and "base" not in caught.value.message
    assert [topic_index.of_rule("worker-error", caught.value.message)] == list(topic_index.find("ranks-disagree"))


def test_a_frozen_weight_that_differs_is_the_bases(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    models = [torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Linear(2, 2)) for _ in NODES]
    for model in models:
        model.load_state_dict(models[0].state_dict())
        model[0].requires_grad_(False)
    models[1][0].bias.view(torch.uint8)[0] ^= 1
    among(monkeypatch, *models[:2])
    with pytest.raises(TrainingError) as caught:
        replica_check.refuse_unequal(models[2], task_of(tmp_path), "step 0")
    error = caught.value
    assert error.message == "the ranks do not hold the same base model: that of rank 1 (mini) differs from rank 0 (tower), rank 2 (laptop)"
    assert error.where.startswith("mini: /models/tiny") and f"homelab recover {tmp_path.name}" in error.hint and "preflight" in error.hint
    assert [topic_index.of_rule("worker-error", error.message)] == list(topic_index.find("model-differs"))


def test_codes_may_differ_between_unlike_devices_and_not_between_like_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    weights = torch.randn(32, 64)
    models = [quantised(weights) for _ in NODES]
    among(monkeypatch, *models[:2])
    mine = models[2]
    unlike = task_of(tmp_path, "cuda", ("RTX 4070", "RTX 4070", "RTX 3070"))
    assert replica_check.refuse_unequal(mine, unlike, "step 0") is None
    mine["base"].weight.quant_state.offset.mul_(1 + 1e-6)
    for task in (unlike, task_of(tmp_path)):
        told = replica_check.refuse_unequal(mine, task, "step 0")
        assert told and "rank 2 (laptop)" in told
    with pytest.raises(TrainingError, match=r"base model: that of rank 2 \(laptop\) differs"):
        replica_check.refuse_unequal(mine, task_of(tmp_path, "cuda", ("RTX 4070",) * 3), "step 0")
    among(monkeypatch, models[0], quantised(weights * 2))
    with pytest.raises(TrainingError, match=r"base model: that of rank 1 \(mini\) differs"):
        replica_check.refuse_unequal(models[0], unlike, "step 0")


def test_of_one_rank_nothing_is_compared(tmp_path: Path) -> None:
    assert replica_check.refuse_unequal(None, harness.task_of(tmp_path), "") is None


def sends_no_weights() -> int:
    """A worker whose DDP may not send what the model holds."""
    from torch.nn.parallel import distributed

    from homelab.worker.training.train import main

    def sent(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("DDP sends every weight to all others")

    distributed._sync_module_states = sent
    return main()


@pytest.mark.timeout(120)
def test_a_base_that_differs_in_one_byte_on_one_node_is_named_before_the_first_step(
    forks: harness.Forks, tmp_path: Path, model: Path, data: Path
) -> None:
    import shutil

    recipe: dict[str, Any] = {"train__steps": 2, "train__epochs": None, "method__kind": "lora"}
    damaged = shutil.copytree(model, tmp_path / "damaged")
    content = bytearray((damaged / "model.safetensors").read_bytes())
    content[-1001] ^= 1
    (damaged / "model.safetensors").write_bytes(content)
    entry = "tests.worker.strategies.test_copies:sends_no_weights"
    for name, changed in (("well", model), ("odd", damaged)):
        run = harness.make_run(tmp_path / name, model, data, **recipe)
        own = harness.folder_of(run, "mini", NODES) / "run.json"

        def damage(own: Path = own, changed: Path = changed) -> None:
            own.write_text(own.read_text().replace(str(model), str(changed)))

        codes, output = forks.run(run, 1, [6, 4, 2], nodes=list(NODES), prepare=damage, entry=entry)
        steps = [len(harness.lines(run, 1, rank, "metrics.jsonl", "train")) for rank in range(3)]
        if changed is model:
            assert codes == [0, 0, 0] and steps == [2, 2, 2], output
        else:
            assert codes == [1, 1, 1] and steps == [0, 0, 0], output
            assert (
                output.count(
                    "the ranks do not hold the same base model: that of rank 1 (mini) differs from rank 0 (tower), rank 2 (laptop)"
                )
                >= 3
            )
