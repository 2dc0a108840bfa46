"""A part of `scripts/bench gpu` without torch, for the tests of what is around the parts. What it does stands in its folder's name."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time

from benchmarks.gpu_parts.place import Place


def measure(place: Place) -> None:
    """Tell something, then end as the name says."""
    place.run("seen", device=place.device, is_card=place.is_card)
    place.figure("answer", 41)
    place.figure("answer", 42)
    if place.folder.name == "stuck":
        print("the part waits", flush=True)
        (place.folder / "run").mkdir()
        (place.folder / "run" / "rank-0.txt").write_text("the rank waits")
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
        place.run("child", pid=child.pid)
        time.sleep(100)
    if place.folder.name == "carried":
        value = importlib.import_module("carried_package").VALUE
        place.run("environment", value=value, session=os.getsid(0), cards=os.environ["CUDA_VISIBLE_DEVICES"])
    if place.folder.name == "stumbling":
        print("the part stumbles", flush=True)
        with place.attempt("the first"):
            raise RuntimeError("a" * 5000 + " and fell")
        place.figure("second", 2)
    if place.folder.name == "broken":
        raise RuntimeError("the card fell off")
    place.gate("holds", place.folder.name != "missed")
