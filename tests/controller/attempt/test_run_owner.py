"""Who owns a run, by what several nodes say: each knows only its own processes."""

from __future__ import annotations

from pathlib import Path

from homelab.controller.attempt import run_owner
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.owner_messages import Follower, Owner
from homelab.shared.protocol.run_messages import Reply

HEADS = {"pid": 71, "born": 5, "boot_id": "of the head", "namespace": "pid:[7]"}
OTHERS = {**HEADS, "boot_id": "of another machine"}


def _owner(tmp_path: Path, *followers: Follower) -> str:
    replies = {f"node{number}": Reply(node=f"node{number}", time=1.0, owner=Owner(supervisor=one)) for number, one in enumerate(followers)}
    return run_owner.of_run(RunPaths(tmp_path), 1, replies, {}).doing


def test_one_that_died_on_the_head_counts_on_no_node(tmp_path: Path) -> None:
    heard, dead = (Follower(by="root on head", process=HEADS, silent_s=1.0, is_dead=is_dead) for is_dead in (False, True))
    assert _owner(tmp_path, heard, heard) == "working elsewhere (root on head)", "the control"
    assert _owner(tmp_path, heard, dead) == _owner(tmp_path, dead, heard) == ""
    other = Follower(by="me on laptop", process=OTHERS, silent_s=9.0)
    assert _owner(tmp_path, dead, other, heard) == "working elsewhere (me on laptop)"
