"""The worker, watched: rank 1 is late by BENCH_LATE_S seconds in every pass, and watched.json of the run folder has the seconds of all passes
and what this process held: {"passes_s", "load_bytes", "peak_bytes", "retries"}, in bytes that torch reserved of a card, on a CPU of the process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main() -> int:
    """Train as the worker does. It is written however that ends."""
    from accelerate import Accelerator

    from homelab.worker.training import run, train, trainer

    backward, done, before_first = Accelerator.backward, trainer.ShareTrainer.step_done, run.Run._before_first
    watched: dict[str, Any] = {"passes_s": [], "load_bytes": 0, "peak_bytes": 0, "retries": 0}

    def late(self: Any, loss: Any, **more: Any) -> None:
        if os.environ.get("RANK") == "1":
            if loss.is_cuda:
                import torch

                torch.cuda.synchronize()
            time.sleep(float(os.environ.get("BENCH_LATE_S", "0")))
        backward(self, loss, **more)

    def kept(self: Any) -> None:
        done(self)
        watched["passes_s"].append([float(seconds) for seconds in self.clock.passes_s])

    def loaded(self: Any, of: Any) -> None:
        watched["load_bytes"] = _held()[0]
        before_first(self, of)

    Accelerator.backward = late
    trainer.ShareTrainer.step_done = kept
    run.Run._before_first = loaded
    try:
        return train.main()
    finally:
        watched["peak_bytes"], watched["retries"] = _held()
        (Path(os.environ["HOMELAB_RUN_DIR"]) / "watched.json").write_text(json.dumps(watched))


def _held() -> tuple[int, int]:
    """(most bytes so far, how often the allocator gave blocks back and asked again)."""
    import resource

    import torch

    if not torch.cuda.is_initialized():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 0
    return int(torch.cuda.max_memory_reserved()), int(torch.cuda.memory_stats()["num_alloc_retries"])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # as homelab.worker does, and for its reason
