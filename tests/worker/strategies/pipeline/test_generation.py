"""An answer across stages is that of the whole model, to the last token."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("bitsandbytes")  # before `chat`, which hides it from a run that does not need it

from homelab.worker.tools import chat
from tests.worker import harness
from tests.worker.model.tiny_models import SIGHT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]
LAYERS, TOKENS = 12, 24
PROMPT = "red or green?"
RARE = ("full", "full, tied", "qlora", "lora, states", "lora, sees", "lora, ends", "lora, tied ends")
CUTS: dict[str, dict[str, Any]] = {
    "7/3/2, each on its own node": {"stages": [7, 3, 2], "nodes": ["a", "b", "c"]},
    "in another order": {"stages": [2, 7, 3], "stage_order": [2, 0, 1]},
}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with layers to cut. Its weights are large, so that every layer and every token before has a say in the next one."""
    from safetensors.torch import load_file, save_file

    folder = harness.tiny_llama(tmp_path_factory.mktemp("deep") / "tiny-llama", hidden=32, intermediate=64, layers=LAYERS)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: weight * 10 if "_proj" in name else weight for name, weight in weights.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


@pytest.fixture(scope="module")
def trained(forks: harness.Forks, tmp_path_factory: pytest.TempPathFactory, deep: Path, data: Path) -> Callable[[str], Path]:
    """A run whose training is over, by its method: trained so much that the answers differ."""
    root = tmp_path_factory.mktemp("trained")
    found: dict[str, Path] = {}
    others: dict[str, Callable[[Path, Path], Path]] = {
        "tied": _tied,
        "states": _states,
        "sees": _sees,
        "ends": lambda deep, _: deep,
        "tied ends": _tied,
    }

    def train(kind: str) -> Path:
        if kind not in found:
            method, _, other = kind.partition(", ")
            rate = 1e-4 if method == "full" else 5e-4
            recipe: dict[str, Any] = {"method__kind": method, "train__steps": 6, "train__epochs": None, "train__learning_rate": rate}
            if other.endswith("ends"):
                recipe["method__targets"] = ["q_proj", "embed_tokens", "lm_head"]
            found[kind] = harness.make_run(root / kind / "run", others[other](deep, root) if other else deep, data, **recipe)
            forks.train(found[kind], 1, [12], micro_batch=6)
        return found[kind]

    return train


def _states(deep: Path, root: Path) -> Path:
    """A model of as many layers, of which every fourth attends and the others keep a state."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(deep)
    torch.manual_seed(2)
    config = AutoConfig.for_model(
        "qwen3_5_text", hidden_size=32, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, vocab_size=len(tokenizer),
        max_position_embeddings=512, bos_token_id=1, eos_token_id=2, pad_token_id=0, initializer_range=0.3,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "states")
    tokenizer.save_pretrained(root / "states")
    return root / "states"


def _sees(deep: Path, root: Path) -> Path:
    """A model of as many layers that has a part for images, and layers with a window."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(deep)
    torch.manual_seed(5)
    text = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "vocab_size": len(tokenizer), "max_position_embeddings": 512, "sliding_window": 16, "query_pre_attn_scalar": 16, "initializer_range": 0.3,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=SIGHT, mm_tokens_per_image=1, tie_word_embeddings=False)
    AutoModelForImageTextToText.from_config(config).save_pretrained(root / "sees")
    tokenizer.save_pretrained(root / "sees")
    return root / "sees"


def _tied(deep: Path, root: Path) -> Path:
    """The same model, with its embeddings as its head."""
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(deep, root / "tied", dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    save_file(
        {name: weight for name, weight in weights.items() if name != "lm_head.weight"}, folder / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return folder


@pytest.fixture
def run(request: pytest.FixtureRequest, trained: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(trained(getattr(request, "param", "lora")), tmp_path / "run")


def of_the_whole(run: Path, *, base: bool = False) -> str:
    return str(chat.answer({"run_dir": str(run), "prompt": PROMPT, "base": base, "max_new_tokens": TOKENS})["answer"])


def across(
    forks: harness.Forks,
    run: Path,
    attempt: int,
    stages: Sequence[int],
    *,
    base: bool = False,
    entry: str = "asked",
    code: int = 0,
    **plan: Any,
) -> list[dict[str, Any]]:
    """What the ranks have written down."""
    rows = [12 if rank == plan.get("stage_order", [0])[0] else 0 for rank in range(len(stages))]
    folders = [
        harness.folder_of(run, node, plan.get("nodes") or ["here"]) / "collective" for node in plan.get("nodes") or ["here"] * len(stages)
    ]

    def ask() -> None:
        for folder in folders:
            folder.mkdir(exist_ok=True)
            (folder / "input.json").write_text(json.dumps({"prompt": PROMPT, "base": base, "max_new_tokens": TOKENS}))

    codes, output = forks.run(run, attempt, rows, stages=stages, entry=f"{__name__}:{entry}", prepare=ask, timeout_s=100, **plan)
    assert codes == [code] * len(stages), output
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank, folder in enumerate(folders)]


def answers(states: list[dict[str, Any]]) -> list[str]:
    return [result["answer"] for state in states for result in state["results"] if "answer" in result]


def asked() -> int:
    """What torchrun starts, in a folder that the node's agent has made."""
    from homelab.worker.tools import rank_state, stage_chat

    os.environ["HOMELAB_COLLECTIVE_DIR"] = f"{os.environ['HOMELAB_RUN_DIR']}/collective"
    return rank_state.watched(stage_chat.run)


def skipping() -> int:
    """The same with a second stage that leaves out the last of its layers."""
    from homelab.worker.strategies.pipeline import stage_model

    cut, left_out = stage_model.cut, CUTS["7/3/2, each on its own node"]["stages"][0] + 2

    def less(model: Any, *about: Any) -> None:
        cut(model, *about)
        layers = stage_model.decoder_of(model).layers
        layers[left_out] = stage_model.Elsewhere(layers[left_out])

    stage_model.cut = less
    return asked()


def streaming() -> int:
    """The same, which ends with an error if nothing came from the host."""
    from homelab.worker.model.host_layers import HostLayers

    loads, load = [], HostLayers._load
    HostLayers._load = lambda self, *where: loads.append(where) or load(self, *where)
    code = asked()
    return code if loads else 99


def forgetting() -> int:
    """The same with stages that take every token for the first one of the answer."""
    from homelab.worker.strategies.pipeline import generation

    generation.StageCache.length = property(lambda self: 0, lambda self, value: None)
    return asked()


@pytest.mark.parametrize("run", ["lora", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in RARE)], indirect=True)
def test_the_answer_is_that_of_the_whole_model(run: Path, forks: harness.Forks) -> None:
    whole, base = of_the_whole(run), of_the_whole(run, base=True)
    assert len(set(whole)) >= 6 and whole != base, "an answer that says something of the model"
    for attempt, plan in enumerate(CUTS.values(), start=2):
        assert answers(across(forks, run, attempt, **plan)) == [whole]
    assert answers(across(forks, run, 8, [5, 7], base=True)) == [base]
    (run / "final").rename(run / "not yet")
    assert answers(across(forks, run, 9, [5, 7])) == [of_the_whole(run)], "the newest checkpoint"


def test_stages_with_layers_from_the_host_answer_the_same(run: Path, forks: harness.Forks) -> None:
    streamed = [{"layers": layers, "group": 1, "places": 2, "host": "disk"} for layers in (3, 7)]
    assert answers(across(forks, run, 2, [5, 7], streaming=streamed, entry="streaming")) == [of_the_whole(run)]


def test_final_of_a_pipeline_is_the_whole_adapter(run: Path, forks: harness.Forks, tmp_path: Path, deep: Path, data: Path) -> None:
    """The head's own model has only the layers of its stage."""
    from safetensors.torch import load_file

    recipe = json.loads((run / "run.json").read_text())["recipe"]["train"]
    changes = {f"train__{name}": recipe[name] for name in ("steps", "epochs", "learning_rate")}
    cut = harness.make_run(tmp_path / "cut", deep, data, method__kind="lora", **changes)
    forks.train(cut, 1, [0, 12, 0], stages=[2, 7, 3], stage_order=[1, 0, 2], micro_batch=6)
    of_stages, of_one = (load_file(folder / "final" / "adapter_model.safetensors") for folder in (cut, run))
    assert harness.relative_error(of_stages, of_one) < 1e-4
    answer = of_the_whole(cut)
    assert answers(across(forks, cut, 2, [5, 7])) == [answer] == [of_the_whole(run)]


@pytest.mark.parametrize("fault", [pytest.param("skipping", marks=pytest.mark.thorough), "forgetting"])
def test_a_wrong_answer_is_seen(fault: str, run: Path, forks: harness.Forks) -> None:
    """The comparison above is one that can fail."""
    assert answers(across(forks, run, 2, [7, 3, 2], entry=fault)) != [of_the_whole(run)]


def test_what_is_missing_is_said_in_three_parts(run: Path, forks: harness.Forks) -> None:
    for folder in ("final", "checkpoints"):
        (run / folder).rename(run / f"no {folder}")
    for state in across(forks, run, 2, [5, 7], code=1):
        assert (
            state["error"].startswith("error: this run has no checkpoint yet on any of its nodes\nwhere: ") and "\nfix: " in state["error"]
        )
