"""Before a run goes on: which checkpoints are not used, and which copy counts where nodes hold different ones. Pure; words for people."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from homelab.shared.protocol import checkpoint_copies
from homelab.shared.protocol.checkpoint_holders import WHOLE, Holding


@dataclass(frozen=True)
class ResumePoint:
    """From where a run goes on: `step`, 0 for the beginning. `holders` have it whole, with this `digest` and these `files` (name -> sha256).

    `notes`: checkpoints and copies that are not used, and why. `shards`: node -> what it has, where no node has all of it;
    `sizes`: node -> bytes of its copy.
    """

    step: int
    holders: list[str]
    digest: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    shards: Mapping[str, Holding] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def held(self) -> Mapping[str, Holding]:
        """Node -> what it has of the checkpoint."""
        return self.shards or dict.fromkeys(self.holders, WHOLE)


def choose(step: int, files_of: Mapping[str, Mapping[str, str]]) -> ResumePoint:
    """`files_of`: node -> sha256 of the files of its copy, the head first. A node that does not say them counts as holding the right one."""
    digests = {node: digest for node, files in files_of.items() if (digest := checkpoint_copies.state_digest(files))}
    right = checkpoint_copies.right(digests)
    odd = [node for node, digest in digests.items() if digest != right]
    holders = [node for node in files_of if node not in odd]
    same = [node for node in holders if node in digests]
    # The curves beside the state may differ without harm; they are no reason to replace a copy.
    files = {name: digest for name, digest in (files_of[same[0]] if same else {}).items() if name in checkpoint_copies.STATE}
    if not odd:
        return ResumePoint(step, holders, right, files)
    is_majority = len(same) > len(odd)
    why = "most hold this one" if is_majority else f"each copy is on the same number of nodes, and {same[0]} comes first"
    receivers = f"{', '.join(odd)} receive{'s' if len(odd) == 1 else ''} {'theirs' if len(same) > 1 else f'that of {same[0]}'}"
    note = f"checkpoint {step} on {', '.join(odd)} has other weights, or another optimizer state, than on {', '.join(same)}: {receivers} ({why})"
    return ResumePoint(step, holders, right, files, (note,))


def incomplete(steps: Mapping[int, tuple[int, ...]], silent: Collection[str]) -> tuple[str, ...]:
    """Why checkpoints are not used of which nobody that answers has these parts. `silent`: nodes that may have them."""
    maybe = f" ({', '.join(silent)} may have {{}}, and {'does' if len(silent) == 1 else 'do'} not answer)" if silent else ""
    return tuple(
        f"checkpoint {step} is not used: no node that answers has {_parts(parts)}{maybe.format('it' if len(parts) == 1 else 'them')}"
        for step, parts in steps.items()
    )


def _parts(parts: Sequence[int]) -> str:
    return f"shard{'' if len(parts) == 1 else 's'} {', '.join(map(str, parts))}"


def unused(step: int, bad: Mapping[str, Mapping[str, str]]) -> tuple[str, ...]:
    """Why checkpoints from `step` on are not used. `bad`: node -> step -> why. One line for all nodes that say the same."""
    nodes_of: dict[tuple[int, str], list[str]] = {}
    for node, faults in bad.items():
        for number, why in faults.items():
            if number.isdecimal() and int(number) >= step:
                nodes_of.setdefault((int(number), why), []).append(node)
    return tuple(
        f"checkpoint {number} on {', '.join(nodes)} is not used: {why}" for (number, why), nodes in sorted(nodes_of.items(), reverse=True)
    )
