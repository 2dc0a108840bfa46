"""python -m homelab.worker.tools.memory_dry_run: the peak of a training step, from the real model class without any weight.

The model is built from its config under FakeTensorMode (shapes, no data), gets the real adapters, checkpointing and loss, and runs
one forward and backward pass and an optimizer step under `tracker.Tracker`. Reads one JSON object from standard input:

    {"config": config.json of the model, "method": [method], "train": [train], "time_limit_s": 60,
     "situations": [{"device": "cuda", "precision": "bf16", "micro_batch": 2, "seq_len": 1024, "masked": true, "repeats_keys": false}, ...]}

and prints {"results": [{"peak_bytes", "at", "items": {name: bytes}, "seconds"}, ...]} after each of them. Not in it: CUDA
context, communicator, cuBLAS' workspaces, the allocator's gaps, the process itself. "masked": the micro-batch has rows of different length, or packed ones;
"repeats_keys": attention repeats them for grouped queries in any case (`grouped_queries`).

Gradients are there from the start, as in DDP's buckets. Attention is the kernel of the device: see `fake_kernels.gpu`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from homelab.shared.protocol import quantisation
from homelab.shared.recipe import Method
from homelab.worker.errors import WorkerError
from homelab.worker.runtime.recipe import section
from homelab.worker.tools import fake_experts, fake_kernels

_ROUNDING_BYTES = 512  # CUDA's allocator (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)


@dataclass(frozen=True)
class Situation:
    """A rank's step whose memory is asked for. `masked` and `repeats_keys` as in the module's docstring."""

    device: str
    precision: str
    micro_batch: int
    masked: bool
    repeats_keys: bool = False


def dry_run(config: dict[str, Any], method: dict[str, Any], train: dict[str, Any], situation: Situation) -> dict[str, Any]:
    """{"peak_bytes", "at", "items", "seconds"}. Raises WorkerError for a config or a target that cannot be."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    start_s, precision, device = time.perf_counter(), situation.precision, situation.device
    with torch.device("meta"):
        model = build(config, method, train, precision)
    gpu = fake_kernels.gpu(repeats_keys=situation.repeats_keys) if device == "cuda" else contextlib.nullcontext()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        gpu,
        fake_experts.experts(device, precision),
        contextlib.nullcontext() if situation.masked else fake_kernels.no_mask(),
    ):
        materialise(model)
        rows = torch.ones((situation.micro_batch, int(train["seq_len"])), dtype=torch.long)
        batch = {"input_ids": rows, "labels": rows.clone()} | ({"attention_mask": torch.ones_like(rows)} if situation.masked else {})
        tracker = follow(model, batch, method, train, precision=precision, device=device, optimizer=fake_kernels.FakeStep)
    return {
        "peak_bytes": tracker.peak_bytes,
        "at": tracker.at,
        "items": {name: size for name, size in tracker.items.items() if size},
        "seconds": time.perf_counter() - start_s,
    }


def build(config: dict[str, Any], method: dict[str, Any], train: dict[str, Any], precision: str) -> Any:
    """The model as `model.load_model` makes it, without its weights where the caller's device is "meta". Raises WorkerError for an unknown kind of model."""
    from transformers import AutoConfig

    from homelab.worker.model import base_kind

    settings = {
        key: value for key, value in config.items() if key not in ("model_type", "quantization_config", "auto_map", "dtype", "torch_dtype")
    }
    base_kind.refuse_config(config, "config.json of the model")
    try:
        loaded = AutoConfig.for_model(config["model_type"], **settings)
    except Exception as error:
        raise base_kind.load_error(error, "config.json") from error
    return build_of(loaded, quantisation.stored_of(config), method, train, precision)


def build_of(loaded: Any, stored: quantisation.Stored | None, method: dict[str, Any], train: dict[str, Any], precision: str) -> Any:
    """The same of transformers' configuration; `stored`: how the weights of the files are. Attention is what the class supports, as in the real load."""
    import torch
    from transformers import AutoModelForCausalLM

    from homelab.worker.model import base_kind, fused_loss, inspection, stored_experts, stored_weights
    from homelab.worker.model.build import add_adapters, enable_checkpointing
    from homelab.worker.model.pretrained import DTYPES

    kind, settings = method["kind"], section(Method, {"method": method})
    base_kind.refuse_kind(loaded)
    stored_weights.refuse(stored, settings, "the model")
    dtype = torch.float32 if kind == "full" else DTYPES[precision]
    try:
        model = AutoModelForCausalLM.from_config(loaded, dtype=dtype)
    except Exception as error:
        raise base_kind.load_error(error, "config.json") from error
    how = stored_weights.held(stored, settings.quantisation)
    stored_weights.refuse_quantising(loaded.model_type, how)
    if how is not None:
        fake_kernels.quantise(model, dtype, how)
    if stored_weights.leaves_experts(stored, stored_weights.wanted(settings)):
        stored_experts.install(model)
    inspection.let_cache(model, False)
    if train["gradient_checkpointing"]:
        enable_checkpointing(model)
    fused = train.get("fused_loss")
    # As `build.load_model` decides it, as far as a model without weights tells.
    if fused and not (fused == "auto" and fused_loss.scale_of(model)):
        try:
            # the number is not known before the data is read: count every token as one with a loss
            fused_loss.install(model, labelled_only=False)
        except WorkerError:
            if fused != "auto":
                raise
    return add_adapters(model, settings, int(train["seed"])) if kind != "full" else model


def materialise(model: Any) -> None:
    """Give every meta tensor of the model a fake one of the caller's FakeTensorMode in its place; tied ones stay tied.

    The model is not built under that mode at once: a module of fake parameters cannot be moved (`Module.to`), which PEFT does.
    """
    import torch

    made: dict[int, Any] = {}

    def fake(tensor: Any) -> Any:
        if id(tensor) not in made:
            empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
            if isinstance(tensor, torch.nn.Parameter):
                empty = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
            made[id(tensor)] = empty
            if hasattr(tensor, "quant_state"):
                empty.quant_state = tensor.quant_state
                empty.quant_state.materialise()
            if getattr(tensor, "SCB", None) is not None:
                empty.SCB = torch.empty(tensor.SCB.shape, device="cpu")
        return made[id(tensor)]

    for part in model.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = fake(tensor)


def follow(
    model: Any, batch: dict[str, Any], method: dict[str, Any], train: dict[str, Any], *, precision: str, device: str, optimizer: Any
) -> Any:
    """One training step of `model`, real or fake, under a Tracker, which is returned. `optimizer` is called with (trainable parameters,
    train, device); it makes its state at once and has `step()`."""
    import torch
    from accelerate.utils import convert_outputs_to_fp32

    from homelab.shared.protocol import memory_items as kinds
    from homelab.worker.model.pretrained import DTYPES
    from homelab.worker.tools.memory_tracker import Tracker

    model.train()
    forward = model.forward
    if precision != "fp32":  # as accelerate prepares a model (accelerator.py, prepare_model)
        forward = convert_outputs_to_fp32(torch.autocast("cpu", DTYPES[precision])(forward))
    tracker = Tracker(model.config.get_text_config().vocab_size, rounding_bytes=_ROUNDING_BYTES if device == "cuda" else 1)
    own = kinds.BASE_WEIGHTS if method["kind"] == "full" else kinds.ADAPTERS
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tracker.hold(trainable, own)
    tracker.hold((held for frozen in model.parameters() if not frozen.requires_grad for held in _storages(frozen)), kinds.BASE_WEIGHTS)
    tracker.hold(model.buffers(), kinds.BASE_WEIGHTS)
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    tracker.hold((parameter.grad for parameter in trainable), kinds.GRADIENTS)
    with tracker:
        with tracker.making(kinds.OPTIMIZER):
            stepper = optimizer(trainable, train, device)
        loss = _loss(forward, batch)
        tracker.kind = kinds.WORKING_SET
        loss.backward()
        del loss
        tracker.kind = kinds.STEP
        stepper.step()
    return tracker


def _loss(forward: Any, batch: dict[str, Any]) -> Any:
    """A function of its own: the output is gone before the backward pass, as in the Trainer."""
    import torch

    return forward(**batch, num_items_in_batch=torch.tensor(1000))["loss"] * 1


def _storages(parameter: Any) -> Iterator[Any]:
    """A parameter and, where it is quantised, its scales (bitsandbytes, functional.py QuantState; nn/modules.py Int8Params)."""
    yield parameter
    if getattr(parameter, "SCB", None) is not None:
        yield parameter.SCB
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        yield state.absmax
        if state.state2 is not None:
            yield state.state2.absmax


def main() -> int:
    """Read the question, print the answer so far after every situation. Returns 0, or 2 with one clear message on standard error."""
    began = time.perf_counter()
    # Nothing is computed, so no card is needed or disturbed. The config gives the shapes, so nothing is downloaded.
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    os.nice(10)
    warnings.simplefilter("ignore")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    question = json.load(sys.stdin)
    results: list[dict[str, Any]] = []
    try:
        for situation in question["situations"]:
            longest = max((result["seconds"] for result in results), default=0.0)
            if results and time.perf_counter() - began + 1.5 * longest > float(question.get("time_limit_s", 60)):
                break
            train = question["train"] | {"seq_len": situation["seq_len"]}
            about = {name: situation[name] for name in ("device", "precision", "micro_batch", "masked", "repeats_keys")}
            results.append(dry_run(question["config"], question["method"], train, Situation(**about)))
            print(json.dumps({"results": results}), flush=True)
            gc.collect()
    except WorkerError as error:
        print(error.text, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
