"""Layers that come to a card: who copies, behind what, and who waits for it. The card is told by what is put on its streams; its memory is the host's."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from homelab.shared.protocol.quantisation import NF4
from homelab.worker.errors import WorkerError
from homelab.worker.model import build, host_store
from homelab.worker.model.host_layers import HostLayers
from homelab.worker.model.layer_major import LayerMajor
from homelab.worker.model.pretrained import LoadedPart
from homelab.worker.strategies.pipeline import stage_reader
from tests.worker import harness
from tests.worker.model.test_layer_major import BATCHES, LAYERS, adapted, batches, by_layer, differing, files, in_order, stepped  # noqa: F401

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("one_thread")]


@dataclass(eq=False)
class Stream:
    """What was put on it, in order: events that it waits for, copies, and events that were recorded."""

    name: str
    queue: list[Any] = field(default_factory=list)

    def wait_event(self, event: Event) -> None:
        assert event.stream is not None, "an event that nobody has recorded is waited for by nobody"
        self.queue.append(("waits", event))


@dataclass(eq=False)
class Event:
    stream: Stream | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream = stream or _streams.computes
        self.stream.queue.append(("recorded", self))


@dataclass
class _Streams:
    computes: Stream = field(default_factory=lambda: Stream("computes"))
    copies: Stream = field(default_factory=lambda: Stream("copies"))
    here: threading.local = field(default_factory=threading.local)
    copied_by: list[str] = field(default_factory=list)


_streams = _Streams()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Streams]:
    global _streams
    _streams = _Streams()

    @contextlib.contextmanager
    def inside(stream: Stream) -> Iterator[None]:
        _streams.here.stream = stream
        yield
        _streams.here.stream = None

    copied = torch.Tensor.copy_

    def copy(self: torch.Tensor, other: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
        if (stream := getattr(_streams.here, "stream", None)) is not None:
            stream.queue.append(("copied", self.data_ptr()))
            _streams.copied_by.append(threading.current_thread().name)
        return copied(self, other, *options, **named)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: _streams.computes)
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    yield _streams


def host_beside(card: _Streams, **options: Any) -> HostLayers:
    host = HostLayers(torch.device("cpu"), 2, **options)
    host._stream = card.copies
    return host


@pytest.mark.parametrize("kind", ["pinned", "pageable", "disk"])
def test_each_copy_is_behind_what_computed_there_and_before_what_computes_next(
    card: _Streams, kind: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch  # noqa: F811
) -> None:  # fmt: skip
    resident = adapted(files, NF4)
    expected = stepped(resident, lambda: in_order(resident, batches()))
    if kind == "pinned":
        monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _tensor: True)
    host = host_beside(card, file=tmp_path / "layers" if kind == "disk" else None, pinned=kind == "pinned", in_turn=True)
    streamed = adapted(files, NF4, host, LAYERS)
    found = stepped(streamed, lambda: by_layer(streamed, host, batches(), BATCHES))
    assert not differing(expected, found)
    assert len(card.copied_by) == host.book.loads > 2 * LAYERS
    assert {name.startswith("layers") for name in card.copied_by} == {kind != "pinned"}, (
        "a copy that is not pinned holds up its thread alone"
    )
    # On the stream of copies each one waits for an event of the other stream, and says when it is done.
    queue = card.copies.queue
    assert [what for what, _ in queue] == ["waits", "copied", "recorded"] * host.book.loads
    assert all(event.stream is card.computes for what, event in queue if what == "waits")
    done = [event for what, event in queue if what == "recorded"]
    waited = [event for what, event in card.computes.queue if what == "waits"]
    assert set(waited) <= set(done) and len(set(waited)) >= len(done) - 1, "the last one may have come for a step that did not come"


def test_a_system_that_pins_no_more_is_said_and_the_layers_lie_in_other_memory(card: _Streams, files: Path, tmp_path: Path) -> None:  # noqa: F811
    """A processor's torch pins nothing at all."""
    host = host_beside(card)
    streamed = adapted(files, None, host, 3)
    assert host.unpinned_bytes == host.host_bytes > 0
    by_layer(streamed, host, batches(), BATCHES)
    said: list[str] = []
    build._load_base(
        harness.task_of(tmp_path, method__kind="lora"), str(files), said.append,
        LoadedPart(reader=functools.partial(stage_reader.load, stage=None, host=host_beside(card), count=3)),
    )  # fmt: skip
    assert [line for line in said if "pins no more memory" in line and "come slower" in line]
    for asked in ({"pinned": False}, {"file": tmp_path / "layers"}):
        other = host_beside(card, **asked)
        adapted(files, None, other, 3)
        assert other.unpinned_bytes == 0 < other.host_bytes, "nobody asked for pinned memory"


@pytest.mark.parametrize(("kind", "pinned", "on_disk"), [("memory", True, False), ("pageable", False, False), ("disk", False, True)])
def test_the_layers_lie_where_the_plan_has_them(tmp_path: Path, kind: str, pinned: bool, on_disk: bool) -> None:
    streaming = {"layers": 2, "group": 1, "host": kind, "places": 2}
    task = harness.task_of(tmp_path, plan={"ranks": [{"rank": 0, "node": "here", "share": 12, "streaming": streaming}]})
    host = stage_reader.reader(task, None).keywords["host"]  # type: ignore[attr-defined]
    assert (host.pinned, host.file is not None) == (pinned, on_disk)


def test_the_input_of_a_layer_needs_no_pinned_memory_either(card: _Streams, files: Path) -> None:  # noqa: F811
    """Where layers have taken all that can be pinned, the first step ended with torch's error."""
    hidden = torch.randn(2, 3, 4)
    on_card = SimpleNamespace(
        device=torch.device("cuda"), shape=hidden.shape, dtype=hidden.dtype, requires_grad=True, detach=lambda: hidden
    )  # fmt: skip
    kept = LayerMajor._kept(SimpleNamespace(), on_card)  # type: ignore[arg-type]
    assert kept is not hidden and kept.equal(hidden) and kept.requires_grad


def test_memory_that_is_not_there_at_all_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_shape: Any, pin_memory: bool = False, **_options: Any) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory" if pin_memory else "DefaultCPUAllocator: can't allocate memory")

    layer = torch.nn.Linear(64, 64)
    monkeypatch.setattr(torch, "empty", refuses)
    with pytest.raises(WorkerError, match="can't allocate memory") as raised:
        host_store.moved(layer, torch.device("cpu"), None, 10**9, pinned=True)
    assert "after 1.0 GB" in raised.value.message and "close other programs" in raised.value.hint
