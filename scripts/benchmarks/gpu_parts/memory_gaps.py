"""Steps of changing lengths on a card that is small by decree: python -m benchmarks.gpu_parts.memory_gaps DEVICE MODEL"""

from __future__ import annotations

import json
import random
import sys

_CARD_BYTES = 7.4 * 2**30


def main(device: str, model: str) -> int:
    """Print what the allocator has reserved and what was allocated, at most."""
    import torch

    from homelab.shared.recipe import Method
    from homelab.worker.model.build import add_adapters, enable_checkpointing, load_base

    is_card = device == "cuda"
    if is_card:
        torch.cuda.set_per_process_memory_fraction(min(1.0, _CARD_BYTES / torch.cuda.get_device_properties(0).total_memory))
    dtype = torch.bfloat16 if is_card else torch.float32
    base = load_base(model, None, None, dtype, 0 if is_card else None, "here")
    base.config.use_cache = False
    enable_checkpointing(base)
    trained = add_adapters(base, Method("lora", rank=16, alpha=32), 1).train()
    optimizer = torch.optim.AdamW([weight for weight in trained.parameters() if weight.requires_grad], lr=1e-4)
    draw, steps = random.Random(0), 60 if is_card else 2
    for _ in range(steps):
        tokens = torch.randint(3, 250, (draw.randint(1, 4), draw.randint(32, 1024 if is_card else 64)), device=device)
        with torch.autocast(device, dtype, enabled=is_card):
            trained(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peaks = {"steps": steps, "reserved_bytes": 0, "allocated_bytes": 0, "retries": 0}
    if is_card:
        peaks |= {"reserved_bytes": torch.cuda.max_memory_reserved(), "allocated_bytes": torch.cuda.max_memory_allocated()}
        peaks["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    print(json.dumps(peaks))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
