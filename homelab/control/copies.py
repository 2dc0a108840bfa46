"""Before a run goes on: which checkpoints are not used, and which copy counts where nodes hold different ones. Pure; words for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from homelab.worker import replicas


@dataclass(frozen=True)
class Chosen:
    """`holders` hold the right copy, of this `digest` and these `files` (name -> sha256). `notes`: who holds another one."""

    holders: list[str]
    digest: str
    files: Mapping[str, str]
    notes: tuple[str, ...]


def choose(step: int, files_of: Mapping[str, Mapping[str, str]]) -> Chosen:
    """`files_of`: node -> sha256 of the files of its copy, the head first. A node that does not say them counts as holding the right one."""
    digests = {node: digest for node, files in files_of.items() if (digest := replicas.state_digest(files))}
    right = replicas.right(digests)
    odd = [node for node, digest in digests.items() if digest != right]
    holders = [node for node in files_of if node not in odd]
    same = [node for node in holders if node in digests]
    # The curves beside the state may differ without harm; they are no reason to replace a copy.
    files = {name: digest for name, digest in (files_of[same[0]] if same else {}).items() if name in replicas.STATE}
    if not odd:
        return Chosen(holders, right, files, ())
    is_majority = len(same) > len(odd)
    why = "most hold this one" if is_majority else f"no copy has more votes than another, and {same[0]} comes first"
    whom = f"{', '.join(odd)} receive{'s' if len(odd) == 1 else ''} theirs" if len(same) > 1 else f"{', '.join(odd)} receive{'s' if len(odd) == 1 else ''} that of {same[0]}"
    note = f"checkpoint {step} on {', '.join(odd)} holds other weights, or another optimizer, than on {', '.join(same)}: {whom} ({why})"
    return Chosen(holders, right, files, (note,))


def unused(step: int, bad: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """Why checkpoints from `step` on are not used. `bad`: node -> step -> why. One line for all nodes that say the same."""
    told: dict[tuple[int, str], list[str]] = {}
    for node, faults in bad.items():
        for number, why in faults.items():
            if number.isdecimal() and int(number) >= step:
                told.setdefault((int(number), why), []).append(node)
    return tuple(f"checkpoint {number} on {', '.join(nodes)} is not used: {why}" for (number, why), nodes in sorted(told.items(), reverse=True))
