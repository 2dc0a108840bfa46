"""A conversation with a run's model, kept open on the node where the model lies."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from homelab.controller.base.errors import HomelabError, NoRoomError, UnreachableError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.base.node_words import advice
from homelab.controller.base.sanitize import plain, plain_lines, plain_piece
from homelab.controller.base.say import Say
from homelab.controller.features.chat import chat
from homelab.controller.planning.strategy import registry
from homelab.controller.remote.decoding import decoded
from homelab.controller.remote.fanout import Fleet
from homelab.controller.remote.session import Stream
from homelab.controller.run import run_folder
from homelab.controller.run.paths import RunPaths
from homelab.shared.protocol.request import RunRequest

Message = dict[str, str]
_LOOK_S = 0.25  # between two looks whether somebody still waits
_MOST_ANSWER = 1 << 20  # letters; the longest answers have 4,096 tokens
_MORE_LINES = 16  # than tokens: one with the rest of the text, and the end


class Left(Exception):
    """Nobody waits any more for what is being asked: it is no error of a node, and no other one is tried."""


@dataclass
class NodeConversation:
    """Questions to the models of a run on `node`. A context manager; `notes`: on what they were loaded, once they are.

    `look`: called now and then while the node is waited for, by the thread that waits; it may raise Left.
    """

    node: str
    run: str
    stream: Stream
    look: Callable[[], None]
    notes: Sequence[str] = field(default=(), init=False)

    def __enter__(self) -> NodeConversation:
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def answer(self, messages: Sequence[Message], *, model: str, max_new_tokens: int) -> Iterator[str]:
        """The answer in pieces, as the model computes them. `model`: "trained" or "base".

        Raises HomelabError where the model cannot answer this (the conversation goes on), UnreachableError where the node is gone.
        """
        self._write({"messages": list(messages), "model": model, "max_new_tokens": max_new_tokens})
        yield from self._pieces(max_new_tokens)

    def stop(self) -> None:
        """End the answer that is being given."""
        self.wish_to_stop()
        for _ in self._pieces(_MOST_ANSWER):
            pass

    def wish_to_stop(self) -> None:
        """The same, without waiting for the end: that comes to who reads the answer."""
        self._write({"stop": True})

    def loaded(self, say: Say) -> None:
        """Wait until the models are, and say what memory they take. Raises HomelabError."""
        message = self._message()
        if "loading" in message:
            say(f"{self.node} loads the model: {plain(str(message['loading']))[:500]}")
            message = self._message()
        if "ready" not in message:
            raise _error(message.get("error"), self.node, self.run)
        notes = message["ready"].get("notes") if isinstance(message["ready"], dict) else None
        self.notes = [plain(str(note))[:1000] for note in notes[:100]] if isinstance(notes, list) else []

    def _pieces(self, most_tokens: int) -> Iterator[str]:
        """Raises HomelabError, also where more comes than was asked for."""
        lines, length = 0, 0
        while "end" not in (message := self._message()):
            if "error" in message:
                raise _error(message["error"], self.node, self.run)
            piece = plain_piece(str(message.get("piece") or ""))
            lines, length = lines + 1, length + len(piece)
            if lines > most_tokens + _MORE_LINES or length > _MOST_ANSWER:
                raise UnreachableError(
                    "it sends more than it was asked for", where=f"node {self.node}", hint=homelab("preflight --nodes", self.node)
                )
            yield piece

    def _message(self) -> dict[str, Any]:
        """The next line of the program. Raises what `look` raises, UnreachableError where none comes, HomelabError where it has ended."""
        ends_s = time.monotonic() + chat.ANSWER_TIMEOUT_S
        line = None
        while line is None:
            self.look()
            try:
                line = self.stream.readline(_LOOK_S)
            except (TimeoutError, OSError) as error:
                if not isinstance(error, TimeoutError) or time.monotonic() > ends_s:
                    raise _gone(self.node) from error
        try:
            message = decoded(line)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            hint = homelab("chat --prompt Hello", self.run)
            raise HomelabError("the model's program ended without an answer", where=f"node {self.node}", hint=hint)
        return message

    def _write(self, message: dict[str, Any]) -> None:
        try:
            self.stream.write(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise _gone(self.node) from error


def begin(
    fleet: Fleet,
    paths: RunPaths,
    models: Sequence[str],
    say: Say,
    *,
    look: Callable[[], None] = lambda: None,
    silent_s: float | None = None,
) -> NodeConversation:
    """On the head, or on another node that has a checkpoint. `silent_s`: the program ends by itself where nothing was asked for so long.

    Raises the head's error when nobody can answer, and what `look` (see NodeConversation) raises.
    """
    first: HomelabError | None = None
    for name in chat.nodes_to_ask(paths):
        try:
            say(f"{name} is asked for the model")
            agent = fleet.agent(name)
            agent.ask("result-look", RunRequest(run=paths.name))  # the code is shipped
            stream = agent.open("converse", {"run": paths.name, "models": list(models), "silent_s": silent_s})
            conversation = NodeConversation(name, paths.name, stream, look)
            try:
                conversation.loaded(say)
            except BaseException:
                stream.close()
                raise
            return conversation
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


def _gone(node: str) -> UnreachableError:
    return UnreachableError("the node fell silent", where=f"node {node}", hint=homelab("preflight --nodes", node))


def _error(parts: Any, node: str, run: str) -> HomelabError:
    parts = parts if isinstance(parts, dict) else {}
    where = plain_lines(str(parts.get("where") or ""))
    hint = advice(node, parts.get("hint")) or homelab("status", run)
    kind = NoRoomError if parts.get("kind") == "no-room" else HomelabError
    return kind(str(parts.get("message") or "the model's program failed"), where=f"node {node}{', ' if where else ''}{where}", hint=hint)
