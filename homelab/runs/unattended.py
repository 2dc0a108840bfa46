"""What the owner of a run has to know because nobody looks after it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from homelab.runs.reply import Reply, plain
from homelab.runs.state import State
from homelab.runs.watchdog import Verdict


def outliving(replies: Mapping[str, Reply], attempt: int, stop: str) -> tuple[str, ...]:
    """A line where processes of a run are alive on nodes on which its newest attempt has ended. `stop`: the command that ends them."""
    found = {
        name: run.processes - run.agent_alive
        for name, reply in replies.items()
        if (run := reply.run) and run.attempt == attempt and run.exit is not None and run.processes > run.agent_alive
    }
    if not found:
        return ()
    where = ", ".join(f"{name} ({count})" for name, count in found.items())
    return (f"processes of this run are alive on {where}, though its attempt {attempt} has ended: somebody typed its commands once more; {stop} ends them",)


def notes(
    state: State, known: Mapping[str, Any], silent_place: str, still: Verdict | None, *, recover: str, supervise: str, is_pending: bool = False
) -> tuple[str, ...]:
    """A line each, with the command that helps at its end; none for a run that needs nobody. Not to be asked where a supervisor is at work.

    `known`: supervisor.json, as the last one here has left it (a person may have spoilt it). `silent_place`: why nothing is heard of
    the one on a node, empty where it was not put on one. `still`: the verdict on ranks that stand still. `is_pending`: the command
    lives that is to leave a supervisor. `recover`, `supervise`: commands.
    """
    if state in ("done", "stopped", "planned", "shipping"):
        return ()
    said = []
    if known.get("doing") == "given up" and state == "failed":
        said.append(f"its supervisor has given up: {plain(str(known.get('why', '')))}; by hand: {recover}")
    elif silent_place:
        said.append(f"no supervisor is heard of ({silent_place}): after a failure this run goes on by {recover}")
    elif known.get("doing") in ("watching", "recovering"):
        said.append(f"nobody looks after this run any more: its supervisor (process {known.get('pid')} here) is gone; another one: {supervise}")
    elif known.get("wanted") is True and known.get("doing") in ("launching", "recovering by hand") and not is_pending:
        said.append(f"nobody looks after this run: the command that started it was ended before it had left a supervisor; one: {supervise}")
    if still is not None and state in ("starting", "running"):
        said.append(f"{still.because}, and no supervisor is at work: {recover}")
    return tuple(said)
