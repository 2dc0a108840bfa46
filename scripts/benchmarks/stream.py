"""A step whose layers come from the host, beside one whose layers are all on the device. On a CPU: a "transfer" is a copy that is slowed by a sleep.

step_over_resident             at twice the line, so that a layer's forward passes take twice as long as its transfer: seconds of a step over those of
                               resident layers with activation checkpointing, measured in turn; the median. All layers are streamed
step_over_resident_at_half     the same where a transfer takes twice as long as the forward passes
loads_over_formula             loads of a step over 2 S - 2 P (S layers, P places), after the first step
gradients_equal                1 where every gradient of every step is equal to the bit
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks import report

from homelab.shared.recipe import Method
from homelab.worker.model import base_kind, build
from homelab.worker.model.host_layers import HostLayers
from homelab.worker.model.layer_major import LayerMajor
from homelab.worker.strategies.pipeline import stage_reader
from homelab.worker.strategies.pipeline.stage_model import decoder_of
from scripts.practice.tiny_model import tiny_llama

_LAYERS, _PLACES, _PASSES, _TOKENS = 8, 2, 4, 96
_COUNT, _CPU = torch.tensor(_PASSES * _TOKENS), torch.device("cpu")


def main() -> int:
    """Returns 0, or 1 where a gradient differs."""
    options = report.arguments(__doc__ or "")
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="homelab-bench-"))
    try:
        files = tiny_llama(folder / "model", hidden=512, intermediate=1408, layers=_LAYERS)
        batches = batches_of(_PASSES, _TOKENS)
        resident = model(files, None)
        layer_s = _forward_s(resident, batches) / _LAYERS
        runs, equal = [], True
        ratios: dict[float, list[float]] = {}
        loads: list[float] = []
        for times in (2.0, 0.5):
            host = host_of(_CPU)
            streamed = model(files, host)
            host.bytes_per_s = next(iter(host.layers.values())).block.numel() * times / layer_s
            for number in range(1 + 2 * options.repeats):
                (one_s, one), before = _timed(resident, lambda: in_order(resident, batches)), host.book.loads
                other_s, other = _timed(streamed, lambda of=streamed, host=host: by_layer(of, host, batches))
                equal = equal and all(torch.equal(*pair) for pair in zip(one, other, strict=True))
                if number:  # the first one fills the places
                    ratios.setdefault(times, []).append(other_s / one_s)
                    loads.append((host.book.loads - before) / (2 * _LAYERS - 2 * _PLACES))
                    runs.append({"times_the_line": times, "resident_s": one_s, "streamed_s": other_s, "loads": host.book.loads - before})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    figures = {
        "step_over_resident": statistics.median(ratios[2.0]),
        "step_over_resident_at_half": statistics.median(ratios[0.5]),
        "loads_over_formula": statistics.median(loads),
        "gradients_equal": float(equal),
    }
    rows = [(f"step over resident, {times:g} times the line", report.spread(found)) for times, found in ratios.items()]
    report.finish("stream", figures, runs, rows, options.json)
    return 0 if equal else 1


def host_of(device: torch.device, **kind: Any) -> HostLayers:
    """Places on this device, for layers in pinned memory, or as `kind` says."""
    return HostLayers(device, _PLACES, **kind)


def batches_of(count: int, tokens: int) -> list[dict[str, torch.Tensor]]:
    """So many micro-batches of one row."""
    drawn = torch.Generator().manual_seed(1)
    found = [torch.randint(3, 200, (1, tokens), generator=drawn) for _ in range(count)]
    return [{"input_ids": row, "labels": row.clone()} for row in found]


def model(
    files: Path, host: HostLayers | None, *, how: str | None = None, dtype: torch.dtype = torch.float32, device: torch.device = _CPU
) -> Any:
    """A base with adapters on it, and all of its layers on `host` if there is one."""
    reader = None
    if host is not None:
        layers = int(base_kind.config_of(str(files), None).num_hidden_layers)

        def reader(path: str, **options: Any) -> Any:
            return stage_reader.load(path, stage=None, host=host, count=layers, **options)

    made = build.load_base(str(files), None, how, dtype, 0 if device.type == "cuda" else None, "here", reader)
    made.config.use_cache = False
    build.enable_checkpointing(made)
    made = build.add_adapters(made, Method(kind="lora", rank=8, alpha=16), 1).train()
    drawn = torch.Generator().manual_seed(3)
    for name, parameter in made.named_parameters():
        if "lora_B" in name:  # from zeros, half of all gradients would be zero whatever else is wrong
            parameter.data.copy_(torch.randn(parameter.shape, generator=drawn) * 0.01)
    return made


def _forward_s(model: Any, batches: list[dict[str, torch.Tensor]]) -> float:
    """Seconds of the forward passes through all layers."""
    taken = []
    for _ in range(3):
        began_s = time.perf_counter()
        with torch.no_grad():
            for batch in batches:
                model(**batch, num_items_in_batch=_COUNT)
        taken.append(time.perf_counter() - began_s)
    return statistics.median(taken)


def _timed(model: Any, passes: Any) -> tuple[float, list[torch.Tensor]]:
    """Seconds of the passes of a step, and their gradients."""
    model.zero_grad()
    began_s = time.perf_counter()
    passes()
    took_s = time.perf_counter() - began_s
    return took_s, [parameter.grad for parameter in model.parameters() if parameter.requires_grad]


def in_order(of: Any, batches: list[dict[str, torch.Tensor]], dtype: torch.dtype = torch.float32) -> None:
    """One micro-batch after the other."""
    for batch in batches:
        with _autocast(batch, dtype):
            loss = of(**batch, num_items_in_batch=_COUNT).loss
        loss.backward()


def by_layer(
    of: Any, host: HostLayers, batches: list[dict[str, torch.Tensor]], dtype: torch.dtype = torch.float32, group: int = 99
) -> None:
    """Layer by layer, `group` micro-batches at a time."""
    decoder = decoder_of(of)
    passes = LayerMajor(decoder, range(len(decoder.layers)), host, lambda: _autocast(batches[0], dtype), torch.manual_seed, lambda: None)
    for begin in range(0, len(batches), group):
        some = batches[begin : begin + group]
        passes.train(some, [1] * len(some), lambda batch: of(**batch, num_items_in_batch=_COUNT).loss, torch.Tensor.backward)


def _autocast(batch: dict[str, torch.Tensor], dtype: torch.dtype) -> Any:
    return torch.autocast(batch["input_ids"].device.type, dtype, enabled=dtype != torch.float32)


if __name__ == "__main__":
    raise SystemExit(main())
