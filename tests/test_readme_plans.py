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
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B",
    "Qwen3.5-27B": "Qwen/Qwen3.5-27B",
    "Qwen3.5-35B-A3B": "Qwen/Qwen3.5-35B-A3B",
    "gpt-oss-20b": "openai/gpt-oss-20b",
}
# The experts of the last one are MXFP4 in its files, and no method quantises such files again.
KINDS = {"gpt-oss-20b": "lora"}
RECIPE = """
[model]
name = "{name}"
[data]
train = "hub:HuggingFaceH4/ultrachat_200k"
[method]
kind = "{kind}"
rank = 16
dropout = 0.0
[train]
global_batch = 32
steps = 1000
learning_rate = 2e-4
seq_len = 1024
"""
# Of the table of other cards: (model, cards) -> what stands in the shipped cluster.toml for each, or a card of its own.
CARDS = {"16": ("RTX 5070 Ti", 16), "12": ("RTX 3060", 12), "8": ("RTX 4070 Laptop", 8), "4": ("RTX 3050 Laptop", 4)}
LINES = (
    line.split("|") for line in (REPOSITORY / "homelab/docs/too-large.md").read_text(encoding="utf-8").splitlines() if line.startswith("| ")
)
TABLE = [[cell.strip() for cell in cells[1:-1]] for cells in LINES]
ROWS = {cells[0]: cells[1:] for cells in TABLE if len(cells) == 6}
OTHERS = [cells for cells in TABLE if len(cells) == 5 and cells[0] in {**MODELS, "Llama-3-8B": ""}]


def speed_of(time: dict[str, float]) -> str:
    return " to ".join(f"{float(f'{time[key]:.2g}'):.0f}" for key in ("tokens_per_s_low", "tokens_per_s_high"))


@pytest.mark.parametrize("model", MODELS)
def test_the_table_says_what_the_plan_says(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    shutil.copy(REPOSITORY / "cluster.toml", tmp_path / "cluster.toml")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(name=MODELS[model], kind=KINDS.get(model, "qlora")), encoding="utf-8")
    main.run(["plan", str(recipe), "--offline", "--json", "--cluster", str(tmp_path / "cluster.toml")])
    said = json.loads(capsys.readouterr().out)
    strategy, layers, speed, part, _ = ROWS[model]
    if "error" in said:
        numbers = re.findall(r"\d+", said["error"]["message"])
        assert re.findall(r"\d+", strategy) == [*numbers[1:4], numbers[0]]
        return
    plan = said.get("plan", said)
    time, stages = plan["time"], [rank["stage"] for rank in plan["ranks"]]
    streamed = [rank["streaming"]["layers"] for rank in plan["ranks"] if rank["streaming"]]
    of_these = f"; of these {', '.join(map(str, streamed))} from the host" if streamed else ""
    assert strategy == plan["strategy"] and layers == (
        "all on each" if None in stages else ", ".join(str(stage["end"] - stage["begin"]) for stage in stages) + of_these
    )
    assert speed == speed_of(time)
    assert re.findall(r"\d+ %", part) == [
        f"{time['efficiency']:.0%}".replace("%", " %"),
        f"{time['equal_efficiency']:.0%}".replace("%", " %"),
    ]


@pytest.mark.parametrize(("model", "cards", "layers", "host", "speed"), OTHERS)
def test_the_table_of_other_cards_says_what_the_plan_says(
    model: str, cards: str, layers: str, host: str, speed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    nodes = [
        f'[[nodes]]\nname = "node{number}"\nhost = "127.0.0.{number + 2}"\ngpus = [{{ model = "{CARDS[size][0]}", vram_gb = {CARDS[size][1]} }}]\n'
        for number, size in enumerate(cards.removesuffix(" GB").split(", "))
    ]
    (tmp_path / "cluster.toml").write_text("".join(nodes), encoding="utf-8")
    recipe = tmp_path / "recipe.toml"
    name = (MODELS | {"Llama-3-8B": "meta-llama/Meta-Llama-3-8B"})[model]
    recipe.write_text(RECIPE.format(name=name, kind=KINDS.get(model, "qlora")), encoding="utf-8")
    main.run(["plan", str(recipe), "--offline", "--json", "--cluster", str(tmp_path / "cluster.toml")])
    said = json.loads(capsys.readouterr().out)
    plan = said.get("plan", said)
    streaming, stages = [rank["streaming"] for rank in plan["ranks"]], [rank["stage"] for rank in plan["ranks"]]
    held = ", ".join(str(stage["end"] - stage["begin"]) for stage in stages) if None not in stages else "all"
    if host == "none":
        assert not any(streaming) and layers == held
        assert speed == speed_of(plan["time"])
        return
    assert all(streaming)
    assert layers == f"{held}; {', '.join(str(one['layers']) for one in streaming)}"
    assert host == ", ".join(f"{one['layers'] * one['layer_bytes'] / 1e9:.1f}" for one in streaming)
    assert speed == speed_of(plan["time"])


def test_both_tables_are_read() -> None:
    assert len(ROWS) >= len(MODELS) and len(OTHERS) >= 4
