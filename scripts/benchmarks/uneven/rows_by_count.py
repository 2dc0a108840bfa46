"""Baseline, started as a [script]: homelab's own worker, but rows are dealt by their number and not by their length.

    rows_by_count.py RUN SHARE...

Each rank takes the next so many rows of the global batch, as unequal per-rank batch sizes over an ordinary sampler would. RUN is
an earlier run of the built-in worker on the same nodes: its recipe, data and plan are used again, with these shares.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from homelab.shared.law import assignment
from homelab.worker.runtime import task
from homelab.worker.training import train


def deal(lengths: Sequence[int], _speeds: object, _limits: object, rows_of: Sequence[int] | None = None) -> list[list[int]]:
    """In place of `assignment.assign`: contiguous pieces of the global batch, `rows_of[rank]` rows each."""
    assert rows_of is not None and sum(rows_of) == len(lengths), "a fixed plan gives every rank its number of rows"
    ends = list(accumulate(rows_of))
    return [list(range(end - count, end)) for end, count in zip(ends, rows_of, strict=True)]


def main() -> int:
    """Returns the worker's exit code."""
    earlier, *shares = sys.argv[1:]
    own = Path(os.environ["HOMELAB_RUN_DIR"])
    loaded = task.load_task({**os.environ, "HOMELAB_RUN_DIR": str(own.parent / earlier), "HOMELAB_ATTEMPT": "1"})
    # The speeds stay: passes are cut as well as in homelab's own runs, only the rows of a rank are others.
    ranks = [{**rank, "share": int(shares[rank["rank"]])} for rank in loaded.plan["ranks"]]
    plan = {**loaded.plan, "ranks": ranks, "balance": "fixed"}
    own_task = dataclasses.replace(loaded, run_dir=own, attempt=int(os.environ["HOMELAB_ATTEMPT"]), plan=plan)
    train.load_task = lambda _environment: own_task
    assignment.assign = deal
    return train.main()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as the worker itself ends
