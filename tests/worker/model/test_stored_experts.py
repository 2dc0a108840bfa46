"""Experts that stay in MXFP4 are those that transformers makes of them: number by number, in a pass, in a training, wherever it is computed."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from homelab.shared.protocol.quantisation import MXFP4
from homelab.worker.errors import WorkerError
from homelab.worker.model import build, fused_experts, stored_experts
from homelab.worker.model.fused_experts import MATRICES
from homelab.worker.model.stored_experts import StoredExperts
from homelab.worker.tools import chat, footprint, merge
from tests.worker import harness
from tests.worker.model import odd_models
from tests.worker.strategies.test_streamed import of
from tests.worker.training.test_exactness import COMMON, LENGTH, SHORT, assert_every_sample_once_per_epoch, assert_the_same

pytestmark = [pytest.mark.timeout(200), pytest.mark.usefixtures("one_thread")]
LAYERS = 4
RECIPE = COMMON | LENGTH[SHORT] | {"method__kind": "lora", "train__gradient_checkpointing": True}


@pytest.fixture(scope="module")
def both(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return odd_models.in_four_float_bits(model, tmp_path_factory.mktemp("gpt-oss"), layers=LAYERS)


def loaded(path: Path, dtype: Any, how: str | None = MXFP4) -> Any:
    return build.load_base(str(path), None, how, dtype, None, "here")


def experts_of(model: Any) -> list[Any]:
    return [layer.mlp.experts for layer in model.model.layers]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_matrices_are_those_of_transformers(both: tuple[Path, Path], dtype: Any) -> None:
    """To the last bit: neighbours, others, and one alone."""
    left, wide = loaded(both[0], dtype), loaded(both[0], dtype, None)
    for held, plain in zip(experts_of(left), experts_of(wide), strict=True):
        assert type(held) is StoredExperts and type(plain).__name__ == "GptOssExperts" and held.dtype == dtype
        for name in MATRICES:
            whole = getattr(plain, name).transpose(1, 2)
            assert all(held.matrices(name, some).equal(whole[some]) for some in ([0, 1, 2, 3], [1, 2], [0, 3], [2]))


def test_bytes_held_are_those_of_the_files(both: tuple[Path, Path]) -> None:
    left, wide = loaded(both[0], torch.bfloat16), loaded(both[0], torch.bfloat16, None)
    packed = sum(buffer.nbytes for part in experts_of(left) for buffer in part.buffers())
    weights = sum(getattr(part, name).numel() for part in experts_of(wide) for name in MATRICES)
    assert packed == weights * 17 / 32
    assert footprint.weight_bytes(left, MXFP4) == packed + footprint.weight_bytes(wide, None) - 2 * weights
    needed = functools.partial(footprint.answer_bytes, str(both[0]), None, dtype=torch.bfloat16, tokens=1, added_bytes=0)
    assert (needed(quantisation=None) or 0) - (needed(quantisation=MXFP4) or 0) >= 2 * weights - packed


def gradients(model: Any, tokens: Any) -> tuple[Any, dict[str, Any]]:
    """Logits, and the gradients of adapters that matter."""
    method = harness.task_of(Path("/runs/one"), method__kind="lora").method
    adapted = build.add_adapters(model, method, 1).train()
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=draw) / 20)
    answer = adapted(input_ids=tokens, labels=tokens)
    answer.loss.backward()
    return answer.logits.detach(), {name: weight.grad for name, weight in adapted.named_parameters() if weight.requires_grad}


def test_a_pass_and_its_gradient_are_those_of_plain_experts(both: tuple[Path, Path]) -> None:
    tokens = torch.randint(3, 200, (3, 40), generator=torch.Generator().manual_seed(3))
    (seen, found), (wanted, expected) = (gradients(loaded(path, torch.float32), tokens) for path in both)
    assert float((seen - wanted).abs().max() / wanted.abs().max()) < 1e-6
    assert len(found) == 8 * LAYERS and harness.relative_error(found, expected) < 1e-5


def test_a_number_that_is_read_as_its_neighbour_is_seen(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: the first number of a byte is in its lower half."""
    monkeypatch.setattr(stored_experts, "_PAIRS", tuple(pair[::-1] for pair in stored_experts._PAIRS))
    tokens = torch.randint(3, 200, (1, 20), generator=torch.Generator().manual_seed(3))
    seen, wanted = (loaded(path, torch.float32)(tokens).logits for path in both)
    assert float((seen - wanted).abs().max() / wanted.abs().max()) > 1e-2


WAYS: dict[str, dict[str, Any]] = {
    "one process": {"shares": [12], "micro_batch": 5},
    "ddp": {"shares": [6, 4, 2], "micro_batch": [2, 1, 2]},
    "zero2": {"shares": [7, 5], "strategy": "zero2"},
    "zero3": {"shares": [7, 5], "strategy": "zero3"},
    "stages": {"shares": [12, 0, 0], "stages": [2, 1, 1], "micro_batch": 2},
    "layers from the host": {"shares": [12], "streaming": [of(LAYERS - 1, 2)], "micro_batch": 3},
    "stages, layers from the hosts": {
        "shares": [0, 12], "stages": [2, 2], "stage_order": [1, 0], "streaming": [of(1, 1), of(2, 1, 1)], "micro_batch": 2,
    },
}  # fmt: skip
QUICK = ("one process", "stages, layers from the hosts")


@pytest.fixture(scope="module")
def plain_run(forks: harness.Forks, tmp_path_factory: pytest.TempPathFactory, both: tuple[Path, Path], data: Path) -> Path:
    run = harness.make_run(tmp_path_factory.mktemp("plain") / "run", both[1], data, **RECIPE)
    forks.train(run, 1, [12], micro_batch=5)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.thorough) for name in WAYS])
def test_the_training_is_that_of_the_plain_model(
    name: str, forks: harness.Forks, plain_run: Path, tmp_path: Path, both: tuple[Path, Path], data: Path
) -> None:
    run = harness.make_run(tmp_path / "run", both[0], data, **RECIPE)
    said = forks.train(run, 1, timeout_s=150, **WAYS[name])
    ranks = len(WAYS[name]["shares"])
    assert_the_same(run, plain_run, {1: (1, ranks)}, SHORT)
    assert_every_sample_once_per_epoch(run, ranks, SHORT)
    notes = [line["message"] for line in harness.lines(run, 1, 0, "metrics.jsonl", "note")]
    assert "base: its files are quantised already (MXFP4), and held as they are" in notes, said


@pytest.mark.slow
@pytest.mark.thorough
def test_layers_from_the_host_are_resident_ones_to_the_last_bit(
    forks: harness.Forks, tmp_path: Path, both: tuple[Path, Path], data: Path
) -> None:
    runs = [harness.make_run(tmp_path / who, both[0], data, **RECIPE) for who in ("resident", "streamed")]
    forks.train(runs[0], 1, [12], micro_batch=3)
    forks.train(runs[1], 1, [12], micro_batch=3, streaming=[of(LAYERS, 2)])
    assert harness.losses(runs[0], 1) == harness.losses(runs[1], 1)
    one, other = (harness.weights(run, SHORT) for run in runs)
    assert one.keys() == other.keys() and [name for name in one if not one[name].equal(other[name])] == []


@pytest.mark.slow
@pytest.mark.thorough
def test_killed_and_gone_on_elsewhere_with_all_weights_and_with_adapters(
    forks: harness.Forks, plain_run: Path, tmp_path: Path, both: tuple[Path, Path], data: Path
) -> None:
    run = harness.make_run(tmp_path / "run", both[0], data, **RECIPE)
    forks.killed(run, 1, rank=1, step=2, timeout_s=150, **WAYS["stages"])
    forks.train(run, 2, resume_step=2, timeout_s=150, **WAYS["ddp"])
    assert_the_same(run, plain_run, {2: (3, 3)}, SHORT)
    full = [
        harness.make_run(tmp_path / path.name, path, data, **{**RECIPE, "method__kind": "full", "train__learning_rate": 1e-4})
        for path in both
    ]
    for one in full:
        forks.train(one, 1, [12], micro_batch=3)
    assert_the_same(full[0], full[1], {1: (1, 1)}, SHORT)
    left, plain = (loaded(run / "final", torch.float32) for run in full)
    assert harness.relative_error(dict(left.named_parameters()), dict(plain.named_parameters())) < 1e-4


@pytest.mark.slow
@pytest.mark.thorough
def test_it_is_asked_and_merged(forks: harness.Forks, tmp_path: Path, both: tuple[Path, Path], data: Path) -> None:
    run = harness.make_run(tmp_path / "run", both[0], data, **{**RECIPE, "data__eval_fraction": 0.2, "train__learning_rate": 5e-2})
    forks.train(run, 1, [12], micro_batch=3)
    made = merge.Merge(run, run / "final", "auto").go()  # it refuses a merge whose logits are not those of the adapter
    merged = loaded(run / made["folder"], torch.float32)
    described = json.loads((run / "run.json").read_text())
    asked = chat.load(described, run, str(both[0]), run / "final", None, dtype=torch.float32)
    assert type(asked.get_base_model().model.layers[0].mlp.experts) is StoredExperts
    tokens = torch.randint(3, 200, (1, 30), generator=torch.Generator().manual_seed(3))
    seen, wanted, before = (one(tokens).logits for one in (merged, asked, loaded(both[1], torch.float32)))
    assert float((seen - wanted).abs().max() / wanted.abs().max()) < 2e-3 < float((before - wanted).abs().max() / wanted.abs().max())


def test_adapters_on_them_and_a_second_quantisation_are_refused(both: tuple[Path, Path], tmp_path: Path) -> None:
    left = loaded(both[0], torch.float32)
    assert not fused_experts.can_be_held(experts_of(left)[0])
    wanted = harness.task_of(tmp_path, method__kind="lora", method__targets="all-linear+experts").method
    with pytest.raises(WorkerError, match=r"its experts \(StoredExperts\) are in a form that homelab does not train"):
        build.add_adapters(left, wanted, 1)
    task = harness.task_of(tmp_path / "runs" / "one", model__name=str(both[0]), method__kind="qlora")
    with pytest.raises(WorkerError, match="quantised already") as error:
        build.refuse_unfit(task, str(both[0]))
    assert 'kind = "lora"' in error.value.hint


def test_they_need_no_bitsandbytes(both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    for name in ("experts_loading", "quantised_experts"):
        monkeypatch.delitem(sys.modules, f"homelab.worker.model.{name}", raising=False)
    assert type(experts_of(loaded(both[0], torch.float32))[0]) is StoredExperts


def test_files_of_another_family_become_wide(both: tuple[Path, Path]) -> None:
    """transformers knows MXFP4 of gpt-oss alone: no module fits, and all is left to it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        assert not stored_experts.install(LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1)))
    assert json.loads((both[0] / "config.json").read_text())["quantization_config"]["quant_method"] == MXFP4
