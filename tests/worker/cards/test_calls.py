"""Which parts of a training send from rank to rank, make groups and pin memory: each call of these kinds has been a deadlock or an error on cards.

A new one belongs to the table with its reason, and into a training on stand-in cards.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import homelab.worker

WORKER = Path(homelab.worker.__file__).parent
MESSAGES = {
    "strategies/pipeline/neighbours.py": "gloo: a receive of NCCL occupies the card until its message comes",
    "strategies/pipeline/shared_table.py": "gloo, in the same group: after the passes, when no other message is on its way",
    "strategies/sharded/exchange.py": "where the group is gloo; on cards it is a reduce-scatter",
    "strategies/pipeline/generation.py": "a chat over several nodes, whose only group is gloo",
    "strategies/pipeline/trained_parts.py": "the same chat: what was trained goes to its stages",
}
GROUPS = {
    "strategies/pipeline/neighbours.py": "gloo, of all ranks: beside NCCL a smaller one stops those outside of it",
    "checkpoints/broadcast.py": "gloo, made by its members alone and given up after it: no later group has another name on some ranks",
    "strategies/sharded/shards.py": "meshes of all ranks, in one order; their limits are set to the training's patience",
}
PINNED = {"runtime/host_memory.py": "where the system gives it; else memory that is not pinned"}
KINDS = {
    "messages": ({"isend", "irecv", "send", "recv", "batch_isend_irecv", "P2POp"}, MESSAGES),
    "groups": ({"new_group", "new_subgroups", "split_group", "init_device_mesh", "init_process_group"}, GROUPS | {"runtime/process_group.py": "the first one"}),
    "pinned memory": ({"pin_memory"}, PINNED),
    "objects, which are pickled": ({"all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"}, {}),
    "barriers, which guess a card": ({"barrier", "monitored_barrier"}, {}),
}  # fmt: skip


def called(path: Path) -> Iterator[str]:
    """Names of what is called, and of the options that are given."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            function = node.func
            owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            if owner in ("", "dist", "torch.distributed") or name == "pin_memory":
                yield name
            yield from (option.arg for option in node.keywords if option.arg == "pin_memory")


@pytest.mark.parametrize("kind", KINDS)
def test_calls_that_have_stood_still_are_where_they_are_known(kind: str) -> None:
    names, known = KINDS[kind]
    found = {str(path.relative_to(WORKER)) for path in WORKER.rglob("*.py") if "tools" not in path.parts and names & set(called(path))}
    assert found == set(known)
