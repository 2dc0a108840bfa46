"""python -m homelab.worker.dryrun: the peak of a training step, from the real model class without any weight.

The model is built from its config under FakeTensorMode (shapes, no data), gets the real adapters, checkpointing and loss, and runs
one forward and backward pass and an optimizer step under `tracker.Tracker`. Reads one JSON object from standard input:

    {"config": config.json of the model, "method": [method], "train": [train], "time_limit_s": 60,
     "situations": [{"device": "cuda", "precision": "bf16", "micro_batch": 2, "seq_len": 1024, "masked": true, "repeats_keys": false}, ...]}

and prints {"results": [{"peak_bytes", "at", "items": {name: bytes}, "seconds"}, ...]} after each of them. Not in it: CUDA
context, communicator, the allocator's gaps, the process itself. "masked": the micro-batch has rows of different length, or packed ones;
"repeats_keys": attention repeats them for grouped queries in any case (`grouped_queries`).

Gradients are there from the start, as in DDP's buckets. Attention is the kernel of the device: see `stand_ins.gpu_attention`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from homelab.worker import stand_ins
from homelab.worker.errors import WorkerError

_ROUNDING_BYTES = 512  # CUDA's allocator (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)


def dry_run(
    config: dict[str, Any],
    method: dict[str, Any],
    train: dict[str, Any],
    *,
    device: str,
    precision: str,
    micro_batch: int,
    masked: bool,
    repeats_keys: bool = False,
) -> dict[str, Any]:
    """One situation: {"peak_bytes", "at", "items", "seconds"}. Raises WorkerError for a config or a target that cannot be."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    began = time.perf_counter()
    with torch.device("meta"):
        model = build(config, method, train, precision)
    attention = stand_ins.gpu_attention(repeats_keys=repeats_keys) if device == "cuda" else contextlib.nullcontext()
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        attention,
        contextlib.nullcontext() if masked else stand_ins.no_mask(),
    ):
        materialise(model)
        rows = torch.ones((micro_batch, int(train["seq_len"])), dtype=torch.long)
        batch = {"input_ids": rows, "labels": rows.clone()} | (
            {"attention_mask": torch.ones_like(rows)} if masked else {}
        )
        optimizer = functools.partial(stand_ins.FakeStep, precision=precision)
        tracker = follow(model, batch, method, train, precision=precision, device=device, optimizer=optimizer)
    return {
        "peak_bytes": tracker.peak_bytes,
        "at": tracker.at,
        "items": {name: size for name, size in tracker.items.items() if size},
        "seconds": time.perf_counter() - began,
    }


def build(config: dict[str, Any], method: dict[str, Any], train: dict[str, Any], precision: str) -> Any:
    """The model as `model.load_model` makes it, without its weights where the caller's device is "meta". Raises WorkerError for an unknown kind of model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from homelab.worker import fused_loss
    from homelab.worker.model import DTYPES, add_adapters, enable_checkpointing

    kind = method["kind"]
    dtype = torch.float32 if kind == "full" else DTYPES[precision]
    known = {
        key: value
        for key, value in config.items()
        if key not in ("model_type", "quantization_config", "auto_map", "dtype", "torch_dtype")
    }
    try:
        loaded = AutoConfig.for_model(config["model_type"], **known)
        model = AutoModelForCausalLM.from_config(loaded, dtype=dtype, attn_implementation="sdpa")
    except (KeyError, ValueError, TypeError) as error:
        raise WorkerError(
            f"no model can be built from this config: {error}", where="config.json of the model",
            hint="install the transformers that the model needs on this node, or plan with --no-dry-run",
        ) from error  # fmt: skip
    if kind == "qlora":
        stand_ins.quantise(model, dtype)
    model.config.use_cache = False
    if train["gradient_checkpointing"]:
        enable_checkpointing(model)
    if train.get("fused_loss"):
        fused_loss.install(model, labelled_only=False)  # how many there are is not known before the data: as if all had one
    return add_adapters(model, method, int(train["seed"])) if kind != "full" else model


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
        return made[id(tensor)]

    for part in model.modules():
        for held in (part._parameters, part._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    held[name] = fake(tensor)


def follow(
    model: Any,
    batch: dict[str, Any],
    method: dict[str, Any],
    train: dict[str, Any],
    *,
    precision: str,
    device: str,
    optimizer: Any,
) -> Any:
    """One training step of `model`, real or fake, under a Tracker, which is returned. `optimizer` is called with (trainable parameters,
    train, device); it makes its state at once and has `step()`."""
    import torch
    from accelerate.utils import convert_outputs_to_fp32

    from homelab.worker import tracker as kinds
    from homelab.worker.model import DTYPES

    model.train()
    forward = model.forward
    if precision != "fp32":  # as accelerate prepares a model (accelerator.py, prepare_model)
        forward = convert_outputs_to_fp32(torch.autocast("cpu", DTYPES[precision])(forward))
    tracker = kinds.Tracker(
        model.config.get_text_config().vocab_size, rounding_bytes=_ROUNDING_BYTES if device == "cuda" else 1
    )
    own = kinds.BASE_WEIGHTS if method["kind"] == "full" else kinds.ADAPTERS
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tracker.hold(trainable, own)
    tracker.hold(
        (held for frozen in model.parameters() if not frozen.requires_grad for held in _storages(frozen)),
        kinds.BASE_WEIGHTS,
    )
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
    """A parameter and, where it is quantised, its scales (bitsandbytes, functional.py QuantState)."""
    yield parameter
    state = getattr(parameter, "quant_state", None)
    if state is not None:
        yield state.absmax
        if state.state2 is not None:
            yield state.state2.absmax


def main() -> int:
    """Read the question, print the answer so far after every situation. Returns 0, or 2 with one clear message on standard error."""
    began = time.perf_counter()
    # Nothing is computed: no card is needed, and none is disturbed. The shapes are those of the config, nothing is looked up.
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
            results.append(dry_run(question["config"], question["method"], train, **about))
            print(json.dumps({"results": results}), flush=True)
            gc.collect()
    except WorkerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
