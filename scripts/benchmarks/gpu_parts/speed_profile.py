"""The worker, with one step under torch's profiler: kernels, waits of the CPU, and for how much of the step the card stood idle. In profile.json."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

_STEP = 6  # counted from 0; kernels are chosen by then
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpyAsync")
_MOST, _NAME = 16, 90  # kernels and operators that are told, and letters of their names


def main() -> int:
    """Train as the worker does."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from homelab.worker.training import train, trainer

    step, done = trainer.ShareTrainer.training_step, trainer.ShareTrainer.step_done
    figures: dict[str, Any] = {}
    running: list[tuple[Any, float]] = []
    steps = 0

    def begun(self: Any, *arguments: Any, **named: Any) -> Any:
        if steps == _STEP:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            running.append((profile(activities=activities).__enter__(), time.perf_counter()))
        return step(self, *arguments, **named)

    def ended(self: Any) -> None:
        nonlocal steps
        done(self)
        steps += 1
        if running:
            watched, began = running.pop()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            figures["profiled_step_s"] = time.perf_counter() - began
            watched.__exit__(None, None, None)
            events = watched.events()
            # Spans that a program names (Optimizer.step) are events of the card, too, and cover the gaps between their kernels.
            kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation]
            figures["kernels"] = len(kernels)
            figures["card_busy_s"] = _covered([(event.time_range.start, event.time_range.end) for event in kernels]) / 1e6
            figures["waits"] = {name: sum(event.name == name for event in events) for name in _WAITS}
            figures["most_launched"] = dict(Counter(event.name[:_NAME] for event in kernels).most_common(_MOST))
            operators = sorted(watched.key_averages(), key=lambda row: -row.self_cpu_time_total)[:_MOST]
            figures["dearest_on_the_processor"] = {row.key[:_NAME]: [row.count, row.self_cpu_time_total / 1e6] for row in operators}

    trainer.ShareTrainer.training_step = begun
    trainer.ShareTrainer.step_done = ended
    code = train.main()
    (Path(os.environ["HOMELAB_RUN_DIR"]) / "profile.json").write_text(json.dumps(figures))
    return code


def _covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union: kernels on several streams overlap."""
    covered, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        covered += max(0.0, last - max(first, end))
        end = max(end, last)
    return covered


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # as homelab.worker does, and for its reason
