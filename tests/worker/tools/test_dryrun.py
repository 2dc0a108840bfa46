"""The dry run against the same step of the real thing on this CPU: weights from disk, bitsandbytes' NF4, torch's optimizer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from homelab.controller.planning.memory import rank_memory
from homelab.controller.planning.model.families import from_config
from homelab.shared.protocol import memory_items
from homelab.shared.recipe import Method, Train
from homelab.worker.errors import WorkerError
from homelab.worker.model.build import load_model
from homelab.worker.tools import memory_dry_run, memory_tracker
from homelab.worker.tools.memory_dry_run import Situation
from tests.worker import harness

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 3000, "tie_word_embeddings": False, "max_position_embeddings": 2048,
}  # fmt: skip


MIXTURE = {**CONFIG, "model_type": "mixtral", "num_local_experts": 4}


def method(kind: str, targets: Any = "all-linear") -> dict[str, Any]:
    """`kind` of a method, or "lora 8bit"."""
    name, _, base = kind.partition(" ")
    return {"kind": name, "base": base or "auto", "rank": 8, "alpha": 16, "dropout": 0.0, "targets": targets, "backend": "auto"}


def train(seq_len: int, checkpointing: bool, fused: bool, optimizer: str = "adamw") -> dict[str, Any]:
    return {"seq_len": seq_len, "gradient_checkpointing": checkpointing, "fused_loss": fused, "optimizer": optimizer, "seed": 1}


class RealStep:
    """The optimizer itself, with its state made by a first step that changes nothing."""

    def __init__(self, trainable: list[Any], settings: dict[str, Any], device: str) -> None:
        if settings["optimizer"] == "adamw":
            self.optimizer = torch.optim.AdamW(trainable, lr=0.0, foreach=False)
        else:
            import bitsandbytes

            self.optimizer = bitsandbytes.optim.AdamW8bit(trainable, lr=0.0)
        self.optimizer.step()

    def step(self) -> None:
        self.optimizer.step()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("small") / "llama"
    torch.manual_seed(0)
    known = {key: value for key, value in CONFIG.items() if key != "model_type"}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**known)).save_pretrained(place)
    return place


def really(folder: Path, how: dict[str, Any], settings: dict[str, Any], precision: str, rows: int, masked: bool) -> Any:
    sections = {"model": {"name": str(folder)}, "method": how, "train": settings}
    changes = {f"{section}__{key}": value for section, values in sections.items() for key, value in values.items()}
    task = harness.task_of(folder, plan={"precision": precision}, **changes)
    model = load_model(task, str(folder), lambda text: None)
    tokens = torch.randint(0, CONFIG["vocab_size"], (rows, settings["seq_len"]))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if masked:
        batch["attention_mask"] = torch.ones_like(tokens)
        batch["attention_mask"][0, -3:] = 0
    return memory_dry_run.follow(model, batch, how, settings, precision=precision, device="cpu", optimizer=RealStep)


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_all_logits_are_counted_where_the_worker_has_them_all(scale: float) -> None:
    """[train] fused_loss = "auto" has no effect on a model that scales its logits."""
    config = {**CONFIG, "model_type": "granite", "logits_scaling": scale, "vocab_size": 30_000}
    auto, never = (
        memory_dry_run.dry_run(
            config, method("lora"), {**train(600, False, False), "fused_loss": fused}, Situation("cpu", "fp32", 1, False)
        )
        for fused in ("auto", False)
    )
    assert (auto["peak_bytes"] == never["peak_bytes"]) is (scale != 1)


# (method, precision, tokens, rows, checkpointing, fused loss)
GRID = [
    ("lora", "bf16", 96, 1, True, True),
    ("lora", "fp32", 320, 3, True, False),
    ("qlora", "bf16", 320, 1, False, True),
    ("lora 8bit", "bf16", 320, 1, False, True),
    ("lora 8bit", "fp32", 96, 1, True, True),
]
MORE = [
    ("full", "bf16", 320, 3, False, True),
    ("full", "bf16", 96, 1, True, False),
    ("full", "fp32", 96, 1, True, True),
    ("full", "fp32", 320, 3, False, False),
    ("lora", "fp32", 96, 1, False, False),
    ("lora", "bf16", 320, 3, True, True),
    ("qlora", "bf16", 96, 1, True, True),
    ("qlora", "fp32", 320, 3, True, True),
    ("qlora", "bf16", 320, 3, True, False),
    ("lora 8bit", "bf16", 320, 3, True, False),
    ("lora 8bit", "fp32", 320, 3, True, True),
]


def estimated(
    how: dict[str, Any],
    settings: dict[str, Any],
    precision: str,
    device: str,
    rows: int,
    config: dict[str, Any] = CONFIG,
    repeats_keys: bool = False,
) -> int:
    shape = from_config(config)
    assert shape is not None
    asked = {key: settings[key] for key in ("seq_len", "gradient_checkpointing", "fused_loss", "optimizer")}
    found = rank_memory.estimate(
        shape, Method(kind=how["kind"], base=how["base"], rank=how["rank"]), Train(global_batch=8, steps=1, learning_rate=1.0, **asked),
        rank_memory.RankSetup(precision, device, rows, repeats_keys=repeats_keys),
    )  # fmt: skip
    return sum(item.size_bytes for item in found if item.name in rank_memory.SEEN_BY_A_DRY_RUN)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "case", [*GRID, *(pytest.param(case, marks=pytest.mark.thorough) for case in MORE)], ids=lambda case: "-".join(map(str, case))
)
def test_within_two_percent_of_the_real_step(folder: Path, monkeypatch: pytest.MonkeyPatch, case: Any) -> None:
    kind, precision, seq_len, rows, checkpointing, fused = case
    for place in ("homelab.worker.model.fused_loss", "homelab.controller.planning.memory.rank_memory"):
        monkeypatch.setattr(f"{place}.CHUNK_LOGITS", 64 * CONFIG["vocab_size"])
    how, settings = method(kind), train(seq_len, checkpointing, fused)
    real = really(folder, how, settings, precision, rows, rows > 1)
    dry = memory_dry_run.dry_run(CONFIG, how, settings, Situation("cpu", precision, micro_batch=rows, masked=rows > 1))
    assert dry["peak_bytes"] == pytest.approx(real.peak_bytes, rel=0.02), (dry, real.items)
    assert dry["at"] == real.at
    assert sum(dry["items"].values()) == dry["peak_bytes"] and set(dry["items"]) <= set(rank_memory.SEEN_BY_A_DRY_RUN)
    assert estimated(how, settings, precision, "cpu", rows) == pytest.approx(dry["peak_bytes"], rel=0.10)


# (method, precision, rows)
MIXTURES = [("lora", "bf16", 1), ("qlora", "bf16", 1)]
MORE_MIXTURES = [("full", "fp32", 1), ("full", "bf16", 3), ("qlora", "fp32", 3), ("lora", "fp32", 3), ("lora 8bit", "bf16", 3)]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "case",
    [*MIXTURES, *(pytest.param(case, marks=pytest.mark.thorough) for case in MORE_MIXTURES)],
    ids=lambda case: "-".join(map(str, case)),
)
def test_the_step_of_a_mixture_of_experts_is_that_of_the_real_one(tmp_path: Path, case: Any) -> None:
    kind, precision, rows = case
    torch.manual_seed(0)
    known = {key: value for key, value in MIXTURE.items() if key != "model_type"}
    transformers.MixtralForCausalLM(transformers.MixtralConfig(**known)).save_pretrained(tmp_path / "mixtral")
    how, settings = method(kind), train(320, False, True)

    real = really(tmp_path / "mixtral", how, settings, precision, rows, rows > 1)
    dry = memory_dry_run.dry_run(MIXTURE, how, settings, Situation("cpu", precision, micro_batch=rows, masked=rows > 1))

    assert dry["peak_bytes"] == pytest.approx(real.peak_bytes, rel=0.02), (dry, real.items)


def test_a_card_without_bf16_makes_the_gradient_of_frozen_experts_too() -> None:
    small = {**MIXTURE, "vocab_size": 64, "num_hidden_layers": 1}
    # one matrix of all experts of the layer, 16 bits an element
    experts_bytes = 4 * CONFIG["hidden_size"] * 2 * CONFIG["intermediate_size"] * 2
    newer, older = (memory_dry_run.dry_run(small, method("lora"), train(8, False, True), Situation("cuda", precision, micro_batch=1, masked=False))
                    for precision in ("bf16", "fp16"))  # fmt: skip

    assert older["peak_bytes"] - newer["peak_bytes"] == pytest.approx(experts_bytes, rel=0.1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "paged_adamw_8bit"])
def test_optimizer_state_is_that_of_the_real_one(folder: Path, optimizer: str) -> None:
    how, settings = method("lora"), train(16, True, True, optimizer)
    dry = memory_dry_run.dry_run(CONFIG, how, settings, Situation("cpu", "fp32", micro_batch=1, masked=False))
    real = really(folder, how, settings, "fp32", 1, False)
    # bitsandbytes also keeps its tables of 256 values, once for each optimizer.
    assert dry["items"][memory_items.OPTIMIZER] == pytest.approx(real.items[memory_items.OPTIMIZER], abs=10_000)


@pytest.mark.thorough
@pytest.mark.timeout(60)
def test_the_kernels_of_a_gpu() -> None:
    config = CONFIG | {"num_hidden_layers": 2, "vocab_size": 64}
    how = method("lora")

    def peak(precision: str, masked: bool, device: str = "cuda", repeats: bool = False) -> int:
        situation = Situation(device, precision, micro_batch=1, masked=masked, repeats_keys=repeats)
        return int(memory_dry_run.dry_run(config, how, train(512, False, False), situation)["peak_bytes"])

    assert peak("bf16", True) > peak("bf16", False)
    # Keys are repeated where no kernel takes grouped queries: k and v of both layers twice as wide, and no matrix of scores.
    for precision, width in (("bf16", 2), ("fp32", 4)):
        more = peak(precision, False, repeats=True) - peak(precision, False)
        assert more == pytest.approx(2 * 2 * 512 * 64 * width, rel=0.2), precision
        for repeats in (False, True):
            found = estimated(how, train(512, False, False), precision, "cuda", 1, config, repeats_keys=repeats)
            assert found == pytest.approx(peak(precision, False, repeats=repeats), rel=0.10), (precision, repeats)


@pytest.mark.timeout(180)
def test_adapters_of_a_quantised_matrix_keep_no_copies_on_a_card() -> None:
    """PEFT asks whether CUDA's autocast is on: on a card it is, on a CPU, fake or real, it is not."""
    pytest.importorskip("bitsandbytes")
    # the peak is at the logits, when all layers hold what they save
    settings, asked = train(512, False, False), torch.is_autocast_enabled
    saved = {
        kind: memory_dry_run.dry_run(CONFIG, method(kind), settings, Situation("cuda", "bf16", micro_batch=1, masked=False))["items"]
        for kind in ("lora", "qlora", "lora 8bit")
    }
    less = saved["lora"][memory_items.ACTIVATIONS] - saved["qlora"][memory_items.ACTIVATIONS]
    assert less == pytest.approx(512 * 2 * 2 * 4 * 128, rel=0.02)
    assert saved["lora 8bit"][memory_items.ACTIVATIONS] == pytest.approx(saved["qlora"][memory_items.ACTIVATIONS], rel=0.02)
    assert torch.is_autocast_enabled is asked


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_asked_as_an_agent_asks() -> None:
    about = {"device": "cuda", "precision": "bf16", "micro_batch": 2, "seq_len": 64, "masked": True, "repeats_keys": False}
    question = {
        "config": CONFIG,
        "method": method("qlora"),
        "train": train(8, True, True),
        "situations": [about, about | {"seq_len": 128}],
        "time_limit_s": 540,
    }
    done = subprocess.run(
        [sys.executable, "-m", "homelab.node", "dry-run"], input=json.dumps(question) + "\n", capture_output=True, text=True, timeout=550
    )
    results = json.loads(done.stdout)["results"]
    assert len(results) == 2 and results[0]["peak_bytes"] < results[1]["peak_bytes"] and results[0]["at"].startswith("aten.")
    unknown = question | {"config": {"model_type": "no-such-kind"}}
    done = subprocess.run(
        [sys.executable, "-m", "homelab.node", "dry-run"], input=json.dumps(unknown) + "\n", capture_output=True, text=True, timeout=550
    )
    refusal = json.loads(done.stdout)["error"]
    assert "does not know models of type no-such-kind" in refusal["message"] and "homelab setup --upgrade" in refusal["hint"]


def test_the_tracker_by_hand() -> None:
    kept = torch.zeros(1000)
    with memory_tracker.Tracker(7, rounding_bytes=512) as watch:
        watch.hold([kept], memory_items.BASE_WEIGHTS)
        watch.hold([kept[:10]], memory_items.GRADIENTS)  # the same storage: counted once
        first = kept + 1
        view = first[::2].t()
        del first
        with watch.making(memory_items.OPTIMIZER):
            second = view.clone()
        del view
        third = torch.empty(3, 7)
        assert watch.live_bytes == 4096 + 2048 + 512
        del second, third
        assert watch.live_bytes == 4096
    assert watch.peak_bytes == 4096 + 4096 + 2048 and watch.at == "aten.clone.default"
    assert watch.items == {memory_items.BASE_WEIGHTS: 4096, memory_items.ACTIVATIONS: 4096, memory_items.OPTIMIZER: 2048}


def test_a_target_that_the_model_lacks_is_one_clear_error() -> None:
    with pytest.raises(WorkerError, match="adapters do not fit"):
        memory_dry_run.dry_run(
            CONFIG, method("lora", ["no_such"]), train(8, True, False), Situation("cpu", "fp32", micro_batch=1, masked=False)
        )
