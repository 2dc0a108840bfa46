"""What stuck ranks were doing, asked before they are killed and kept with the attempt: attempts/<n>/nodes/<node>/stacks.txt, cards.txt."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from homelab.controller.base.sanitize import plain
from homelab.controller.planning.types import Plan
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import store
from homelab.controller.run.paths import RunPaths

# Of a node: stacks within 1 s, nvidia-smi within 5 s, the flight recorder within 3 s.
_TIMEOUT_S = 12.0


def keep(fleet: Fleet, paths: RunPaths, plan: Plan, names: Collection[str]) -> None:
    """Ask these nodes; a node that does not answer is left out."""
    answers, _ = fleet.ask("stacks", {"run": paths.name}, names=names, timeout_s=_TIMEOUT_S)
    for name, answer in answers.items():
        folder = paths.node(plan.attempt, name)
        with store.told(folder):
            store.write_text(folder / "stacks.txt", "\n".join(map(plain, _lines(answer))) + "\n")
            if answer.get("cards"):
                store.write_text(folder / "cards.txt", "\n".join(map(plain, answer["cards"])) + "\n")


def _lines(answer: Mapping[str, Any]) -> Iterator[str]:
    for rank, stack in answer["ranks"].items():
        yield f"rank {rank}:"
        yield from stack or ["  no answer"]
    for path in answer.get("dumps", ()):
        yield f"NCCL's flight recorder, on this node: {path}"
