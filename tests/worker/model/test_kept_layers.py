"""Layers in NF4 that are kept on a node's disk: any cut of the model, and layers from the host, read those that are there, to the bit."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from homelab.shared.law.stage import Stage
from homelab.shared.protocol import lock
from homelab.worker.model import build, kept_layers, quantised_cache, weight_digests
from homelab.worker.model.host_layers import HostLayers
from homelab.worker.model.pretrained import LoadedPart
from homelab.worker.strategies.pipeline import stage_model, stage_reader
from tests.worker import harness
from tests.worker.model import tiny_models
from tests.worker.strategies.pipeline.test_mixtures import FAMILIES

pytest.importorskip("bitsandbytes")
modeling_utils = pytest.importorskip("transformers.modeling_utils")
pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]

LAYERS = 6
TIED = {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
MORE = {name: FAMILIES[name] for name in ("qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_5_text", "qwen3_5_moe_text", "gemma4_text")} | {
    "gemma3_text": TIED
}
MORE_CUTS = [(*cut, is_on_disk) for cut in ((0, 2, 1), (2, 5, 3), (2, 5, 2), (5, 6, 1), (0, 6, 6)) for is_on_disk in (False, True)]


class Node:
    """A node's disk with a model of its own, what its worker said, and which layers it read from the model's files."""

    def __init__(self, folder: Path, source: Path) -> None:
        self.source, self.bases = source, folder / "bases"
        self.said: list[str] = []
        self.task = harness.task_of(folder / "runs" / "one", model__name=str(source), method__kind="qlora")

    def load(self, part: LoadedPart) -> Any:
        self.said.clear()
        with weight_digests.noting_sources():
            return build._load_base(self.task, str(self.source), self.said.append, part)

    @property
    def folder(self) -> Path:
        (folder,) = (path for path in self.bases.iterdir() if path.is_dir())
        return folder

    @property
    def kept(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("layer-")) for path in self.folder.glob("layer-*.json"))

    def says(self, read: int = 0, added: int = 0, *before: str) -> bool:
        """What was said, in this order: what was in the way, how many layers were read, and how many were added."""
        said = [line for line in self.said if "quantised layers" in line or "is not stored" in line or line.endswith("quantised before")]
        said += [line for line in self.said if line.startswith("base: ") and " layers quantised" in line]
        words = [
            *before,
            *([f"base: {read} layers quantised before, read from"] if read else []),
            *([f"base: {added} layers quantised, and stored"] if added else []),
        ]
        return len(said) == len(words) and all(word in line for word, line in zip(words, said, strict=True))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.tiny_llama(tmp_path_factory.mktemp("deep") / "tiny-llama", hidden=64, intermediate=128, layers=LAYERS)


@pytest.fixture
def node(files: Path, tmp_path: Path) -> Node:
    return Node(tmp_path, files)


def part(begin: int, end: int, count: int = 0, file: Path | None = None, *, of: int = LAYERS) -> LoadedPart:
    """A stage, the whole model where it is all layers, of which `count` lie on the host."""
    is_whole = (begin, end) == (0, of)
    number = 0 if begin == 0 else 2 if end == of else 1
    host = HostLayers(torch.device("cpu"), file=file) if count else None
    stage = None if is_whole else Stage(number, 3, begin, end, of)
    reader = functools.partial(stage_reader.load, stage=stage, host=host, count=count)
    return LoadedPart(reader, takes_kept=True, is_stage=not is_whole)


@pytest.mark.parametrize(("begin", "end"), [(2, 5), *(pytest.param(*cut, marks=pytest.mark.thorough) for cut in ((0, 2), (5, 6)))])
def test_a_stage_reads_again_what_it_has_quantised(begin: int, end: int, node: Node) -> None:
    first = node.load(part(begin, end))
    assert node.says(added=end - begin) and node.kept == [*range(begin, end)]
    again = node.load(part(begin, end))
    assert node.says(read=end - begin) and weight_digests.base(again) == weight_digests.base(first)
    assert again.config.to_dict() == first.config.to_dict() and again.name_or_path == str(node.source), "stages and adapters say so"
    tokens = {"input_ids": torch.arange(3, 40).unsqueeze(0)} if begin == 0 else {"inputs_embeds": torch.ones(1, 9, 64)}
    with torch.no_grad():
        assert torch.equal(first(**tokens).logits, again(**tokens).logits)


@pytest.mark.parametrize("count", [0, 1])
def test_another_cut_quantises_no_layer_again_that_is_there(count: int, node: Node, tmp_path: Path) -> None:
    """A node that goes or comes back moves the borders between stages."""
    node.load(part(1, 3))
    for begin, end, read, added in [(0, 4, 2, 2), (2, 5, 2, 1), (0, 3, 3, 0), (3, 6, 2, 1), (0, 6, 6, 0)]:
        model = node.load(part(begin, end, count))
        assert node.says(read, added), (begin, end, node.said)
        assert all(layer.config is model.config for layer in model.modules() if hasattr(layer, "config")), "attention is set in one place"
        unkept = Node(tmp_path / f"{begin} {end}", node.source)
        assert weight_digests.base(model) == weight_digests.base(unkept.load(part(begin, end)))
    assert node.kept == [*range(6)]


@pytest.mark.parametrize("kind", ["qwen3_moe", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in MORE if kind != "qwen3_moe")])
def test_every_family_is_kept(kind: str, tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {**tiny_models.CONFIGS["llama"], **sizes, **MORE[kind]}
    torch.manual_seed(1)
    transformers = pytest.importorskip("transformers")
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config)).save_pretrained(tmp_path / "model")
    node = Node(tmp_path, tmp_path / "model")
    for begin, end in [(0, 2), (2, 5), (5, 6)]:
        made = weight_digests.base(node.load(part(begin, end)))
        assert node.says(added=end - begin)
        for count in (0, end - begin):
            assert weight_digests.base(node.load(part(begin, end, count))) == made and node.says(read=end - begin)


@pytest.mark.parametrize(
    ("begin", "end", "count", "on_disk"),
    [(2, 5, 3, True), (0, 6, 3, False), *(pytest.param(*case, marks=pytest.mark.thorough) for case in MORE_CUTS)],
)
def test_layers_that_are_streamed_are_those_of_resident_ones(
    begin: int, end: int, count: int, on_disk: bool, node: Node, tmp_path: Path
) -> None:
    file = tmp_path / "layers" if on_disk else None
    made = weight_digests.base(node.load(part(begin, end, count, file)))
    assert node.says(added=end - begin)
    for again in (part(begin, end, count, file), part(begin, end, 1), part(begin, end)):
        assert weight_digests.base(node.load(again)) == made and node.says(read=end - begin)
    shutil.rmtree(node.bases)
    assert weight_digests.base(node.load(part(begin, end))) == made and node.says(added=end - begin)
    assert weight_digests.base(node.load(part(begin, end, count, file))) == made and node.says(read=end - begin)


@pytest.mark.parametrize("count", [0, pytest.param(3, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("damage", ["bit", "gone", "another layer", "facts", "configuration"])
def test_a_damaged_layer_is_seen_and_made_anew(damage: str, count: int, node: Node) -> None:
    made = weight_digests.base(node.load(part(2, 5, count)))
    weights, facts = node.folder / "layer-00004.safetensors", node.folder / "layer-00004.json"
    if damage == "bit":
        content = bytearray(weights.read_bytes())
        content[-1000] ^= 1
        weights.write_bytes(content)
    elif damage == "gone":
        weights.unlink()
    elif damage == "another layer":
        shutil.copy(node.folder / "layer-00003.safetensors", weights)
    elif damage == "facts":
        facts.write_text("{")
    else:
        (node.folder / "config.json").unlink()
    assert weight_digests.base(node.load(part(2, 5, count))) == made, "with all that were read together with it"
    assert node.says(*((2, 1) if count else (0, 3)), "are damaged and are made again")
    assert weight_digests.base(node.load(part(2, 5))) == made and node.says(read=3)


def test_an_error_of_the_models_own_files_takes_no_kept_layer_away(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.load(part(2, 5))
    load = stage_model.load

    def refuses(path: str, **options: Any) -> Any:
        if path == str(node.source):
            raise OSError(5, "Input/output error")
        return load(path, **options)

    with monkeypatch.context() as patched:
        patched.setattr(stage_model, "load", refuses)
        with pytest.raises(OSError, match="Input/output"):
            node.load(part(1, 5))
    assert node.kept == [2, 3, 4]
    node.load(part(2, 5))
    assert node.says(read=3)


def test_a_fault_of_the_machine_takes_no_layer_away_and_is_not_tried_for_ever(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    made = weight_digests.base(node.load(part(2, 5)))

    def refuses(number: int) -> Any:
        def refused(*_arguments: Any, **_options: Any) -> None:
            raise OSError(number, os.strerror(number))

        return refused

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "TemporaryDirectory", refuses(28))
        assert weight_digests.base(node.load(part(2, 5))) == made and node.says(0, 0, "are not used: ")
    (node.folder / "layer-00003.safetensors").write_bytes(b"")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refuses(1))
        assert weight_digests.base(node.load(part(2, 5))) == made and node.says(0, 0, "are damaged")
    assert node.kept == [2, 3, 4]


def test_a_start_that_is_killed_between_two_layers_leaves_whole_ones(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    made = weight_digests.base(node.load(part(0, 6, 6)))
    shutil.rmtree(node.bases)
    replace, replaced = os.replace, []

    def third_fails(source: Any, target: Any) -> None:
        replaced.append(target)
        if str(target).endswith("layer-00002.json"):
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", third_fails)
        patched.setattr(shutil, "rmtree", lambda *_arguments, **_options: None)  # as a process that is killed leaves it
        with pytest.raises(KeyboardInterrupt):
            node.load(part(0, 6, 6))
    assert node.kept == [0, 1]
    partial = list(node.folder.glob(".partial-*"))
    for left in partial:
        os.utime(left, (0, 0))
    assert (
        partial and weight_digests.base(node.load(part(0, 6, 6))) == made and node.says(2, 4) and not list(node.folder.glob(".partial-*"))
    )


def test_what_cannot_be_written_or_is_used_alone_ends_no_training(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    made = weight_digests.base(node.load(part(2, 5)))
    (locked,) = node.bases.glob("*.lock")
    with lock.without_waiting(locked) as is_mine:
        assert is_mine
        assert weight_digests.base(node.load(part(2, 5))) == made and node.says() and node.kept == [2, 3, 4]

    def full(*_arguments: Any, **_options: Any) -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patched:
        patched.setattr(modeling_utils, "safe_save_file", full)
        node.load(part(4, 6))
        assert node.says(1, 0, "could not be stored"), node.said
    assert node.kept == [2, 3, 4] and not list(node.folder.glob(".partial-*"))
    node.task.__dict__["local_rank"] = 1
    node.load(part(0, 6, 6))
    assert node.says(read=3), "a whole model is its keeper's"
    node.load(part(5, 6))
    assert node.says(added=1), "a stage is its rank's own"


@pytest.mark.parametrize("on_disk", [False, True])
def test_layers_for_which_the_disk_has_no_room_are_read_all_the_same(
    on_disk: bool, node: Node, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file of the layers that are streamed comes first: the training needs it."""
    file = tmp_path / "layers" if on_disk else None
    made = node.load(part(0, 6, 6, file))
    layer_bytes = (node.folder / "layer-00003.safetensors").stat().st_size
    shutil.rmtree(node.bases)
    saved, save = 0, kept_layers.KeptLayers._write

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal saved
        saved += 1
        save(*arguments, **options)

    def usage(_folder: Any) -> Any:
        """Room for four layers; each that is written takes its part, in the file, too."""
        return SimpleNamespace(free=2 * 10**9 + 4 * layer_bytes - saved * layer_bytes)

    monkeypatch.setattr(kept_layers.KeptLayers, "_write", counted)
    monkeypatch.setattr(shutil, "disk_usage", usage)
    again = node.load(part(0, 6, 6, file))
    assert weight_digests.base(again) == weight_digests.base(made)
    if on_disk:
        assert node.says(0, 0, "is not stored") and saved == 0
    else:
        assert node.says(0, 4, "is not stored") and node.kept == [0, 1, 2, 3]


def test_another_source_and_another_precision_have_layers_of_their_own(node: Node, tmp_path: Path) -> None:
    node = Node(tmp_path, Path(shutil.copytree(node.source, tmp_path / "own")))
    made = weight_digests.base(node.load(part(2, 5)))
    node.task.plan["precision"] = "bf16"
    assert weight_digests.base(node.load(part(2, 5))) != made and node.says(added=3)
    node.task.plan["precision"] = "fp32"
    assert weight_digests.base(node.load(part(2, 5))) == made and node.says(read=3)
    weights = node.source / "model.safetensors"
    os.utime(weights, (1, 1))
    node.load(part(2, 5))
    assert node.says(added=3) and node.kept == [2, 3, 4], "those of the other files are gone"


def test_only_one_layer_is_seen_while_it_is_kept(node: Node) -> None:
    model = stage_model.load(str(node.source), stage=Stage(0, 1, 0, LAYERS, LAYERS), dtype=torch.float32)
    names = set(quantised_cache.tensors_of(model))
    with stage_reader._alone(model, 4):
        assert {name.split(".")[2] for name in quantised_cache.tensors_of(model)} == {"4"}
    assert set(quantised_cache.tensors_of(model)) == names
