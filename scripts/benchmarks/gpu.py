"""Measurements that need a real card, in parts that each have a process and a time limit: scripts/bench gpu [--only NAME ...] [--limit S].

A part that fails or runs out of time keeps what it had measured by then, and the next one begins. The file of --json is written anew every
few seconds, so that what is known survives whatever ends this machine. Nothing is downloaded: models are random weights of real shapes, made
here; where trl, bitsandbytes or nvidia-smi is missing, the part says so and measures the rest. Ranks share the one card: how they behave is
real, how fast they are is not. Of several cards the first visible one is measured. Without scripts/bench (no network, an environment of your
own, packages in a folder of PYTHONPATH):

    PYTHONPATH=scripts:.:$PYTHONPATH python -m benchmarks.gpu --json gpu.json

"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu_parts import smi
from benchmarks.gpu_parts.catalogue import PARTS, Part
from benchmarks.gpu_parts.runner import Outcome, run

_NO_CARD = """error: torch sees no CUDA card on this machine, and this benchmark measures one
fix:   run it where `python -c "import torch; print(torch.cuda.is_available())"` prints True (homelab preflight --only gpu says why it does not)"""


def main(arguments: list[str] | None = None) -> int:
    """Run the parts in their order while there is time. Returns 0, 1 where a part failed or a gate was missed, 2 without a card."""
    options = _arguments(arguments)
    if options.device == "cuda" and not sees_a_card():
        print(_NO_CARD, file=sys.stderr)
        return 2
    began = time.monotonic()
    document: dict[str, Any] = {
        "figures": {},
        "gates": {},
        "parts": {},
        "runs": [],
        "machine": _machine(),
        "command": " ".join(sys.argv),
        "time": time.time(),
    }
    for needed in (options.folder, options.json.parent if options.json else None):
        if needed is not None:
            needed.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="homelab-bench-gpu-", dir=options.folder))
    outcomes: dict[str, Outcome] = {}

    def keep() -> None:
        """Write all results so far into the file of --json."""
        for name, outcome in outcomes.items():
            document["parts"][name] = outcome.summary()
            document["figures"] |= {f"{name}.{key}": value for key, value in outcome.figures.items()}
            document["gates"] |= {f"{name}.{key}": value for key, value in outcome.gates.items()}
        document["runs"] = [{"part": name, **line} for name, outcome in outcomes.items() for line in outcome.runs]
        if options.json is not None:
            partial = options.json.with_name(options.json.name + ".partial")
            partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            partial.replace(options.json)

    try:
        for part in [part for part in PARTS if not options.only or part.name in options.only]:
            left_s = options.limit - (time.monotonic() - began)
            outcome = outcomes[part.name] = Outcome()
            if left_s < part.least_s * (options.device == "cuda"):
                outcome.state, outcome.problem = "not begun", f"{left_s:.0f} s are left of --limit, it wants {part.least_s} s"
            else:
                print(f"{part.name}: {part.title}", flush=True)
                run(part, outcome, folder, options.device, min(part.limit_s, left_s), keep)
            keep()
            _say(part, outcome)
    finally:
        keep()
        shutil.rmtree(folder, ignore_errors=True)
    missed = [name for name, holds in document["gates"].items() if not holds]
    failed = [name for name, outcome in outcomes.items() if outcome.state in ("failed", "out of time")]
    if missed:
        print(f"missed: {', '.join(missed)}")
    return 1 if missed or failed else 0


def sees_a_card() -> bool:
    """Asked in a process of its own: this one must hold no memory of the card."""
    question = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return (
        importlib.util.find_spec("torch") is not None
        and subprocess.run([sys.executable, "-c", question], capture_output=True).returncode == 0
    )


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    listed = "\n".join(f"  {part.name:10} {part.title}" for part in PARTS)
    parser = argparse.ArgumentParser(
        description=f"{__doc__}parts, in this order:\n{listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures and raw measurements here")
    parser.add_argument("--only", action="append", metavar="NAME", choices=[part.name for part in PARTS], help="only this part; repeatable")
    parser.add_argument(
        "--limit", type=float, metavar="S", default=float("inf"), help="seconds for all parts; one that does not fit is not begun"
    )
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="where models and runs are kept meanwhile (some tens of GB; default: the system's)"
    )
    # Tiny sizes over gloo on the CPU: whether the parts run at all. Its figures mean nothing.
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _say(part: Part, outcome: Outcome) -> None:
    print(f"  {outcome.state} after {outcome.seconds:.0f} s{f': {outcome.problem}' if outcome.problem else ''}")
    for name, value in outcome.figures.items():
        print(f"  {name:48} {value:.6g}")
    for name, holds in outcome.gates.items():
        print(f"  {name:48} {'holds' if holds else 'MISSED'}", flush=True)


def _machine() -> dict[str, Any]:
    """The machine of the figures."""
    return {
        "cards": smi.cards(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("torch", "transformers", "accelerate", "peft", "trl", "bitsandbytes")},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # so that nothing stays on the card
    sys.exit(main())
