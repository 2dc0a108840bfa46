"""The parts of a worker's start, each with its seconds: python -m benchmarks.gpu_parts.restart_start DEVICE MODEL KIND files|worker RUN"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any


def main(device: str, model: str, kind: str, way: str, run: str) -> int:
    """Print "took PART SECONDS" for each. `way` files: the model's own are read, and quantised; worker: as a worker with the folder `run` does."""
    began = time.perf_counter()

    def took(part: str) -> None:
        nonlocal began
        now = time.perf_counter()
        print(f"took {part} {now - began:.3f}", flush=True)
        began = now

    import torch
    import transformers  # noqa: F401

    took("import")
    torch.zeros(1, device=device)
    took("context")
    from homelab.shared.recipe import Method
    from homelab.worker.model.build import add_adapters, load_base

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    method: dict[str, Any] = {"kind": kind, "rank": 16, "alpha": 32, "dropout": 0.0, "targets": "all-linear"}
    card = 0 if device == "cuda" else None
    base = (
        load_base(model, None, Method(**method).quantisation, dtype, card, "here")
        if way == "files"
        else _as_a_worker(device, model, method, Path(run))
    )
    if device == "cuda":
        torch.cuda.synchronize()
    took("load")
    trained = add_adapters(base, Method(**method), 1).train()
    took("adapters")
    tokens = torch.randint(3, 250, (1, 256), device=device)
    for part in ("first_pass", "second_pass"):
        with torch.autocast(device, dtype, enabled=device == "cuda"):
            trained(input_ids=tokens, labels=tokens).loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        took(part)
    return 0


def _as_a_worker(device: str, model: str, method: dict[str, Any], run: Path) -> Any:
    from benchmarks.gpu_parts import material

    from homelab.worker.model import weight_digests
    from homelab.worker.model.build import _load_base

    recipe = {"model": {"name": model, "revision": None}, "method": method}
    task = material.alone(run, recipe, device, "bf16" if device == "cuda" else "fp32")
    with weight_digests.noting_sources():
        return _load_base(task, model, print)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
