"""The passes of one step, or of an evaluation, on one stage: what comes from the neighbours, the stage's own layers, what goes to them.

Every stage adds up its gradients in the order of the micro-batches, so they are those of one process to the last bit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from homelab.shared.law import pipeline_schedule
from homelab.shared.law.stage import Stage
from homelab.worker.data.batches import Batch, copied
from homelab.worker.model import layer_seeds
from homelab.worker.model.layer_major import OF_THE_LOSS, Group, LayerMajor
from homelab.worker.strategies.pipeline.neighbours import Channel, Inbox, Neighbours


@dataclass
class StageWork:
    """What a step has cost this stage: seconds of the passes of each micro-batch, and seconds it has waited for messages."""

    passes_s: list[float] = field(default_factory=list)
    waited_s: float = 0.0
    sent_bytes: int = 0


@dataclass(frozen=True)
class PipelinePasses:
    """A stage between its neighbours. `dtype` is that of the hidden states on the wire, the same as inside the model: nothing is rounded.

    `context` is around every forward pass (autocast); `after_pass` is called when one is done. `layer_major`: how a stage with layers on its host
    computes; what is in flight has no graph then.
    """

    model: Any
    stage: Stage
    neighbours: Neighbours
    dtype: torch.dtype
    device: torch.device
    hidden: int
    context: Callable[[], AbstractContextManager[Any]]
    after_pass: Callable[[], None]
    layer_major: LayerMajor | None = None

    def step(
        self, batches: Sequence[Batch], seeds: Sequence[int], count: torch.Tensor, backward: Callable[[torch.Tensor], None]
    ) -> tuple[float, StageWork]:
        """All passes of an optimizer step; the loss of this stage (0 but on the last one) and what it has cost.

        `count` divides the summed loss; `backward` is called with each loss.
        """
        work = StageWork([0.0] * len(batches))
        coming, returning = self._inbox(self.neighbours.before_in, batches), self._inbox(self.neighbours.behind_in, batches)
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        begun: dict[int, _Begun] = {}
        for kind, index in pipeline_schedule.order(len(batches), self.stage.in_flight):
            if kind == "forward":
                entered = self._taken(coming, work)
                with _Timed(work, index, self.device):
                    layer_seeds.begin(seeds[index])
                    begun[index] = one = self._begin(batches[index], entered, count, seeds[index])
                if self.stage.is_last:
                    losses += one.left.detach()
                elif self.neighbours.behind_out is not None:
                    self._send(self.neighbours.behind_out, one.left.detach(), work)
            else:
                one = begun.pop(index)
                gradient = self._taken(returning, work)
                with _Timed(work, index, self.device):
                    layer_seeds.again(seeds[index])
                    to_input = self._end(one, gradient, backward)
                if one.entered is not None and self.neighbours.before_out is not None:
                    assert to_input is not None
                    self._send(self.neighbours.before_out, to_input, work)
            self.after_pass()
        before = time.perf_counter()
        self.neighbours.drain()
        work.waited_s += time.perf_counter() - before
        return float(losses), work

    def _begin(self, batch: Batch, entered: torch.Tensor | None, count: torch.Tensor, seed: int) -> _Begun:
        if self.layer_major is None:
            return _Begun(entered, self._forward(batch, entered, count))
        (hidden,), group = self.layer_major.forward([self._inputs(batch, entered)], [seed])
        if not self.stage.is_last:
            return _Begun(entered, hidden.to(self.dtype), group)
        behind = hidden.detach().requires_grad_()
        layer_seeds.begin(seed)
        with self.layer_major.behind(behind):
            return _Begun(entered, self._forward(batch, entered, count), group, behind)

    def _end(self, one: _Begun, gradient: torch.Tensor | None, backward: Callable[[torch.Tensor], None]) -> torch.Tensor | None:
        """The backward pass of a micro-batch; the gradient of what came in."""
        if one.group is None or gradient is None:
            if gradient is None:
                backward(one.left)
            else:
                torch.autograd.backward(one.left, gradient)
        if one.group is None or self.layer_major is None:
            return None if one.entered is None else one.entered.grad
        if one.behind is not None:
            gradient = one.behind.grad
        assert gradient is not None
        (to_input,) = self.layer_major.backward(one.group, [gradient], to_input=one.entered is not None)
        return to_input

    @torch.no_grad()
    def summed_losses(self, batches: Sequence[Batch], count: torch.Tensor) -> float:
        """The losses of these batches of the host, summed; 0 but on the last stage. Forward passes alone."""
        summed = 0.0
        coming = self._inbox(self.neighbours.before_in, batches)
        for batch in batches:  # all held-out rows, or all rows of a run: a card may not have room for them together
            (on_device,) = copied([batch], self.device, pin=self.device.type == "cuda")
            left = self._forward(on_device, coming.take() if coming is not None else None, count)
            if self.stage.is_last:
                summed += float(left)
            elif self.neighbours.behind_out is not None:
                self.neighbours.behind_out.send(left)
            self.after_pass()
        self.neighbours.drain()
        return summed

    def _inbox(self, channel: Channel | None, batches: Sequence[Batch]) -> Inbox | None:
        if channel is None:
            return None
        return Inbox(channel, [(*batch["input_ids"].shape, self.hidden) for batch in batches], self.dtype, self.device)

    def _taken(self, inbox: Inbox | None, work: StageWork) -> torch.Tensor | None:
        """The next message, and the wait for it; None where nothing comes."""
        if inbox is None:
            return None
        before = time.perf_counter()
        tensor = inbox.take()
        work.waited_s += time.perf_counter() - before
        return tensor

    def _send(self, channel: Channel, tensor: torch.Tensor, work: StageWork) -> None:
        """Begin to send, and count the wait for messages before it."""
        before = time.perf_counter()
        channel.make_room()
        work.waited_s += time.perf_counter() - before
        work.sent_bytes += channel.send(tensor)

    def _forward(self, batch: Batch, entered: torch.Tensor | None, count: torch.Tensor) -> torch.Tensor:
        """The loss on the last stage, hidden states on any other."""
        inputs = self._inputs(batch, entered)
        with self.context():
            if self.stage.is_last:
                loss: torch.Tensor = self.model(**inputs, num_items_in_batch=count).loss
                return loss
            hidden: torch.Tensor = self.model(**inputs).logits
        return hidden.to(self.dtype)

    def _inputs(self, batch: Batch, entered: torch.Tensor | None) -> Batch:
        inputs = {name: value for name, value in batch.items() if self.stage.is_last or name not in OF_THE_LOSS}
        if entered is not None:
            del inputs["input_ids"]
            inputs["inputs_embeds"] = entered.requires_grad_(torch.is_grad_enabled())
        return inputs


@dataclass
class _Begun:
    """A micro-batch after its forward pass: what came in, what went out, and of a stage in `layer_major` what its backward pass needs."""

    entered: torch.Tensor | None
    left: torch.Tensor
    group: Group | None = None
    behind: torch.Tensor | None = None


class _Timed:
    """Around one pass of a micro-batch. On CUDA, kernels run later than Python: it waits for them, which costs a pipeline little, because
    the next thing it does is to wait for a message."""

    def __init__(self, work: StageWork, index: int, device: torch.device) -> None:
        self._work, self._index, self._device = work, index, device

    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()

    def __exit__(self, *_error: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._work.passes_s[self._index] += time.perf_counter() - self._begin_s
