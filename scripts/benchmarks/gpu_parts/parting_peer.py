"""The worker, whose rank 1 gets the signal BENCH_FAULT in its passes of step 5."""

from __future__ import annotations

import os
import sys
from typing import Any


def main() -> int:
    """Train as the worker does."""
    from homelab.worker.training import train, trainer

    passes = trainer.ShareTrainer.own_passes

    def own_passes(self: Any, *args: Any, **options: Any) -> Any:
        if os.environ["RANK"] == "1" and self.state.global_step == 4:
            os.kill(os.getpid(), int(os.environ["BENCH_FAULT"]))
        return passes(self, *args, **options)

    trainer.ShareTrainer.own_passes = own_passes
    return train.main()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # as homelab.worker does, and for its reason
