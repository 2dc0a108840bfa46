"""A training that begins with the adapter of an earlier one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from homelab.shared.protocol.digest import file_sha256
from tests.worker import harness
from tests.worker.training.test_exactness import AFTER_ALL, SHORT
from tests.worker.training.test_preferences import pairs, recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def begins_with(run: Path, adapter: Path) -> Path:
    """The run with this adapter in its run.json, as a launch writes it."""
    content = json.loads((run / "run.json").read_text())
    file = adapter / "adapter_model.safetensors"
    content["recipe"]["model"]["adapter"] = "models/earlier"
    content["data"]["adapter"] = {"kind": "file", "path": str(file), "name": file.name, "sha256": file_sha256(file)}
    (run / "run.json").write_text(json.dumps(content))
    return run


@pytest.fixture(scope="module")
def earlier(forks: harness.Forks, tmp_path_factory: pytest.TempPathFactory, model: Path, data: Path) -> Path:
    """final/ of a fine-tuning."""
    run = harness.make_run(
        tmp_path_factory.mktemp("earlier") / "run",
        model,
        data,
        method__kind="lora",
        train__steps=2,
        train__epochs=None,
        checkpoint__every_steps=2,
    )
    forks.train(run, 1, [12], micro_batch=5)
    return run / "final"


def test_pairs_go_on_where_a_fine_tuning_ended(forks: harness.Forks, tmp_path: Path, model: Path, earlier: Path) -> None:
    rows = harness.write_jsonl(tmp_path / "pairs.jsonl", pairs(44))
    settings: dict[str, Any] = recipe("dpo") | {"checkpoint__every_steps": 1}
    runs = [begins_with(harness.make_run(tmp_path / who, model, rows, **settings), earlier) for who in ("one", "pipeline")]
    plans: list[dict[str, Any]] = [{"shares": [12]}, {"shares": [12, 0], "stages": [1, 1]}]
    for run, plan in zip(runs, plans, strict=True):
        output = forks.train(run, 1, **{"micro_batch": 3, **plan})
        assert "adapters: they begin as those of adapter_model.safetensors" in output
    losses = [harness.losses(run, 1) for run in runs]
    assert losses[0][1] == pytest.approx(0.693147, abs=1e-4), "the base it compares with has the adapter, too"
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=AFTER_ALL)
    began = load_file(earlier / "adapter_model.safetensors")
    after = {name.replace(".default", ""): tensor for name, tensor in harness.weights(runs[0], 1).items()}
    assert began.keys() == after.keys() and 0 < harness.whole_error(after, began) < 0.5, "one step away from its start"
    plain = harness.make_run(tmp_path / "plain", model, rows, **settings)
    forks.train(plain, 1, [12], micro_batch=3)
    assert harness.losses(plain, 1)[SHORT] != pytest.approx(losses[0][SHORT], rel=1e-4), "the start decides"
    # The model that it began with is there no more: without adapters it would be another one.
    (runs[0] / "reference.bin").unlink()
    codes, output = forks.run(runs[0], 2, [12], micro_batch=3, resume_step=2)
    assert codes == [1] and "the model that the run began with was trained already" in output


@pytest.mark.parametrize(
    ("fault", "said"), [("rank", "does not fit this model"), ("changed", "is gone, or has changed"), ("gone", "is gone, or has changed")]
)
def test_another_adapter_is_refused(
    fault: str, said: str, forks: harness.Forks, tmp_path: Path, model: Path, data: Path, earlier: Path
) -> None:
    settings: dict[str, Any] = {"method__kind": "lora", **({"method__rank": 2} if fault == "rank" else {})}
    run = begins_with(harness.make_run(tmp_path / "run", model, data, **settings), earlier)
    content = json.loads((run / "run.json").read_text())
    if fault == "changed":
        content["data"]["adapter"]["sha256"] = "0" * 64
    elif fault == "gone":
        content["data"]["adapter"]["path"] = str(tmp_path / "nowhere.safetensors")
    (run / "run.json").write_text(json.dumps(content))
    codes, output = forks.run(run, 1, [12], micro_batch=3)
    assert codes == [2] and said in output and "fix:" in output, output
