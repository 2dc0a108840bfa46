"""Layer-major passes over layers that lie on the host: every gradient is that of resident layers to the last bit, and the naive way is not."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import weakref
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch

from homelab.shared.protocol.quantisation import INT8, NF4
from homelab.shared.recipe import Method
from homelab.worker.checkpoints import weights
from homelab.worker.errors import WorkerError
from homelab.worker.model import build, host_layers, inspection
from homelab.worker.model.host_layers import HostLayers
from homelab.worker.model.layer_major import LayerMajor
from homelab.worker.strategies.pipeline import stage_reader
from homelab.worker.strategies.pipeline.stage_model import decoder_of
from tests.shared.law.test_streaming import loads
from tests.worker import harness

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]
LAYERS, BATCHES, STEPS = 8, 4, 3
COUNT = torch.tensor(300)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harness.tiny_llama(tmp_path_factory.mktemp("deep") / "tiny-llama", hidden=64, intermediate=128, layers=LAYERS)


def adapted(files: Path, how: str | None, host: HostLayers | None = None, count: int = 0, targets: Any = "all-linear") -> Any:
    """The model with adapters that answer something, and its streamed layers."""
    reader = None
    if host is not None:

        def reader(path: str, **options: Any) -> Any:
            return stage_reader.load(path, stage=None, host=host, count=count, **options)

    model = build.load_base(str(files), None, how, torch.float32, None, "here", reader)
    model.config.use_cache = False
    build.enable_checkpointing(model)
    model = build.add_adapters(model, Method(kind="lora", rank=4, alpha=8, targets=targets), 1)
    drawn = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:  # from zeros, half of all gradients would be zero whatever else is wrong
            parameter.data.normal_(generator=drawn)
    return model.train()


def batches() -> list[dict[str, torch.Tensor]]:
    drawn = torch.Generator().manual_seed(5)
    tokens = [torch.randint(3, 200, (2, 40 + 4 * number), generator=drawn) for number in range(BATCHES)]
    return [{"input_ids": one, "labels": one.clone()} for one in tokens]


def stepped(model: Any, passes: Any) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """Some steps of AdamW: the loss and the gradients of each."""
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], 1e-3)
    seen = []
    for _ in range(STEPS):
        loss = passes()
        seen.append((loss, {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def in_order(model: Any, given: list[dict[str, torch.Tensor]]) -> float:
    """One micro-batch after the other, each layer's activations recomputed by torch."""
    summed = 0.0
    for batch in given:
        loss = model(**batch, num_items_in_batch=COUNT).loss
        loss.backward()
        summed += float(loss)
    return summed


def by_layer(model: Any, host: HostLayers, given: list[dict[str, torch.Tensor]], group: int) -> float:
    passes = LayerMajor(decoder_of(model), range(LAYERS), host, contextlib.nullcontext, torch.manual_seed, lambda: None)
    summed = 0.0
    for begin in range(0, len(given), group):
        some = given[begin : begin + group]
        losses = passes.train(some, [1] * len(some), lambda batch: model(**batch, num_items_in_batch=COUNT).loss, torch.Tensor.backward)
        summed += sum(map(float, losses))
    return summed


def differing(one: list[tuple[float, dict[str, torch.Tensor]]], other: list[tuple[float, dict[str, torch.Tensor]]]) -> list[str]:
    return [
        f"step {step} {name}"
        for step, ((_, before), (_, after)) in enumerate(zip(one, other, strict=True))
        for name in before
        if not torch.equal(before[name], after[name])
    ]


QUICK_OF_NF4 = [NF4, *(pytest.param(how, marks=pytest.mark.thorough) for how in (INT8, None))]


@pytest.mark.parametrize("how", QUICK_OF_NF4)
def test_gradients_are_those_of_resident_layers(how: str | None, files: Path, tmp_path: Path) -> None:
    model = adapted(files, how)
    resident = stepped(model, lambda: in_order(model, batches()))
    for count, group, places in ((LAYERS, 1, 1), (LAYERS, 2, 2), (LAYERS, BATCHES, 3), (3, BATCHES, 2)):
        host = HostLayers(torch.device("cpu"), places, tmp_path / "layers" if count == 3 else None, in_turn=True)
        streamed = adapted(files, how, host, count)
        seen = stepped(streamed, lambda host=host, streamed=streamed, group=group: by_layer(streamed, host, batches(), group))
        assert [loss for loss, _ in seen] == [loss for loss, _ in resident]
        assert differing(resident, seen) == []
        assert host.book.loads == loads(count, places, STEPS * BATCHES // group)


@pytest.mark.parametrize("how", QUICK_OF_NF4)
def test_checkpointing_around_streamed_layers_ends_with_an_error(how: str | None, files: Path) -> None:
    """torch recomputes a layer without its hooks: the layer is not there, and its parameters are empty rather than another layer's."""
    host = HostLayers(torch.device("cpu"), 2, in_turn=True)
    streamed = adapted(files, how, host, LAYERS)
    host.has_graph = True
    with pytest.raises(RuntimeError, match=r"size|shape"):
        in_order(streamed, batches())


@pytest.mark.parametrize("how", [pytest.param(INT8, marks=pytest.mark.thorough), None])
def test_a_graph_that_outlives_its_layer_is_seen(how: str | None, files: Path) -> None:
    """The control: forward passes whose graph keeps what a place holds. Their loss is right, and the comparison above finds the gradients wrong."""
    model = adapted(files, how)
    resident = stepped(model, lambda: in_order(model, batches()))
    host = HostLayers(torch.device("cpu"), 2, in_turn=True)
    streamed = adapted(files, how, host, LAYERS)
    streamed.gradient_checkpointing_disable()
    host.has_graph = True
    seen = stepped(streamed, lambda: in_order(streamed, batches()))
    assert seen[0][0] == resident[0][0], "the forward passes are right"
    assert len(differing(resident[:1], seen[:1])) > 50


def test_a_graph_outside_of_layer_major_is_refused(files: Path) -> None:
    host = HostLayers(torch.device("cpu"))
    streamed = adapted(files, NF4, host, 2)
    with pytest.raises(AssertionError, match="layer_major alone"):
        in_order(streamed, batches()[:1])
    whole = adapted(files, NF4)
    for mode in (torch.no_grad, torch.inference_mode):  # an evaluation and a chat may
        with mode():
            assert torch.equal(*(model(input_ids=batches()[0]["input_ids"]).logits for model in (streamed, whole)))


def test_what_lies_on_the_host_is_not_on_the_device(files: Path) -> None:
    """Bytes of the frozen matrices: those of the places, and none of a streamed layer beside them."""
    host = HostLayers(torch.device("cpu"), 2)
    streamed = adapted(files, NF4, host, LAYERS)
    named = decoder_of(streamed).layers.named_parameters()
    matrices = [one for name, one in named if name.endswith("base_layer.weight")]
    assert len(matrices) == 7 * LAYERS
    assert sum(one.nbytes for one in matrices) == 0
    by_layer(streamed, host, batches(), BATCHES)
    gc.collect()
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in matrices if one.nbytes}
    assert 0 < sum(held.values()) <= 2 * max(layer.block.numel() for layer in host.layers.values())
    packed = LAYERS * sum(
        matrix.numel() // 2
        for matrix in (torch.empty(64, 64), torch.empty(64, 64), torch.empty(32, 64), torch.empty(32, 64), *[torch.empty(128, 64)] * 3)
    )
    assert packed <= host.host_bytes <= 1.1 * packed


def test_digests_see_what_lies_on_the_host(files: Path) -> None:
    from homelab.worker.model import weight_digests

    whole = weight_digests.base(adapted(files, NF4))
    host = HostLayers(torch.device("cpu"), 2)
    streamed = adapted(files, NF4, host, 5)
    assert weight_digests.base(streamed) == whole
    number = next(iter(host.layers))
    host.layers[number].block[100] ^= 1
    assert weight_digests.base(streamed) != whole
    host.layers[number].block[100] ^= 1
    by_layer(streamed, host, batches(), BATCHES)
    assert weight_digests.base(streamed) == whole, "and the places that held layers are as before"
    assert host_layers.of(streamed) is host


@pytest.mark.parametrize(
    ("place", "name", "error", "words"),
    [
        (os, "fsync", OSError(errno.ENOSPC, "No space left on device"), "No space left"),
        (torch.UntypedStorage, "from_file", RuntimeError("unable to mmap 10 bytes from file </x>: No such device (19)"), "No such device"),
    ],
)
def test_a_disk_that_refuses_a_layer_is_said_and_nothing_is_left(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, error: Exception, words: str
) -> None:
    works = getattr(place, name)

    def refuses(file: object, **options: object) -> object:
        if str(file).endswith(".safetensors"):  # the model's own file is mapped, too
            return works(file, **options)
        raise error

    monkeypatch.setattr(place, name, refuses)
    with pytest.raises(WorkerError) as raised:
        adapted(files, NF4, HostLayers(torch.device("cpu"), file=tmp_path / "run" / "layers"), 2)
    assert "no room for" in raised.value.message and words in raised.value.message and "workdir" in raised.value.hint
    assert not list(tmp_path.rglob("layers*"))


def test_a_layer_computes_twice_forward(files: Path) -> None:
    """Once for the next layer, and once for its gradient: torch's checkpointing in the model does not add a third time."""
    host = HostLayers(torch.device("cpu"))
    streamed = adapted(files, NF4, host, 3)
    calls = []
    decoder_of(streamed).layers[4].mlp.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    by_layer(streamed, host, batches(), BATCHES)
    assert calls == [True] * 2 * BATCHES


def test_what_is_trained_before_and_behind_the_layers_learns_too(files: Path) -> None:
    targets = ["embed_tokens", "q_proj", "lm_head"]
    model = adapted(files, NF4, targets=targets)
    resident = stepped(model, lambda: in_order(model, batches()))
    host = HostLayers(torch.device("cpu"), in_turn=True)
    streamed = adapted(files, NF4, host, LAYERS, targets)
    assert differing(resident, stepped(streamed, lambda: by_layer(streamed, host, batches(), 2))) == []
    assert all(float(gradient.abs().max()) > 0 for gradient in resident[0][1].values())


def test_weights_are_seen_whole_at_any_moment_of_a_step(files: Path) -> None:
    """A stop saves them from another thread, while stand-ins are in the places of the layers: a checkpoint without those of the layers could not be loaded."""
    host = HostLayers(torch.device("cpu"))
    streamed = adapted(files, None, host, 3)
    seen: list[dict[str, torch.Tensor]] = []
    watching = [
        part.register_forward_hook(lambda *_: seen.append(weights.trained(streamed)))
        for part in (decoder_of(streamed).embed_tokens, decoder_of(streamed).layers[4].mlp, decoder_of(streamed).norm)
    ]
    by_layer(streamed, host, batches(), BATCHES)
    for handle in watching:
        handle.remove()
    whole = weights.trained(streamed)
    assert len(seen) == 6 * BATCHES, "before, in and behind the layers, each twice"
    assert all(list(one) == list(whole) and all(one[name].data_ptr() == whole[name].data_ptr() for name in whole) for one in seen)


def by_graph(module: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
    """As kernels do that have no backward pass: another result where no gradient will be asked for."""
    return output if torch.is_grad_enabled() and inputs[0].requires_grad else output * 1.001


@pytest.mark.parametrize("targets", ["all-linear", ["layers.5.mlp.up_proj", "layers.6.mlp.up_proj"]])
def test_what_computes_otherwise_without_a_graph_does_so_where_a_resident_layer_does(targets: Any, files: Path) -> None:
    """torch takes another kernel for attention, and a router of transformers another product (kolibri1), where nothing needs a gradient."""
    host = HostLayers(torch.device("cpu"), in_turn=True)
    model, streamed = adapted(files, None, targets=targets), adapted(files, None, host, LAYERS, targets)
    for one in (model, streamed):
        for layer in decoder_of(one).layers:
            layer.input_layernorm.register_forward_hook(by_graph)
    resident = stepped(model, lambda: in_order(model, batches()))
    seen = stepped(streamed, lambda: by_layer(streamed, host, batches(), 2))
    assert [loss for loss, _ in seen] == [loss for loss, _ in resident]
    assert differing(resident, seen) == []


def test_a_forward_pass_keeps_nothing_for_its_gradient(files: Path) -> None:
    host = HostLayers(torch.device("cpu"))
    streamed = adapted(files, None, host, LAYERS)
    kept: list[Any] = []
    decoder_of(streamed).layers[4].mlp.act_fn.register_forward_hook(lambda _module, _inputs, output: kept.append(weakref.ref(output)))
    passes = LayerMajor(decoder_of(streamed), range(LAYERS), host, contextlib.nullcontext, torch.manual_seed, lambda: None)
    hidden, group = passes.forward(batches(), [1] * BATCHES)
    assert [one() for one in kept] == [None] * BATCHES
    assert not any(one.grad_fn for one in (*hidden, *itertools.chain(*group.inputs)))


def test_a_layer_that_found_no_room_is_not_taken_for_one_that_is_there(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`inspection` looks at a model, and goes on where it cannot compute: the next pass must say so again, or bring the layer."""
    host = HostLayers(torch.device("cpu"))
    streamed, whole = adapted(files, NF4, host, 3), adapted(files, NF4)
    for name in ("_places_now", "_load"):
        with monkeypatch.context() as full:
            full.setattr(HostLayers, name, lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("no room")))
            assert inspection.unreached(streamed) is None
    with torch.no_grad():
        assert torch.equal(*(model(input_ids=batches()[0]["input_ids"]).logits for model in (streamed, whole)))


@pytest.mark.parametrize("shared", [{}, [], UserDict()])
def test_what_layers_hand_to_each_other_beside_hidden_states_is_refused(shared: Any, files: Path) -> None:
    """As keys and values that later layers use (Gemma 4): what lies there after the forward pass has no gradient, and the one that it was made for would be lost."""
    streamed = adapted(files, None, host := HostLayers(torch.device("cpu")), 3)
    with pytest.raises(WorkerError, match="shared_kv_states"):
        by_layer(streamed, host, [batch | {"shared_kv_states": shared} for batch in batches()], 2)
