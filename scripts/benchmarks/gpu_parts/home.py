"""homelab's own commands on this one machine, its only node, without SSH: what a person types, and what it says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_parts import ranks
from benchmarks.gpu_parts.environment import python_path
from benchmarks.gpu_parts.place import Place


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code; 124: it did not end within its limit."""

    code: int
    output: str
    errors: str
    seconds: float

    @property
    def has_traceback(self) -> bool:
        """Whether a person would see one."""
        return "Traceback (most recent call last)" in self.output + self.errors


@dataclass(frozen=True)
class Home:
    """A folder with the cluster.toml of this machine."""

    place: Place
    folder: Path

    @classmethod
    def of(cls, place: Place, name: str = "home") -> Home:
        """cluster.toml names this Python and, on a card, what torch says of it."""
        folder = place.folder / name
        folder.mkdir()
        gpus = f"gpus = {_cards()}\n" if place.is_card else ""
        node = f'[[nodes]]\nname = "here"\nhost = "local"\npython = {json.dumps(sys.executable)}\nworkdir = {json.dumps(str(folder / "work"))}\n{gpus}'
        (folder / "cluster.toml").write_text(f'[cluster]\nname = "bench"\n{node}', encoding="utf-8")
        return cls(place, folder)

    def type(self, *words: str, limit_s: float = 60.0) -> Said:
        """One command to its end, or to a Ctrl-C at its limit, which leaves nothing on the card. Its words go into a file of the part, for the report of what fails."""
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "homelab", *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            cwd=self.folder, env={**os.environ, **self._variables},
        )  # fmt: skip
        is_late = False
        try:
            output, errors = process.communicate(timeout=limit_s * ranks.patience())
        except subprocess.TimeoutExpired:
            is_late = True
            process.send_signal(signal.SIGINT)
            output, errors = process.communicate(timeout=30)
        said = Said(124 if is_late else process.returncode, output, errors, time.monotonic() - began)
        file = self.folder / f"{len(list(self.folder.glob('*.txt')))}-{words[0]}.txt"
        file.write_text(f"$ homelab {' '.join(words)}\n{output}\n{errors}\n[{said.code}]\n", encoding="utf-8")
        self.place.run(
            f"homelab {words[0]}", words=list(words), code=said.code, seconds=said.seconds, output=output[-1500:], errors=errors[-1500:]
        )
        return said

    @property
    def _variables(self) -> dict[str, str]:
        return {
            "HOMELAB_CLUSTER": str(self.folder / "cluster.toml"), "HOMELAB_RUNS": str(self.folder / "runs"), "PYTHONPATH": python_path(), "COLUMNS": "120",
            "HF_HUB_OFFLINE": "1",
        }  # fmt: skip


def _cards() -> str:
    import torch

    properties = torch.cuda.get_device_properties(0)
    name = properties.name.removeprefix("NVIDIA ").removeprefix("GeForce ")
    return f'[{{ model = "{name}", vram_gb = {round(properties.total_memory / 2**30)} }}]'
