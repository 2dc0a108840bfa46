"""The worker, with rank 1 late by BENCH_LATE_S seconds in every pass, and the seconds of all passes in passes.json of the run folder."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    """Train as the worker does."""
    from accelerate import Accelerator

    from homelab.worker.training import train, trainer

    backward, done = Accelerator.backward, trainer.ShareTrainer.step_done
    passes: list[list[float]] = []

    def late(self: Any, loss: Any, **more: Any) -> None:
        if os.environ["RANK"] == "1":
            if loss.is_cuda:
                import torch

                torch.cuda.synchronize()
            time.sleep(float(os.environ["BENCH_LATE_S"]))
        backward(self, loss, **more)

    def kept(self: Any) -> None:
        done(self)
        passes.append([float(seconds) for seconds in self.clock.passes_s])

    Accelerator.backward = late
    trainer.ShareTrainer.step_done = kept
    code = train.main()
    (Path(os.environ["HOMELAB_RUN_DIR"]) / "passes.json").write_text(json.dumps(passes))
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # as homelab.worker does, and for its reason
