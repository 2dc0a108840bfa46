"""A process to be killed: it holds so many GB and computes. python -m benchmarks.gpu_parts.restart_holder DEVICE GB"""

from __future__ import annotations

import sys


def main(device: str, size_gb: str) -> int:
    """Until it is killed."""
    import torch

    held = torch.ones(round(float(size_gb) * 10**9 / 2), dtype=torch.bfloat16, device=device)
    square = torch.randn(4096 if device == "cuda" else 64, 4096 if device == "cuda" else 64, device=device)
    print("computing", held.numel(), flush=True)
    while True:
        for _ in range(20):
            square = (square @ square).clamp(-1, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
