"""A window of another run, computed again on this one's ranks: from a kept checkpoint of that run to the next, with which the weights are compared.

That run's folder lies beside this one's, on the nodes that have it. The first rank of each node takes the checkpoint from there, and compares.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homelab.shared.protocol import chain, checkpoint_copies, layout, manifest, window
from homelab.worker.checkpoints import checkpoint_folder, record_start
from homelab.worker.runtime import process_group
from homelab.worker.runtime.task import Task

if TYPE_CHECKING:
    from homelab.worker.checkpoints.curves import Curves
    from homelab.worker.training.trainer import ShareTrainer


class Recomputed:
    """One per rank. Nothing happens where run.json asks for no window."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._request = task.run.get(window.REQUEST) or {}
        self._start: dict[str, Any] = {}  # the weights before the first step, where no checkpoint has them

    @property
    def is_asked(self) -> bool:
        """Whether this run is such a window."""
        return bool(self._request)

    @property
    def recorded_passes(self) -> dict[str, str]:
        """Step -> the passes of that run, where they are to be repeated."""
        return self._request.get("passes") or {}

    def why_over(self, step: int) -> str | None:
        """The reason to end after this step; None where there is none."""
        return "the window ends here" if self._request and step >= int(self._request["end"]) else None

    def take_checkpoint(self) -> None:
        """Link the other run's checkpoint into this run's folder, where this node has it, and what its base gave to answers: a model that was trained in between
        cannot say it. What lies there is verified as always."""
        if not self._request or not self._task.is_keeper or not self._request["begin"]:
            return
        reference = self._other / layout.REFERENCE
        if reference.is_file():
            shutil.copy(reference, self._task.run_dir / layout.REFERENCE)
        step, root = int(self._request["begin"]), self._task.checkpoints_dir
        source = self._kept(step)
        if source is None or (root / source.name).exists():
            return
        partial = root / f".{source.name}.{os.getpid()}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for file in source.iterdir():
            try:
                os.link(file, partial / file.name)
            except OSError:  # a disk without links, or another one
                shutil.copy(file, partial / file.name)
        checkpoint_folder.put(partial, root, step)

    def begin(self, trainer: ShareTrainer) -> None:
        """No step is done yet. Collective."""
        if self._request and not self._request["begin"]:
            whole = trainer.strategy.whole_weights(trainer.model)
            self._start = {name: weight.detach().cpu().clone() for name, weight in whole.items()} if self._task.is_keeper else {}

    def finish(self, trainer: ShareTrainer, curves: Curves) -> None:
        """The last step is done: compare the weights, and write the folder of this window. Collective."""
        whole = trainer.strategy.whole_weights(trainer.model)
        own = self._compared(whole) if self._task.is_keeper else None
        everyone = [json.loads(text) for text in process_group.exchange("compared", json.dumps(own))]
        if self._task.rank != 0:
            return
        found = next((entry for entry in everyone if entry is not None), None)
        lines = [
            line
            for line in map(json.loads, curves.text().splitlines())
            if line["step"] > self._request["begin"] or line["kind"] == chain.START
        ]
        partial = self._task.run_dir / f".{window.FOLDER}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        (partial / chain.RECORD).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        devices = sorted({rank.device_name for rank in self._task.ranks})
        content = {"weights": found, "versions": record_start.versions(), "devices": devices}
        (partial / window.COMPARED).write_text(json.dumps(content), encoding="utf-8")
        shutil.rmtree(self._task.run_dir / window.FOLDER, ignore_errors=True)
        os.replace(partial, self._task.run_dir / window.FOLDER)

    def _compared(self, whole: dict[str, Any]) -> dict[str, Any] | None:
        """Of all trained weights as one vector: how far these are from the kept ones, how far those are from the start (the way), and the largest
        difference of a single weight. None where this node has no kept checkpoint of the last step."""
        from safetensors.torch import load_file

        from homelab.worker.checkpoints.weights import WEIGHTS

        kept = self._kept(int(self._request["end"]))
        if kept is None:
            return None
        checkpoint_folder.verify(kept, self._task.recipe_hash)
        before = Path(manifest.folder_of(self._task.run_dir, self._request["begin"]))
        start = self._start or load_file(str(before / WEIGHTS))
        end = load_file(str(kept / WEIGHTS))
        apart = way = most = 0.0
        for name, weight in whole.items():
            difference = weight.detach().cpu().double() - end[name].double()
            apart += float((difference**2).sum())
            most = max(most, float(difference.abs().max())) if difference.numel() else most
            way += float(((end[name].double() - start[name].double()) ** 2).sum())
        return {"node": self._task.node, "apart": math.sqrt(apart), "way": math.sqrt(way), "most": most}

    def _kept(self, step: int) -> Path | None:
        """The other run's checkpoint of this step as its record names it; None where this node does not have it."""
        folder = Path(manifest.folder_of(self._other, step))
        if not (folder / manifest.MANIFEST).is_file():
            return None
        named = (self._request.get("kept") or {}).get(str(step))
        return folder if named in (None, checkpoint_copies.state_digest(manifest.digests(folder))) else None

    @property
    def _other(self) -> Path:
        return self._task.run_dir.parent / layout.checked(self._request["run"])
