"""The worker, with an infinite gradient on rank 1 in step BENCH_OVERFLOW_STEP (0: never), and the scale after each step in scales.txt."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    """Train as the worker does."""
    import torch
    from accelerate import Accelerator

    from homelab.worker.training import train, trainer

    backward, done = Accelerator.backward, trainer.ShareTrainer.step_done
    when = int(os.environ["BENCH_OVERFLOW_STEP"])
    scales: list[float] = []
    steps = 0

    def overflowing(self: Any, loss: Any, **more: Any) -> None:
        if os.environ["RANK"] == "1" and steps == when - 1:
            loss = loss * torch.tensor(3e38, device=loss.device)  # finite in fp32 but for the scale
        backward(self, loss, **more)

    def kept(self: Any) -> None:
        nonlocal steps
        done(self)
        steps += 1
        scaler = self.accelerator.scaler
        scales.append(float(scaler.get_scale()) if scaler is not None else 1.0)

    Accelerator.backward = overflowing
    trainer.ShareTrainer.step_done = kept
    code = train.main()
    (Path(os.environ["HOMELAB_RUN_DIR"]) / "scales.txt").write_text("\n".join(map(str, scales)))
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # as homelab.worker does, and for its reason
