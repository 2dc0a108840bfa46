"""Brings the base model of a recipe to the nodes that lack it, from this machine."""

from __future__ import annotations

from collections.abc import Iterable

from homelab.control.setup import send
from homelab.control.setup.model_source import ModelSource
from homelab.control.setup.transfer_progress import TransferProgress
from homelab.models import DisplayValue
from homelab.provision import model_files
from homelab.provision.node_state import ModelState
from homelab.remote.agent import Agent
from homelab.remote.fanout import Fleet, Outcome, on_all
from homelab.text.say import Say
from homelab.text.units import decimal_size

_LOOK_TIMEOUT_S = 3600.0  # a large model is read to its end once


class ModelDone(DisplayValue):
    """What was found and done on a node. `missing`: names of files; `sent_bytes` 0 with --check."""

    folder: str
    missing: tuple[str, ...]
    missing_bytes: int
    sent_bytes: int = 0

    @property
    def text(self) -> str:
        """One line for a person."""
        if not self.missing:
            return f"the model is in {self.folder}"
        amount = f"{decimal_size(self.missing_bytes)} of the model, to {self.folder}"
        return f"sent {amount}" if self.sent_bytes else f"to send: {amount}"


def run(fleet: Fleet, names: Iterable[str], source: ModelSource, *, check: bool, say: Say) -> Outcome[ModelDone]:
    """Send what is missing, or with `check` only compare. One node's error does not stop the others."""
    say(f"looking for {source.name} on the nodes")
    progress = TransferProgress(say)
    return on_all(list(names), lambda name: _one(fleet.agent(name), source, check=check, progress=progress), stop=fleet.give_up_all)


def _one(agent: Agent, source: ModelSource, *, check: bool, progress: TransferProgress) -> ModelDone:
    place = {"model": source.name, "commit": source.commit}
    wanted = {part.name: part.sha256 for part in source.files}
    state = ModelState.model_validate(agent.ask("model-look", {**place, "files": wanted}, timeout_s=_LOOK_TIMEOUT_S))
    missing = model_files.lacking(agent.node.name, state, list(source.files))
    sizes = {part: part.size_bytes - state.partial.get(part.name, 0) for part in missing}
    if not check and missing:
        progress.begin(agent.node.name, sum(sizes.values()))
        target = send.Target("model-receive", place)
        for part in missing:
            begun_bytes = state.partial.get(part.name, 0)
            send.file(agent, target, part, source.files[part], begun_bytes, lambda count: progress.add(agent.node.name, count))
        progress.end(agent.node.name, "done")
    sent_bytes = 0 if check else sum(sizes.values())
    return ModelDone(folder=state.folder, missing=tuple(part.name for part in missing), missing_bytes=sum(sizes.values()), sent_bytes=sent_bytes)
