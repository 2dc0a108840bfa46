"""Brings the base model of a recipe, or its data of the hub, to the nodes that lack it, from this machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack

from homelab.controller.base.errors import HomelabError
from homelab.controller.base.models import DisplayValue
from homelab.controller.base.say import Say
from homelab.controller.base.units import decimal_size, listed
from homelab.controller.facts.reading import read
from homelab.controller.features.setup import model_files, relay, send
from homelab.controller.features.setup.model_source import ModelSource
from homelab.controller.features.setup.setup_plan import SetupOptions
from homelab.controller.features.setup.transfer_progress import TransferProgress
from homelab.controller.remote.agent import Agent
from homelab.controller.remote.fanout import Fleet, Outcome, on_all
from homelab.shared.protocol.setup_messages import ModelRequest, ModelState

_LOOK_TIMEOUT_S = 3600.0  # a large model is read to its end once


class ModelDone(DisplayValue):
    """What was found and done on a node. `what`: "the model", "hub:org/name"; `missing`: names of files; `sent_bytes` 0 with --check.
    `changed`: they are there now.
    """

    what: str
    folder: str
    missing: tuple[str, ...]
    missing_bytes: int
    sent_bytes: int = 0
    changed: bool = False

    @property
    def text(self) -> str:
        """One line for a person."""
        if not self.missing:
            return f"{self.what} is in {self.folder}"
        if not self.missing_bytes:
            return f"{self.what} is in {self.folder}; {'written' if self.changed else 'to write'}: {listed(self.missing)}"
        amount = f"{decimal_size(self.missing_bytes)} of {self.what}, to {self.folder}"
        return f"sent {amount}" if self.changed else f"to send: {amount}"


def run(fleet: Fleet, names: Iterable[str], source: ModelSource, how: SetupOptions, say: Say) -> Outcome[ModelDone]:
    """Bring what is missing, or with `check` only compare. One node's error does not stop the others."""
    say(f"looking for {source.name} on the nodes")
    target = send.Target("model-receive", source.place, source.commit)
    states, errors = on_all(list(names), lambda name: _look(fleet.agent(name), source), stop=fleet.give_up_all)
    progress, done, failed = TransferProgress(say), dict[str, ModelDone](), dict[str, HomelabError]()

    def one(name: str, addresses: Mapping[str, str]) -> ModelDone:
        return _bring(fleet.agent(name), states[name], source, target, addresses, None if how.check else progress)

    def all_of(some: Iterable[str], addresses: Mapping[str, str]) -> None:
        brought, not_brought = on_all(some, lambda name: one(name, addresses), stop=fleet.give_up_all)
        done.update(brought)
        failed.update(not_brought)

    lacking = [name for name, state in states.items() if len(state.good) < len(source.files)]
    first = next(iter([name for name in states if name not in lacking] or lacking), None)
    if how.between_nodes and not how.check and first and len(states) > 1:
        all_of([first], {})
        with ExitStack() as share:
            addresses = share.enter_context(relay.sharing(fleet.agent(first), target, list(source.files), say)) if first in done else {}
            all_of([name for name in states if name != first], addresses)
    else:
        all_of(states, {})
    return {name: done[name] for name in states if name in done}, errors | failed


def _look(agent: Agent, source: ModelSource) -> ModelState:
    return read(ModelState, agent.ask("model-look", _request(source), timeout_s=_LOOK_TIMEOUT_S))


def _request(source: ModelSource) -> ModelRequest:
    files = {part.name: part.sha256 for part in source.files}
    return ModelRequest(model=source.place, commit=source.commit, revision=source.revision, files=files)


def _bring(
    agent: Agent,
    state: ModelState,
    source: ModelSource,
    target: send.Target,
    addresses: Mapping[str, str],
    progress: TransferProgress | None,
) -> ModelDone:
    """`addresses`: sha256 -> where another node serves the file. `progress` None: only compare."""
    name = agent.node.name
    missing = model_files.lacking(name, state, list(source.files))
    sizes = {part: part.size_bytes - state.partial.get(part.name, 0) for part in missing}
    if progress is not None and missing:
        progress.begin(name, sum(sizes.values()))
        for part in missing:
            begun_bytes = state.partial.get(part.name, 0)
            address = addresses.get(part.sha256)
            if address is None or send.fetched(agent, target, part, address, begun_bytes, lambda count: progress.add(name, count)):
                send.file(agent, target, part, source.files[part], begun_bytes, lambda count: progress.add(name, count))
        progress.end(name, "done")
    if progress is not None and not state.is_named:
        agent.ask("model-name", _request(source))
    lacking = (*(part.name for part in missing), *(() if state.is_named else (f"refs/{source.revision}",)))
    what = source.name if source.place.startswith("data:") else "the model"
    return ModelDone(
        what=what,
        folder=state.folder,
        missing=lacking,
        missing_bytes=sum(sizes.values()),
        sent_bytes=sum(sizes.values()) if progress is not None else 0,
        changed=bool(lacking) and progress is not None,
    )
