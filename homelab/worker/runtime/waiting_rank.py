"""A rank that waits: it does the imports of its run, and becomes a rank of the next attempt when it is told so.

It touches no card: a CUDA context takes 0.5 GB of it. Its launcher (`homelab.node.run.rank_launcher`) writes one JSON line to its stdin.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from homelab.shared.protocol import layout, waiting_mark
from homelab.worker.runtime.task import Task

# bitsandbytes asks for the capability of every card (bitsandbytes/cuda_specs.py of 0.50), which takes a context; modules of others import it.
_ASKS_CARDS = re.compile("bitsandbytes|bnb")
_OOM_SCORE = Path("/proc/self/oom_score_adj")  # proc_pid_oom_score_adj(5): everybody may raise it, and lower it to where it was


def wait(task: Task, prepare: Callable[[Task], None]) -> None:
    """Import, then wait for the next attempt and take its environment and its files for output. Ends the process where none comes."""
    usual = _OOM_SCORE.read_text(encoding="utf-8")
    _OOM_SCORE.write_text(
        "1000", encoding="utf-8"
    )  # where memory ends, the kernel takes this process first, and never the training beside it
    prepare(task)
    import torch

    for name in names_of(task, takes_cards=bool(torch.version.cuda or torch.version.hip)):
        with contextlib.suppress(Exception):  # a module that only another one can import
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection of the training need not look at all of it
    if torch.cuda.is_initialized():
        print("an import has taken a card: nothing waits here", file=sys.stderr, flush=True)
        os._exit(1)  # it may have been told to go on by now, and has not: 0 would say that the training is done
    _rename(waiting_mark.WAITS)
    line = sys.stdin.buffer.readline()
    if not line:
        os._exit(0)
    _OOM_SCORE.write_text(usual, encoding="utf-8")
    _rename(waiting_mark.AT_WORK)
    said = json.loads(line)
    for name in set(os.environ) - set(said["environment"]):
        del os.environ[name]
    os.environ.update(said["environment"])
    for path, number in ((os.devnull, 0), (said["out"], 1), (said["err"], 2)):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(descriptor, number)
        os.close(descriptor)


def _rename(name: str) -> None:
    Path("/proc/self/comm").write_text(name, encoding="utf-8")


def names_of(task: Task, *, takes_cards: bool) -> list[str]:
    """What this rank had imported in the attempt that goes on now, in that order. `takes_cards`: without what asks CUDA for its cards in an import."""
    try:
        names = json.loads((task.rank_dir / layout.MODULES_JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    found = [name for name in names if isinstance(name, str) and not name.startswith("__")] if isinstance(names, list) else []
    return [name for name in found if not takes_cards or not _ASKS_CARDS.search(name)]
