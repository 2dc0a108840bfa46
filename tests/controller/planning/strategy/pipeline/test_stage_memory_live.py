"""What a stage is planned to hold against what it really holds: live storages followed through the passes and the step of a real stage, whose
neighbours are played by this process."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

import torch.distributed as dist

from homelab.controller.planning.memory import rank_memory, streamed_memory
from homelab.controller.planning.memory.rank_memory import RankSetup
from homelab.controller.planning.model.families import from_config
from homelab.controller.planning.strategy.pipeline import stage_memory
from homelab.controller.planning.strategy.pipeline.stage_memory import Part
from homelab.shared.law.stage import Stage
from homelab.shared.recipe import Method, Train
from homelab.worker.model import host_layers
from homelab.worker.model.build import load_model
from homelab.worker.model.layer_major import LayerMajor
from homelab.worker.model.pretrained import DTYPES
from homelab.worker.strategies.pipeline import stage_model
from homelab.worker.strategies.pipeline.neighbours import Channel, Neighbours
from homelab.worker.strategies.pipeline.passes import PipelinePasses
from homelab.worker.strategies.pipeline.shared_table import SharedTable
from homelab.worker.strategies.pipeline.stage_model import decoder_of
from homelab.worker.strategies.registry import strategy_of
from homelab.worker.tools.memory_dry_run import _storages
from tests.controller.planning.memory.test_memory_live import LiveStorages
from tests.worker import harness

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

ROWS, LENGTH, LAYERS, PASSES = 2, 64, 8, 6
BELOW, ABOVE = 0.98, 1.15
CUTS = {"first": (0, 3), "middle": (3, 5), "last": (5, 8)}


@dataclass(frozen=True)
class Case:
    """`place` of three stages; `layers`: (begin, end) where it is not that of CUTS."""

    place: Literal["first", "middle", "last"]
    kind: str
    precision: str
    in_flight: int = 1
    checkpointing: bool = False
    packing: bool = False
    layers: tuple[int, int] | None = None
    fused_loss: bool = False
    vocabulary: int = 1000
    streamed: int = 0
    tied: bool = False
    ends: bool = False  # adapters on embeddings and head, too

    def __str__(self) -> str:
        begin, end = self.layers or CUTS[self.place]
        switches = [f"{self.streamed} streamed"] if self.streamed else []
        switches += [name for name in ("checkpointing", "packing", "fused_loss", "tied", "ends") if getattr(self, name)]
        return " ".join([self.place, self.kind, self.precision, f"{end - begin} layers", f"{self.in_flight} in flight", *switches])

    @property
    def stage(self) -> Stage:
        begin, end = self.layers or CUTS[self.place]
        return Stage(list(CUTS).index(self.place), 3, begin, end, LAYERS, in_flight=self.in_flight)


CASES = [
    Case("first", "lora", "fp32", 5),
    Case("first", "lora", "bf16", 5),
    Case("first", "lora", "bf16", 3, checkpointing=True),
    Case("first", "lora", "fp32", 2, packing=True),
    Case("middle", "lora", "fp32", 3),
    Case("middle", "lora", "bf16", 3),
    Case("middle", "lora", "bf16", 3, layers=(3, 4)),
    Case("middle", "lora", "bf16", 5, layers=(1, 7), checkpointing=True),
    Case("middle", "lora", "fp32", 3, checkpointing=True, packing=True),
    Case("last", "lora", "fp32"),
    Case("last", "lora", "bf16"),
    Case("last", "lora", "bf16", checkpointing=True, fused_loss=True),
    Case("last", "lora", "fp32", checkpointing=True, packing=True, vocabulary=200),
    Case("first", "qlora", "bf16", 5, checkpointing=True),
    Case("middle", "qlora", "fp32", 3),
    Case("last", "qlora", "bf16"),
    Case("first", "full", "bf16", 3),
    Case("first", "full", "fp32", 5, checkpointing=True),
    Case("middle", "full", "bf16", 3),
    Case("middle", "full", "bf16", 3, checkpointing=True),
    Case("middle", "full", "fp32", 2),
    Case("last", "full", "bf16"),
    Case("last", "full", "fp32", checkpointing=True),
    Case("first", "lora", "fp32", 3, layers=(0, 6), streamed=6),
    Case("middle", "lora", "bf16", 3, layers=(1, 7), streamed=4),
    Case("last", "lora", "fp32", layers=(2, 8), streamed=6, vocabulary=200),
    Case("middle", "qlora", "fp32", 2, layers=(1, 7), streamed=6),
    Case("last", "qlora", "bf16", layers=(2, 8), streamed=5),
    Case("first", "full", "fp32", 5, checkpointing=True, tied=True, vocabulary=4000),
    Case("middle", "full", "bf16", 3, tied=True),
    Case("last", "full", "bf16", tied=True),
    Case("first", "full", "bf16", 3, tied=True),
    Case("last", "full", "fp32", checkpointing=True, tied=True, fused_loss=True, vocabulary=4000),
    Case("last", "lora", "bf16", tied=True),
    Case("middle", "lora", "bf16", 3, ends=True),
    Case("last", "lora", "bf16", ends=True, vocabulary=4000),
    Case("first", "lora", "bf16", 3, ends=True, vocabulary=4000),
    Case("first", "qlora", "fp32", 5, checkpointing=True, ends=True, vocabulary=4000),
    Case("last", "lora", "fp32", checkpointing=True, fused_loss=True, ends=True, vocabulary=4000),
]
ENDS = ("q_proj", "down_proj", "embed_tokens", "lm_head")


@functools.cache
def config(vocabulary: int, tied: bool = False) -> Any:
    return transformers.LlamaConfig(
        hidden_size=128, intermediate_size=384, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, vocab_size=vocabulary,
        attn_implementation="sdpa", pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=tied,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, bool], Path]:
    """The folder of a random model with a vocabulary of this size."""
    root = tmp_path_factory.mktemp("models")

    def save(vocabulary: int, tied: bool) -> Path:
        path = root / f"{vocabulary} {tied}"
        if not path.exists():
            transformers.LlamaForCausalLM(config(vocabulary, tied)).save_pretrained(path)
        return path

    return save


def task_of(case: Case, path: Path, run: Path) -> Any:
    stages = [{"number": number, "begin": 0, "end": 1, "layers": LAYERS} for number in range(3)]
    stage = case.stage
    streaming = {"layers": case.streamed, "group": 1, "places": 2, "host": "memory"} if case.streamed else None
    stages[stage.number] = {"number": stage.number, "begin": stage.begin, "end": stage.end, "layers": LAYERS, "in_flight": stage.in_flight}
    ranks = [{"rank": rank, "node": "here", "share": 12, "stage": stages[rank], "streaming": streaming} for rank in range(3)]
    recipe = {"model__name": str(path), "method__kind": case.kind, "method__rank": 8, "train__gradient_checkpointing": case.checkpointing}
    recipe |= {"method__targets": list(ENDS)} if case.ends else {}
    return harness.task_of(
        run, ["here"] * 3, rank=stage.number, plan={"ranks": ranks, "precision": case.precision, "strategy": "pipeline"},
        train__precision=case.precision, train__fused_loss=case.fused_loss, data__packing=case.packing, **recipe,
    )  # fmt: skip


class Done:
    """A message that is here, or gone, when somebody asks."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


def batch_of(case: Case, draw: Any) -> dict[str, Any]:
    rows = 1 if case.packing else ROWS
    tokens = torch.randint(3, case.vocabulary, (rows, LENGTH * ROWS // rows), generator=draw)
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if case.packing:
        return batch | {"position_ids": torch.cat([torch.arange(50), torch.arange(tokens.shape[1] - 50)]).unsqueeze(0)}
    mask = torch.ones_like(tokens)
    mask[0, -5:] = 0
    return batch | {"attention_mask": mask}


def held_bytes(case: Case, path: Path, run: Path) -> int:
    """The most that torch holds of a stage, over the passes of a step and the optimizer's step."""
    task, stage = task_of(case, path, run), case.stage
    model = load_model(task, str(path), lambda note: None, strategy_of(task, 1).part).train()
    tracker = LiveStorages()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    for held in [
        *model.buffers(),
        *(parameter.grad for parameter in trained),
        *(part for parameter in model.parameters() for part in _storages(parameter)),
    ]:
        tracker.see(held.untyped_storage())
    channel = functools.partial(Channel, 0, None)
    ends = Neighbours(
        None if stage.is_first else channel(),
        None if stage.is_first else channel(),
        None if stage.is_last else channel(),
        None if stage.is_last else channel(),
    )
    dtype = torch.float32 if case.kind == "full" else DTYPES[case.precision]
    context = functools.partial(torch.autocast, "cpu", DTYPES[case.precision], enabled=case.precision != "fp32")
    layer_major, host = None, host_layers.of(model)
    if host is not None:
        layer_major = LayerMajor(decoder_of(model), range(stage.begin, stage.end), host, context, torch.manual_seed, lambda: None)
    pipeline = PipelinePasses(model, stage, ends, dtype, torch.device("cpu"), 128, context, lambda: None, layer_major)
    draw = torch.Generator().manual_seed(1)
    batches = [batch_of(case, draw) for _ in range(PASSES)]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    for parameter in trained:  # a later step: the moments are there
        optimizer.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
        for moment in ("exp_avg", "exp_avg_sq"):
            tracker.see(optimizer.state[parameter][moment].untyped_storage())
    with tracker:
        pipeline.step(batches, [0] * PASSES, torch.tensor(1000), lambda loss: loss.backward())
        if case.tied and case.kind == "full" and case.place != "middle":
            SharedTable(*stage_model.table_of(model), 0, None, torch.device("cpu"), is_second=stage.is_last).sum_gradients(lambda: None)
        optimizer.step()
    return tracker.peak_bytes


def planned_items(case: Case) -> dict[str, int]:
    shape = from_config(config(case.vocabulary, case.tied).to_dict())
    shape = shape.equal if shape is not None else None
    assert shape is not None
    rows = 1 if case.packing else ROWS
    train = Train(
        global_batch=12, steps=1, learning_rate=1e-3, seq_len=LENGTH * ROWS // rows, gradient_checkpointing=case.checkpointing, fused_loss=case.fused_loss,
        optimizer="adamw",
    )  # fmt: skip
    stage = case.stage
    part = Part(stage.end - stage.begin, stage.is_first, stage.is_last)
    setup = RankSetup(case.precision, "cpu", rows, 3, masked=True)
    method: Any = Method(kind=case.kind, rank=8, targets=ENDS if case.ends else "all-linear")  # type: ignore[arg-type]
    items = stage_memory.estimate(shape, method, train, setup, part, stage.in_flight)
    if case.streamed:
        items = stage_memory.estimate(shape, method, dataclasses.replace(train, gradient_checkpointing=True), setup, part, stage.in_flight)
        layer, boundary = streamed_memory.layer_bytes(shape, method, case.precision), streamed_memory.boundary_bytes(shape, train, setup)
        items = streamed_memory.on_device(items, layer, boundary, case.streamed, stage.in_flight, part.layers)
    return {item.name: item.size_bytes for item in items if item.name != rank_memory.PROCESS}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if number % 4 == 0 else pytest.mark.thorough) for number, case in enumerate(CASES)], ids=str
)
def test_a_stage_holds_what_is_planned(
    case: Case, folder: Callable[[int, bool], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def arrives(tensor: Any, *_args: Any, **_kwargs: Any) -> Done:
        tensor.normal_()
        return Done()

    monkeypatch.setattr(dist, "irecv", arrives)
    monkeypatch.setattr(dist, "isend", lambda *_args, **_kwargs: Done())
    items = planned_items(case)
    held = held_bytes(case, folder(case.vocabulary, case.tied), tmp_path)
    planned = sum(items.values())
    print(f"RATIO {planned / held:.3f} {case} held {held / 1e6:.2f}", {name: round(size / 1e6, 2) for name, size in items.items()})
    assert BELOW <= planned / held <= ABOVE, items
