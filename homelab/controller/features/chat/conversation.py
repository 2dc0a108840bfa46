"""A conversation with a run's model, kept open on the node where the model lies."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from homelab.controller.base.errors import HomelabError, NoRoomError, UnreachableError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.node_words import advice
from homelab.controller.base.sanitize import plain, plain_lines, plain_piece
from homelab.controller.features.chat import chat
from homelab.controller.planning.strategy import registry
from homelab.controller.remote.decoding import decoded
from homelab.controller.remote.fanout import Fleet
from homelab.controller.remote.session import Stream
from homelab.controller.run import run_folder
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.request import RunRequest

Message = dict[str, str]


@dataclass
class NodeConversation:
    """Questions to the models of a run on `node`. A context manager; `notes`: on what they were loaded."""

    node: str
    run: str
    notes: Sequence[str]
    stream: Stream

    def __enter__(self) -> NodeConversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def answer(self, messages: Sequence[Message], *, model: str, max_new_tokens: int) -> Iterator[str]:
        """The answer in pieces, as the model computes them. `model`: "trained" or "base".

        Raises HomelabError where the model cannot answer this (the conversation goes on), UnreachableError where the node is gone.
        """
        self._write({"messages": list(messages), "model": model, "max_new_tokens": max_new_tokens})
        yield from self._pieces()

    def stop(self) -> None:
        """End the answer that is being given."""
        self._write({"stop": True})
        for _ in self._pieces():
            pass

    def _pieces(self) -> Iterator[str]:
        while "end" not in (message := _message(self.stream, self.node, self.run)):
            if "error" in message:
                raise _error(message["error"], self.node, self.run)
            yield plain_piece(str(message.get("piece") or ""))

    def _write(self, message: dict[str, Any]) -> None:
        try:
            self.stream.write(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise _gone(self.node) from error


def begin(fleet: Fleet, paths: RunPaths, models: Sequence[str]) -> NodeConversation:
    """On the head, or on another node that has a checkpoint. Raises the head's error when nobody can answer."""
    first: HomelabError | None = None
    for name in chat.nodes_to_ask(paths):
        try:
            return _open(fleet, paths, name, models)
        except NoRoomError as error:
            if registry.of_plan(run_folder.plan_of(paths)).cuts_layers:
                hint = Hint("a single question works: {}", homelab("chat --prompt Hello", paths.name))
                raise NoRoomError(
                    f"{error.message}; and a conversation does not work across the stages of a pipeline", where=error.where, hint=hint
                ) from error
            first = first or error
        except HomelabError as error:
            first = first or error
        except KeyError:
            continue
    raise first or HomelabError("none of the run's nodes is in cluster.toml", where=paths.name, hint=homelab("runs"))


def _open(fleet: Fleet, paths: RunPaths, name: str, models: Sequence[str]) -> NodeConversation:
    agent = fleet.agent(name)
    agent.ask("result-look", RunRequest(run=paths.name))  # the code is shipped
    stream = agent.open("converse", {"run": paths.name, "models": list(models)})
    try:
        message = _message(stream, name, paths.name)
        if "ready" not in message:
            raise _error(message.get("error"), name, paths.name)
    except BaseException:
        stream.close()
        raise
    return NodeConversation(name, paths.name, _notes(message["ready"]), stream)


def _notes(ready: Any) -> list[str]:
    notes = ready.get("notes") if isinstance(ready, dict) else None
    return [plain(str(note))[:1000] for note in notes[:100]] if isinstance(notes, list) else []


def _message(stream: Stream, node: str, run: str) -> dict[str, Any]:
    try:
        line = stream.readline(chat.ANSWER_TIMEOUT_S)
    except (TimeoutError, OSError) as error:
        raise _gone(node) from error
    try:
        message = decoded(line)
    except ValueError:
        message = None
    if not isinstance(message, dict):
        raise HomelabError("the model's program ended without an answer", where=f"node {node}", hint=homelab("chat --prompt Hello", run))
    return message


def _gone(node: str) -> UnreachableError:
    return UnreachableError("the node fell silent", where=f"node {node}", hint=homelab("preflight --nodes", node))


def _error(parts: Any, node: str, run: str) -> HomelabError:
    parts = parts if isinstance(parts, dict) else {}
    where = plain_lines(str(parts.get("where") or ""))
    hint = advice(node, parts.get("hint")) or homelab("status", run)
    kind = NoRoomError if parts.get("kind") == "no-room" else HomelabError
    return kind(str(parts.get("message") or "the model's program failed"), where=f"node {node}{', ' if where else ''}{where}", hint=hint)
