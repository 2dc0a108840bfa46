"""The model that answers is the one that was trained, and it says where there is no memory for it. Processes: see test_stop.py."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from homelab.worker.errors import WorkerError
from homelab.worker.model import build, weight_digests
from homelab.worker.model.build import load_model
from homelab.worker.runtime.task import load_task
from homelab.worker.tools import chat, footprint
from homelab.worker.tools.footprint import Place, RoomOnCard, choose
from tests.processes import living
from tests.worker import harness

GB = 10**9


@pytest.fixture
def run(tmp_path: Path, model: Path, data: Path, request: pytest.FixtureRequest) -> Path:
    """A run folder that was planned; nothing is trained in it."""
    run = harness.make_run(tmp_path / "run", model, data, method__kind=getattr(request, "param", "qlora"))
    harness.make_plan(run, 1, [12])
    return run


@pytest.mark.timeout(60)
@pytest.mark.parametrize("run", ["qlora", "lora"], indirect=True)
def test_chat_asks_the_weights_that_were_trained(run: Path, model: Path) -> None:
    task = load_task({"HOMELAB_RUN_DIR": str(run), "HOMELAB_ATTEMPT": "1", "HOMELAB_NODE": "here"})
    trained = load_model(task, str(model), lambda note: None)
    with torch.no_grad():
        for name, weight in trained.named_parameters():
            if "lora_B" in name:  # they begin as zeros
                weight.copy_(torch.linspace(-0.1, 0.1, weight.numel()).view(weight.shape))
    trained.save_pretrained(run / "final", save_embedding_layers=False)
    asked = chat.load(task.run, run, str(model), run / "final", None)
    tokens = torch.arange(3, 40).view(1, -1)
    with torch.no_grad():
        wanted, found = trained.eval()(input_ids=tokens).logits, asked.eval()(input_ids=tokens).logits
    assert torch.equal(wanted, found)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_base_that_the_training_has_quantised_is_not_quantised_again(
    is_damaged: bool, tmp_path: Path, model: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = harness.make_run(tmp_path / "runs" / "one", model, data, method__kind="qlora")
    harness.make_plan(run, 1, [12])
    task, said = load_task({"HOMELAB_RUN_DIR": str(run), "HOMELAB_ATTEMPT": "1", "HOMELAB_NODE": "here"}), list[str]()
    with weight_digests.noting_sources():
        trained = load_model(task, str(model), said.append)
    (kept,) = (tmp_path / "bases").glob("*/made.json")
    if is_damaged:
        kept.write_text("{}")
    read, paths = build.load_base, []
    monkeypatch.setattr(build, "load_base", lambda path, *rest, **options: paths.append(path) or read(path, *rest, **options))
    asked = chat.load(task.run, run, str(model), None, None)
    assert paths == [str(kept.parent), *([str(model)] if is_damaged else [])]
    with torch.no_grad(), trained.disable_adapter():
        wanted, found = (one.eval()(input_ids=torch.arange(3, 40).view(1, -1)).logits for one in (trained, asked))
    assert torch.equal(wanted, found)


@pytest.mark.timeout(60)
def test_the_reckoned_bytes_are_those_of_the_loaded_weights(run: Path, model: Path) -> None:
    described = json.loads((run / "run.json").read_text())
    loaded = chat.load(described, run, str(model), None, None)
    held = 0
    for weight in loaded.parameters():
        held += weight.numel() * weight.itemsize
        if (state := getattr(weight, "quant_state", None)) is not None:
            held += sum(part.numel() * part.itemsize for part in (state.absmax, state.state2.absmax))
    empty = {"quantisation": "nf4", "dtype": torch.float32, "tokens": 0}
    largest = max(weight.numel() for name, weight in loaded.named_parameters() if "embed" in name) * 4
    needed = footprint.answer_bytes(str(model), None, added_bytes=0, **empty)
    assert needed is not None
    assert needed == pytest.approx(1.05 * (held + 2 * largest), rel=0.02)
    added = footprint.answer_bytes(str(model), None, added_bytes=1000, **{**empty, "tokens": 10})
    assert added == pytest.approx(needed + 1.05 * (1000 + 2 * 2 * 2 * 16 * 10 * 4), abs=2)  # two layers of two heads, 16 wide
    assert footprint.answer_bytes(str(run), None, added_bytes=0, **empty) is None, "no model: transformers says what is wrong"


def test_wholly_trained_weights_need_room_beside_their_base_and_an_adapter_does_not(
    run: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed: list[int | None] = []
    monkeypatch.setattr(footprint, "choose", lambda wanted, cards, ram, **names: needed.append(wanted))
    shutil.copytree(model, run / "final")
    described = json.loads((run / "run.json").read_text())
    for kind in ("full", "lora"):
        described["recipe"]["method"] = {**described["recipe"]["method"], "kind": kind}
        for beside_base in (False, True):
            chat.place(described, run, str(model), run / "final", 10, beside_base=beside_base)
    full, with_base, adapter, adapter_with_base = needed
    assert full and with_base == 2 * full and adapter == adapter_with_base


def test_it_is_asked_as_it_was_trained(tokenizer) -> None:
    def text(**data: str) -> str:
        return str(
            tokenizer.decode(chat.encode({"recipe": {"data": data}}, tokenizer, [{"role": "user", "content": "2+2="}])["input_ids"][0])
        )

    assert text() == text(template="auto") == "<|start|>user\n2+2=<|end|>\n<|start|>assistant\n"
    assert text(template="none") == "2+2="


def test_what_was_written_by_an_older_version_is_asked_too(tmp_path: Path) -> None:
    assert chat._precision(tmp_path) == "fp32"
    assert chat._training_cards({}, tmp_path) == set()


class TestPlace:
    @staticmethod
    def of(needed: int | None, *cards: RoomOnCard, ram: int | None = 8 * GB) -> Place:
        return choose(needed, cards, ram, run="r1", model="/m")

    def test_the_card_with_most_free_memory(self) -> None:
        assert self.of(4 * GB, RoomOnCard(0, "A", 5 * GB), RoomOnCard(1, "B", 6 * GB)) == Place(1)
        assert self.of(None, RoomOnCard(0, "A", 1)) == Place(0), "what is not known is tried"
        assert self.of(4 * GB) == self.of(None) == self.of(4 * GB, ram=None) == Place(None)

    def test_the_cpu_where_no_card_has_room_and_it_is_said(self) -> None:
        place = self.of(7 * GB, RoomOnCard(0, "RTX 4070", 6 * GB))
        assert place.card is None
        assert place.note == "answered on the CPU, slowly: the model needs about 7.00 GB to answer, and card 0 (RTX 4070) has 6.00 GB free"

    def test_both_numbers_and_what_mends_it_where_there_is_no_room(self) -> None:
        with pytest.raises(WorkerError) as refused:
            self.of(14 * GB, RoomOnCard(0, "RTX 4070", 6 * GB))
        assert "about 14.00 GB to answer: card 0 (RTX 4070) has 6.00 GB free, and RAM has 8.00 GB free" in refused.value.message
        assert "nvidia-smi" in refused.value.hint
        with pytest.raises(WorkerError, match="there is no card, and RAM has"):
            self.of(14 * GB)

    def test_the_run_that_holds_the_card_is_named(self) -> None:
        busy = RoomOnCard(0, "RTX 4070", 6 * GB, is_training=True)
        assert self.of(4 * GB, busy).note == "answered during the training: the run trains on card 0 now"
        assert "the run trains on it now" in str(self.of(7 * GB, busy).note)
        with pytest.raises(WorkerError) as refused:
            self.of(14 * GB, busy)
        assert "homelab stop r1" in refused.value.hint


@pytest.fixture
def rank_of_r1() -> Iterator[int]:
    """The pid of a process that belongs to the run r1."""
    with living(HOMELAB_RUN="r1") as process:
        yield process.pid


@pytest.mark.timeout(20)
def test_a_card_is_busy_while_a_rank_of_the_run_lives(tmp_path: Path, rank_of_r1: int) -> None:
    attempt = tmp_path / "attempts" / "2"
    for rank, pid in ((0, rank_of_r1), (1, os.getpid())):  # the second number belongs to somebody else by now
        (attempt / "ranks" / str(rank)).mkdir(parents=True)
        (attempt / "ranks" / str(rank) / "heartbeat.json").write_text(json.dumps({"pid": pid}))
    ranks = [{"rank": 0, "local_rank": 1}, {"rank": 1, "local_rank": 0}]
    (attempt / "plan.json").write_text(json.dumps({"device": "cuda", "precision": "bf16", "ranks": ranks}))
    assert chat._training_cards({"name": "r1"}, tmp_path) == {1}
    assert chat._precision(tmp_path) == "bf16"
    (attempt / "plan.json").write_text(json.dumps({"device": "cpu", "precision": "bf16", "ranks": ranks}))
    assert chat._training_cards({"name": "r1"}, tmp_path) == set()
