"""One process against others that train the same rows: homelab's worker, TRL's SFTTrainer and, where it is installed, Unsloth.

All sides load once, then take turns step by step on the same rows of different length, with the same optimizer, learning rate and
clipping, without gradient checkpointing, and with everything else as each has it by default. Tokens are those of the rows; nobody's padding
counts. On CUDA in bf16 where torch sees a card, else on the CPU in fp32.

tokens_per_s_over_trl      homelab's tokens per second over TRL's, the median over steps done in turn
first_loss_difference      the largest difference of the first three steps' losses, relative (lora: the same adapters at the start)
tokens_per_s_over_unsloth  the same against Unsloth, with --unsloth PYTHON, the Python of an environment that has it
gain_of_SWITCH             with --switches: homelab's tokens per second over those with this one turned off (homelab/worker/runtime/switches.py)
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu_parts.environment import python_path
from benchmarks.pace import settings

from homelab.worker.runtime.switches import Switches

_FIRST = 3  # steps whose losses are compared, and which are not timed: the first ones of a process are slower


class Side:
    """A program that trains, and waits after each step."""

    def __init__(self, name: str, python: str, program: list[str], log: Path) -> None:
        self.name = name
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self._log = log
        environment = os.environ | {"PYTHONPATH": python_path()}
        self._process = subprocess.Popen(
            [python, "-m", *program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log.open("w"), text=True, env=environment
        )
        self._hear()

    def step(self) -> None:
        """One optimizer step."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answer = self._hear()
        self.losses.append(answer["loss"])
        self.seconds.append(answer["seconds"])

    def end(self) -> None:
        """Nothing of it is left."""
        self._process.kill()
        self._process.wait()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                return dict(json.loads(line[1:]))
        self.end()
        raise SystemExit(f"error: {self.name} has ended by itself\n{self._log.read_text()[-3000:]}")


def main() -> int:
    """Let all sides train in turn. Returns 0."""
    options = _arguments()
    import torch

    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    folder = Path(tempfile.mkdtemp(prefix="homelab-bench-"))
    sides: list[Side] = []
    try:
        for name, python, program, switches in _sides(options):
            place = settings.write(
                folder / name, os.environ["HOMELAB_MODEL"], options.repeats + _FIRST + 1, method=options.method,
                completion_only=not options.all_tokens, device=device,
            )  # fmt: skip
            settings.plan(place, device, switches)
            sides.append(Side(name, python, [program[0], str(place), *program[1:]], folder / f"{name}.log"))
        tokens = _tokens(folder / "homelab")
        for step in range(options.repeats + _FIRST):
            for side in sides[step % len(sides) :] + sides[: step % len(sides)]:
                side.step()
            took = ", ".join(f"{side.name} {side.seconds[-1]:.1f} s" for side in sides)
            print(f"step {step + 1} of {options.repeats + _FIRST}: {took}", file=sys.stderr, flush=True)
    finally:
        for side in sides:
            side.end()
        shutil.rmtree(folder, ignore_errors=True)
    figures, rows = _compare(sides, tokens[_FIRST:])
    runs = [
        {"side": side.name, "step": step + 1, "seconds": side.seconds[step], "loss": side.losses[step], "tokens": tokens[step]}
        for step in range(options.repeats + _FIRST) for side in sides
    ]  # fmt: skip
    report.finish(f"speed, {options.method}, {device}", figures, runs, rows, options.json)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and raw measurements here")
    parser.add_argument("--repeats", type=int, default=12, help="steps that every side does in turn")
    parser.add_argument("--method", choices=("lora", "full"), default="lora")
    parser.add_argument("--all-tokens", action="store_true", help="every token carries a loss, not only the answers'")
    parser.add_argument("--switches", action="store_true", help="one more side for each of homelab's switches, with it turned off")
    parser.add_argument("--unsloth", metavar="PYTHON", help="the Python of an environment with unsloth")
    parser.add_argument("--cpu", action="store_true", help="on the CPU although there is a card")
    return parser.parse_args()


def _sides(options: argparse.Namespace) -> list[tuple[str, str, list[str], dict[str, bool]]]:
    """(name, its Python, its program, what is switched off) of each."""
    own, trl = ["benchmarks.pace.with_homelab"], ["benchmarks.pace.with_trl"]
    sides = [("homelab", sys.executable, own, {}), ("trl", sys.executable, trl, {})]
    if options.unsloth:
        sides.append(("unsloth", options.unsloth, [*trl, "unsloth"], {}))
    if options.switches:
        names = [field.name for field in dataclasses.fields(Switches)]
        sides += [(f"without {name}", sys.executable, own, {name: False}) for name in names]
    return sides


def _tokens(place: Path) -> list[int]:
    """Tokens of each step's rows."""
    from transformers import AutoTokenizer

    run = json.loads((place / "run.json").read_text(encoding="utf-8"))
    rows = settings.rows_in_order(run, AutoTokenizer.from_pretrained(run["recipe"]["model"]["name"]))
    lengths = [len(row.tokens) for row in rows]
    return [sum(lengths[at : at + settings.GLOBAL_BATCH]) for at in range(0, len(lengths), settings.GLOBAL_BATCH)]


def _compare(sides: list[Side], tokens: list[int]) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Figures, and lines for people. `tokens` of the timed steps."""
    ours = sides[0]
    figures: dict[str, float] = {}
    rows = []
    for side in sides:
        speeds = [count / seconds for count, seconds in zip(tokens, side.seconds[_FIRST:], strict=False)]
        rows.append((f"{side.name}, tokens/s", report.spread(speeds)))
    for side in sides[1:]:
        ratios = [theirs / mine for theirs, mine in zip(side.seconds[_FIRST:], ours.seconds[_FIRST:], strict=True)]
        apart = max(abs(a - b) / abs(b) for a, b in zip(ours.losses[:_FIRST], side.losses[:_FIRST], strict=True))
        rows.append((f"homelab over {side.name}", report.spread(ratios)))
        if side.name.startswith("without "):
            figures["gain_of_" + side.name.removeprefix("without ")] = statistics.median(ratios)
            continue
        figures[f"tokens_per_s_over_{side.name}"] = statistics.median(ratios)
        if side.name == "trl":
            figures["first_loss_difference"] = apart
        else:
            rows.append((f"losses of the first steps, homelab and {side.name}, relative", f"{apart:.1e}"))
    return figures, rows


if __name__ == "__main__":
    sys.exit(main())
