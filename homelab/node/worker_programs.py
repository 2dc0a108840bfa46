"""The worker's own programs for a question: a chat with a run's model, and a dry run of a model's memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from homelab.node import paths
from homelab.shared.protocol import files, layout
from homelab.shared.protocol.errors import EXIT_NO_ROOM, Refusal, parts_of

if TYPE_CHECKING:
    from homelab.shared.protocol.files import JsonObject


def chat(request: JsonObject) -> Any:
    """Ask the worker's chat program; its answer is the last JSON line of its stdout. Raises Refusal."""
    body = dict(request, run_dir=paths.run_dir(request["workdir"], request["run"]))
    limit_s = float(request.get("timeout_s", 300))
    try:
        completed = subprocess.run(
            [sys.executable, "-m", "homelab.worker.tools.chat"],
            input=json.dumps(body),
            capture_output=True,
            text=True,
            timeout=limit_s,
            env=dict(os.environ, HF_HUB_DISABLE_PROGRESS_BARS="1", **cards_of(body["run_dir"], request["node"])),
        )
    except subprocess.TimeoutExpired:
        raise Refusal(f"the model gave no answer within {limit_s:.0f} s") from None
    try:
        return json.loads(completed.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise _refusal(completed, "chat program") from None


def dry_run(request: JsonObject) -> Any:
    """Ask the worker's dry run. It prints all results after each of them, so the last line is the answer also when the time is over. Raises Refusal."""
    limit_s = float(request.get("time_limit_s", 60))
    command = [sys.executable, "-m", "homelab.worker.tools.memory_dry_run"]
    completed = None
    try:
        completed = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=limit_s)
        output: Any = completed.stdout
    except subprocess.TimeoutExpired as late:
        output = late.stdout or ""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output
    lines = [line for line in text.split("\n")[:-1] if line.strip()]
    try:
        return json.loads(lines[-1])
    except (ValueError, IndexError):
        if completed is None:
            raise Refusal(f"the dry run did not end within {limit_s:.0f} s") from None
        raise _refusal(completed, "dry run") from None


def cards_of(run_folder: str, node: str) -> dict[str, str]:
    """The variables of the newest attempt in which this node took part that name its cards (other cards are not the run's), and spare torch a compiler."""
    for attempt in paths.attempts(run_folder):
        node_dir = paths.node_dir(run_folder, attempt, paths.name_here(run_folder, attempt, node))
        started = files.read_object(os.path.join(node_dir, layout.START_JSON))
        if started:
            environment = started.get("environment") or {}
            return {
                name: environment[name]
                for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "TORCH_DISABLE_NATIVE_JIT")
                if name in environment
            }
    return {}


def _refusal(completed: subprocess.CompletedProcess[str], program: str) -> Refusal:
    """What the program said on stderr: its own three parts, or the last line of whatever went wrong."""
    parts = parts_of(completed.stderr)
    if parts:
        return Refusal(**parts, kind="no-room" if completed.returncode == EXIT_NO_ROOM else "refused")
    if completed.returncode == -signal.SIGKILL:  # by the kernel: a limit of a control group is in no estimate
        hint = "free RAM on this node (ps aux --sort=-rss | head shows the programs that use it), or raise the limit of its control group, then ask again"
        return Refusal(f"the {program} was killed: this node has not enough memory for it", hint=hint, kind="no-room")
    last = (completed.stderr.strip().splitlines() or [f"exit code {completed.returncode}"])[-1]
    return Refusal(f"the {program} failed: {last[:500]}")
