"""The profile of a rank: what asks for it in run.json, and its files in a run's folder.

    run.json        "profile": {"first_step": 8, "last_step": 10, "ranks": [0, 2]}
    profiles/rank-2/
        rank.pt.trace.json.gz   Chrome's trace format: Perfetto opens it, and TensorBoard's profiler plugin knows it by the end of its name
        profile.json            the summary: the dearest operators, the exchanges with other ranks, memory over time

The folder gets its name when both files are whole.
"""

from __future__ import annotations

REQUEST = "profile"
PROFILES = "profiles"
TRACE = "rank.pt.trace.json.gz"
SUMMARY = "profile.json"

# Ranges in the trace. Those of modules are followed by the module's path: "module model.layers.2.mlp".
INPUT = "input"
FORWARD = "forward"
BACKWARD = "backward"
REDUCTION = "reduction"
OPTIMIZER = "optimizer"
PHASES = (INPUT, FORWARD, BACKWARD, REDUCTION, OPTIMIZER)
MODULE = "module "


def rank_folder(rank: int) -> str:
    """Folder of one rank's profile, in a run's."""
    return f"{PROFILES}/rank-{int(rank)}"


def rank_of(name: str) -> int | None:
    """The rank of a folder of this name below PROFILES; None for another name."""
    number = name[len("rank-") :]
    return int(number) if name.startswith("rank-") and number.isdecimal() and len(number) < 7 else None
