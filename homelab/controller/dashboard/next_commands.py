"""The next useful commands for a run, by its state. Pure."""

from __future__ import annotations

from homelab.controller.base.hint import NO_COMMAND, homelab
from homelab.controller.dashboard.snapshot import NextCommand
from homelab.controller.diagnose.cause import Diagnosis
from homelab.controller.run.state import State


def next_commands(state: State, run: str, diagnosis: Diagnosis | None = None, *, is_script: bool = False) -> tuple[NextCommand, ...]:
    """What a person may want to type in this state, without options.

    The model of a program of one's own (`is_script`) cannot be asked. Where the fix of the `diagnosis` is a new training, to recover the old one is not what comes next.
    """
    commands = {
        "launch": diagnosis.launch if diagnosis else NO_COMMAND,
        "follow": homelab("status", run),
        "logs": homelab("logs", run),
        "stop": homelab("stop", run),
        "recover": homelab("recover", run),
        "ask it": homelab(f"chat {run} --prompt '...'"),
    }
    wanted: dict[State, tuple[str, ...]] = {
        "done": ("logs",) if is_script else ("ask it", "logs"),
        "failed": ("launch" if commands["launch"] else "recover", "logs"),
        "lost": ("recover", "follow", "stop"),
        "stopped": ("recover", "logs"),
    }
    return tuple(NextCommand(purpose=name, command=commands[name]) for name in wanted.get(state, ("follow", "stop", "recover")))
