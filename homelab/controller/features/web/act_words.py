"""What a page offers to do with a run, and what it says before and after. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from homelab.controller.base.errors import EXIT_DONE, EXIT_FAILED, EXIT_INPUT, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_UNREACHABLE
from homelab.controller.dashboard import words
from homelab.controller.dashboard.snapshot import Snapshot

Act = Literal["stop", "recover"]
"""A command of ours that a page may begin for a run."""

_STATES = {"stop": ("starting", "running", "stopping", "lost"), "recover": ("failed", "lost", "stopped")}
_ENDS = {
    EXIT_DONE: "it is done", EXIT_FAILED: "it has failed", EXIT_INPUT: "it was refused", EXIT_UNREACHABLE: "a node could not be asked",
    EXIT_INTERNAL: "it has a fault of its own", EXIT_INTERRUPTED: "it was interrupted",
}  # fmt: skip
_BESIDE = (". ", "╭", "│", "╰")  # progress, and the frame of a diagnosis
_PARTS = {"error": "message", "where": "where", "fix": "hint"}


def offered(snapshot: Snapshot) -> list[dict[str, str]]:
    """What may be done now, of the commands that this snapshot names next: the command as it is run, and in one sentence what comes of it."""
    commands = [entry for entry in snapshot.next_commands if snapshot.state in _STATES.get(entry.purpose, ())]
    return [{"act": entry.purpose, "command": str(entry.command), "will": _will(entry.purpose, snapshot)} for entry in commands]


def _will(act: str, snapshot: Snapshot) -> str:
    saved = max(snapshot.checkpoint_steps, default=None)
    lost = 0 if saved is None else max(0, snapshot.step - saved)
    again = f"does {words.count(lost)} step{'s' if lost != 1 else ''} again" if lost else "repeats no step"
    if act == "stop":
        then = (
            "its checkpoints stay"
            if saved is None
            else f"a later recovery goes on from the checkpoint of step {words.count(saved)} and {again}"
        )
        return f"The training ends on all its nodes; {then}."
    if saved is None:
        return "The run goes on from its newest checkpoint, on the nodes that are well."
    return f"The run goes on from the checkpoint of step {words.count(saved)}, on the nodes that are well, and {again}."


def is_answer(line: str) -> bool:
    """Whether this is more than progress or a diagnosis: the first such line of a command is its answer."""
    return bool(line.strip()) and not line.startswith(_BESIDE)


def ended(code: int, lines: Sequence[str]) -> dict[str, Any]:
    """How a command has ended that said these lines last: its exit code in words, the first line of its answer, and its error in three parts, if any."""
    said = _ENDS.get(code, f"it was ended by signal {-code}" if code < 0 else "it has ended")
    answer = next(filter(is_answer, lines), "")
    return {"code": code, "words": f"{said} (exit code {code})", "answer": answer, "error": _error(lines) if code else None}


def _error(lines: Sequence[str]) -> dict[str, str] | None:
    """The last that the command has printed (`homelab.cli.terminal.three_parts`), or None: a line without a label goes on with the part before it."""
    parts: dict[str, str] | None = None
    part = ""
    for line in lines:
        label, colon, rest = line.partition(": ")
        if colon and label == "error":
            parts, part = {"message": "", "where": "", "hint": ""}, "message"
        elif colon and label == "warning":
            part = ""
        elif colon and part and label in _PARTS:
            part = _PARTS[label]
        else:
            rest = line
        if parts is not None and part:
            parts[part] = f"{parts[part]}\n{rest.strip()}".strip()
    return parts
