"""The parts of a worker's start, each with its seconds: python -m benchmarks.gpu_parts.restart_start DEVICE MODEL KIND"""

from __future__ import annotations

import sys
import time


def main(device: str, model: str, kind: str) -> int:
    """Print "took PART SECONDS" for each."""
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
    from homelab.worker.model import add_adapters, load_base

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    base = load_base(model, None, kind, dtype, 0 if device == "cuda" else None, "here")
    if device == "cuda":
        torch.cuda.synchronize()
    took("load")
    method = {"kind": kind, "rank": 16, "alpha": 32, "dropout": 0.0, "targets": "all-linear"}
    trained = add_adapters(base, method, 1).train()
    took("adapters")
    tokens = torch.randint(3, 250, (1, 256), device=device)
    for part in ("first_pass", "second_pass"):
        with torch.autocast(device, dtype, enabled=device == "cuda"):
            trained(input_ids=tokens, labels=tokens).loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
        took(part)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
