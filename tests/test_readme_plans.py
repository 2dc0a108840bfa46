"""The guide's table of models that are too large: what `homelab plan --offline` says of them today."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

import homelab
from homelab.cli import main

REPOSITORY = Path(homelab.__file__).parents[1]
MODELS = {
    "Llama-2-7B": "meta-llama/Llama-2-7b-hf",
    "Llama-2-13B": "meta-llama/Llama-2-13b-hf",
    "Qwen2.5-32B": "Qwen/Qwen2.5-32B",
    "Llama-3-70B": "meta-llama/Meta-Llama-3-70B",
}
RECIPE = """
[model]
name = "{name}"
[data]
train = "hub:HuggingFaceH4/ultrachat_200k"
[method]
kind = "qlora"
rank = 16
dropout = 0.0
[train]
global_batch = 32
steps = 1000
learning_rate = 2e-4
seq_len = 1024
"""
LINES = (
    line.split("|") for line in (REPOSITORY / "homelab/docs/too-large.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")
)
ROWS = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in LINES if cells[1].strip() in MODELS}


@pytest.mark.parametrize("model", MODELS)
def test_the_table_says_what_the_plan_says(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    shutil.copy(REPOSITORY / "cluster.toml", tmp_path / "cluster.toml")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(name=MODELS[model]), encoding="utf-8")
    main.run(["plan", str(recipe), "--offline", "--json", "--cluster", str(tmp_path / "cluster.toml")])
    said = json.loads(capsys.readouterr().out)
    strategy, layers, speed, part, _ = ROWS[model]
    if "error" in said:
        numbers = re.findall(r"\d+", said["error"]["message"])
        assert re.findall(r"\d+", strategy) == [*numbers[1:4], numbers[0]]
        return
    plan = said.get("plan", said)
    time, stages = plan["time"], [rank["stage"] for rank in plan["ranks"]]
    assert strategy == plan["strategy"] and layers == (
        "all on each" if None in stages else ", ".join(str(stage["end"] - stage["begin"]) for stage in stages)
    )
    assert speed == " to ".join(f"{float(f'{time[key]:.2g}'):.0f}" for key in ("tokens_per_s_low", "tokens_per_s_high"))
    assert re.findall(r"\d+ %", part) == [
        f"{time['efficiency']:.0%}".replace("%", " %"),
        f"{time['equal_efficiency']:.0%}".replace("%", " %"),
    ]
