"""Of the base in NF4 that is kept on the disk: the layers of one stage, and layers that come one by one because they lie on the host."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from homelab.shared.law.stage import Stage
from homelab.worker.model import build, quantised_writing, weight_digests
from homelab.worker.model.host_layers import HostLayers
from homelab.worker.model.pretrained import WHOLE, LoadedPart
from homelab.worker.strategies.pipeline import stage_model, streamed_stage
from tests.worker import harness
from tests.worker.model import tiny_models
from tests.worker.strategies.pipeline.test_mixtures import FAMILIES

pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

LAYERS = 6
TIED = {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
MORE = {name: FAMILIES[name] for name in ("qwen3_moe", "deepseek_v3", "gpt_oss")} | {"gemma3_text": TIED}


class Node:
    """A node's disk with a model of its own, and what its worker said and read."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.source, self.bases = source, folder / "bases"
        self.said: list[str] = []
        self.task = harness.task_of(folder / "runs" / "one", model__name=str(source), method__kind="qlora")

    def load(self, part: LoadedPart = WHOLE) -> Any:
        self.said.clear()
        with weight_digests.noting_sources():
            return build._load_base(self.task, str(self.source), self.said.append, part)

    @property
    def kept(self) -> list[str]:
        """What is there beside locks: name without model, key and type."""
        return sorted(path.name.split("-nf4-")[-1].split("-", 1)[-1] for path in self.bases.iterdir() if path.suffix != ".lock")

    def says(self, *words: str) -> bool:
        said = [line for line in self.said if "quantised base" in line or line.startswith("base: quantised")]
        return len(said) == len(words) and all(word in line for word, line in zip(words, said, strict=True))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.tiny_llama(tmp_path_factory.mktemp("deep") / "tiny-llama", hidden=64, intermediate=128, layers=LAYERS)


@pytest.fixture
def node(files: Path, tmp_path: Path) -> Node:
    return Node(tmp_path, files)


def stage(begin: int, end: int, layers: int = LAYERS) -> Stage:
    number = 0 if begin == 0 else 2 if end == layers else 1
    return Stage(number, 3, begin, end, layers)


def resident(begin: int, end: int, **options: Any) -> LoadedPart:
    reader = functools.partial(stage_model.load, stage=stage(begin, end), **options)
    return LoadedPart(reader, f"layers-{begin}-{end}", is_stage=True)


def streamed(begin: int, end: int, count: int, file: Path | None = None) -> LoadedPart:
    """The whole model where `end` is 0."""
    own = stage(begin, end) if end else None
    reader = functools.partial(streamed_stage.load, stage=own, host=HostLayers(torch.device("cpu"), file=file), count=count)
    return LoadedPart(reader, f"layers-{begin}-{end}" if end else "", is_stage=bool(end))


MORE_CUTS = [(*cut, is_on_disk) for cut in ((0, 2, 1), (2, 5, 3), (2, 5, 2), (5, 6, 1), (0, 0, 6)) for is_on_disk in (False, True)]
READ, STORED = "quantised before, read from", "stored for the next start"


@pytest.mark.parametrize(("begin", "end"), [(0, 2), (2, 5), (5, 6)])
def test_a_stage_is_read_again_and_no_other_takes_it_for_its_own(begin: int, end: int, node: Node) -> None:
    first = node.load(resident(begin, end))
    assert node.says(STORED) and node.kept == [f"layers-{begin}-{end}-float32"]
    again = node.load(resident(begin, end))
    assert node.says(READ) and weight_digests.base(again) == weight_digests.base(first)
    node.load(resident(1, 4))
    assert node.says(STORED) and len(node.kept) == 2, "another cut"


@pytest.mark.parametrize("kind", ["qwen3_moe", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in MORE if kind != "qwen3_moe")])
def test_every_family_is_kept(kind: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {**tiny_models.CONFIGS["llama"], **sizes, **MORE[kind]}
    torch.manual_seed(1)
    transformers = pytest.importorskip("transformers")
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config)).save_pretrained(tmp_path / "model")
    node = Node(tmp_path, tmp_path / "model")
    for begin, end in [(0, 2), (2, 6)]:
        made = weight_digests.base(node.load(resident(begin, end)))
        assert node.says(STORED)
        assert weight_digests.base(node.load(resident(begin, end))) == made and node.says(READ)
        assert weight_digests.base(node.load(streamed(begin, end, end - begin))) == made and node.says(READ)


@pytest.mark.parametrize(
    ("begin", "end", "count", "on_disk"),
    [(2, 5, 3, True), (0, 0, 3, False), *(pytest.param(*case, marks=pytest.mark.thorough) for case in MORE_CUTS)],
)
def test_layers_that_are_streamed_are_those_of_resident_ones(
    begin: int, end: int, count: int, on_disk: bool, node: Node, tmp_path: Path
) -> None:
    file = tmp_path / "layers" if on_disk else None
    there = resident(begin, end) if end else WHOLE
    made = weight_digests.base(node.load(streamed(begin, end, count, file)))
    assert node.says(STORED)
    for part in (streamed(begin, end, count, file), streamed(begin, end, 1), there):
        assert weight_digests.base(node.load(part)) == made and node.says(READ)
    shutil.rmtree(node.bases)
    assert weight_digests.base(node.load(there)) == made and node.says(STORED)
    assert weight_digests.base(node.load(streamed(begin, end, count, file))) == made and node.says(READ)


@pytest.mark.parametrize("damage", ["bit", "gone", "another layer"])
def test_a_damaged_layer_is_seen_and_all_are_made_anew(damage: str, node: Node) -> None:
    made = weight_digests.base(node.load(streamed(2, 5, 3)))
    (folder,) = (path for path in node.bases.iterdir() if path.is_dir())
    last = folder / "model-00002.safetensors"
    if damage == "bit":
        content = bytearray(last.read_bytes())
        content[-1000] ^= 1
        last.write_bytes(content)
    elif damage == "gone":
        last.unlink()
    else:
        index = folder / "model.safetensors.index.json"
        index.write_text(index.read_text().replace("model-00002", "model-00001"))
    assert weight_digests.base(node.load(streamed(2, 5, 3))) == made and node.says("is damaged", STORED)
    assert weight_digests.base(node.load(resident(2, 5))) == made and node.says(READ)


def test_a_start_that_ends_between_two_layers_leaves_nothing_that_counts(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    load, pieces = stage_model.load, []

    def third_fails(*arguments: Any, **options: Any) -> Any:
        pieces.append(options["stage"])
        if len(pieces) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return load(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(stage_model, "load", third_fails)
        with pytest.raises(torch.OutOfMemoryError):
            node.load(streamed(0, 0, 6))
    assert node.kept == []
    with monkeypatch.context() as patched:  # as a process that is killed leaves it
        patched.setattr(shutil, "rmtree", lambda *_arguments, **_options: None)
        patched.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        node.load(resident(0, 2))
    assert [name.endswith(".partial") for name in node.kept] == [True]
    node.load(resident(0, 2))
    assert node.says(STORED) and node.kept == ["layers-0-2-float32"]


def test_each_rank_of_a_node_keeps_its_own_stage_and_the_last_cuts_stay(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1, 100))
    utime = os.utime

    def used(path: Any, *_: Any) -> None:
        utime(path, (next(clock), 2**31))

    monkeypatch.setattr(os, "utime", used)
    node.task.__dict__["local_rank"] = 1
    for number, (begin, end) in enumerate([(0, 2), (2, 6), (0, 3), (3, 6)]):
        node.load(resident(begin, end))
        assert node.says(STORED) and len(node.kept) == number + 1
        (made,) = node.bases.glob(f"*layers-{begin}-{end}-*/made.json")
        utime(made, (number, number))
    node.load(resident(0, 2))
    assert node.says(READ)
    node.load(resident(0, 4))
    assert node.kept == ["layers-0-2-float32", "layers-0-3-float32", "layers-0-4-float32", "layers-3-6-float32"], "2 to 6 was used first"


@pytest.mark.parametrize("on_disk", [False, True])
def test_layers_for_which_the_disk_has_no_room_are_read_all_the_same(
    on_disk: bool, node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file of the layers that are streamed comes first: the training needs it."""
    file = tmp_path / "layers" if on_disk else None
    made = node.load(streamed(0, 0, 6, file))
    (folder,) = (path for path in node.bases.iterdir() if path.is_dir())
    layer_bytes = (folder / "model-00003.safetensors").stat().st_size
    shutil.rmtree(node.bases)
    saved, save = 0, quantised_writing._Writer._save

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal saved
        saved += 1
        save(*arguments, **options)

    def usage(_folder: Any) -> Any:
        """Room for eight layers after what is no layer; what is written takes its part."""
        taken = max(0, saved - 1) * (2 if on_disk else 1) * layer_bytes
        return SimpleNamespace(free=2 * 10**9 + 8 * layer_bytes - taken if saved else 10**12)

    monkeypatch.setattr(quantised_writing._Writer, "_save", counted)
    monkeypatch.setattr(shutil, "disk_usage", usage)
    again = node.load(streamed(0, 0, 6, file))
    assert weight_digests.base(again) == weight_digests.base(made)
    assert node.says("is not stored" if on_disk else STORED) and len(node.kept) == (not on_disk)
    assert saved == (1 if on_disk else 7), "no layer is written in vain"


@pytest.fixture(autouse=True)
def _no_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing but a load of this test sets a quantiser."""
    yield
    from transformers.quantizers import auto

    assert auto.AUTO_QUANTIZER_MAPPING["bitsandbytes_4bit"].__module__.startswith("transformers")
