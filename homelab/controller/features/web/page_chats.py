"""Conversations of open pages with the models of runs. Each has a thread of its own, and ends with the stream of its page: no node keeps it."""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path

from homelab.controller.base.errors import BusyError, HomelabError, InputError, UnreachableError
from homelab.controller.base.hint import Hint, homelab
from homelab.controller.config.cluster import Cluster
from homelab.controller.features.chat.conversation import Left, NodeConversation, begin
from homelab.controller.features.chat.dialogue import Dialogue
from homelab.controller.features.web import event_stream, unforeseen
from homelab.controller.features.web.event_stream import Event
from homelab.controller.remote.fanout import Fleet
from homelab.controller.run import run_lookup

MOST_CHATS = 2  # of a server: each holds a model in the memory of a node
MOST_QUESTIONS = 100
SILENT_S = 600.0  # without a question: then the node has its memory back
_NODE_MORE_S = 60.0  # than that, by its own clock, where this machine can no longer tell it
_LOOK_S = 0.25
_END_S = 2.0  # a conversation that ends waits for its node, which may be silent


class PageChat:
    """One conversation, for a page that listens to `events`. Its methods belong to the server's event loop."""

    def __init__(self, cluster: Cluster, runs_dir: Path, run: str, models: Sequence[str]) -> None:
        self._cluster, self._runs_dir, self._run, self._models = cluster, runs_dir, run, list(models)
        self.name = secrets.token_urlsafe(12)
        self.events: asyncio.Queue[Event | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._questions: queue.SimpleQueue[tuple[str, int] | None] = queue.SimpleQueue()
        self._conversation: NodeConversation | None = None
        self._is_left, self._is_stopped = threading.Event(), threading.Event()
        self._is_busy, self._has_wished = True, False
        self._asked = 0
        self.thread = threading.Thread(target=self._hold, name=f"chat {self.name}", daemon=True)
        self.thread.start()

    def ask(self, text: str, max_new_tokens: int) -> None:
        """The answer comes as events. Raises BusyError while the model is loaded or answers, InputError where enough was asked."""
        self._refuse_busy()
        if self._asked >= MOST_QUESTIONS:
            raise InputError(
                f"this conversation has {MOST_QUESTIONS} questions", where="this conversation", hint="begin a new conversation"
            )
        self._is_busy = True
        self._asked += 1
        self._is_stopped.clear()
        self._questions.put((text, max_new_tokens))

    def stop(self) -> None:
        """End the answer that is being given."""
        self._is_stopped.set()

    def new(self) -> None:
        """Forget what was said. Raises BusyError while the model answers."""
        self._refuse_busy()
        self._asked = 0
        self._questions.put(None)

    def leave(self) -> None:
        """Nobody listens any more: end it, on the node, too."""
        self._is_left.set()

    def _refuse_busy(self) -> None:
        if self._is_busy:
            raise BusyError("the model is being loaded or answers", where="this conversation", hint="wait for the answer, or press Stop")

    def _tell(self, event: Event | None) -> None:
        with suppress(RuntimeError):  # the server is gone
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)

    def _hold(self) -> None:
        """The thread: from the first word to the node to the last."""
        began_s = time.monotonic()

        def say(text: str) -> None:
            self._tell({"step": text})

        try:
            with Fleet(self._cluster) as fleet:
                paths = run_lookup.run(fleet, self._runs_dir, self._run, say)
                limit_s = SILENT_S + _NODE_MORE_S
                with begin(fleet, paths, self._models, say, look=self._look, silent_s=limit_s) as self._conversation:
                    node, seconds = self._conversation.node, time.monotonic() - began_s
                    self._is_busy = False
                    self._tell({"ready": f"{node} has loaded the model, in {seconds:.0f} s", "notes": list(self._conversation.notes)})
                    self._answer_all(Dialogue(self._conversation, self._models))
                    self._conversation = None
        except Left:
            pass
        except Exception as error:  # noqa: BLE001 - a mistake of ours, too, must not end the stream without a word
            self._tell({"refused": unforeseen.as_homelab_error(error).as_dict()})
        finally:
            self._tell(None)

    def _look(self) -> None:
        """While the node is waited for: end the answer, or all, where that is wished."""
        if self._is_left.is_set():
            raise Left
        if self._is_stopped.is_set() and not self._has_wished and self._conversation is not None:
            self._has_wished = True
            self._conversation.wish_to_stop()

    def _answer_all(self, dialogue: Dialogue) -> None:
        """Until nobody listens or asks any more. Raises Left, and UnreachableError where the node is gone."""
        silent_since_s = time.monotonic()
        while True:
            if self._is_left.is_set():
                raise Left
            try:
                question = self._questions.get(timeout=_LOOK_S)
            except queue.Empty:
                if time.monotonic() - silent_since_s > SILENT_S:
                    minutes = SILENT_S / 60
                    self._tell({"over": f"nothing was asked for {minutes:.0f} min: {dialogue.conversation.node} has its memory back"})
                    return
                continue
            if question is None:
                dialogue.clear()
            else:
                self._answer(dialogue, *question)
            silent_since_s = time.monotonic()

    def _answer(self, dialogue: Dialogue, text: str, max_new_tokens: int) -> None:
        """Of each model; a wish to stop ends those that follow, too."""
        self._has_wished = False
        for model in self._models:
            self._tell({"answering": model})
            try:
                dialogue.ask(model, text, max_new_tokens, lambda piece: self._tell({"piece": piece}))
            except UnreachableError:
                raise
            except HomelabError as error:
                self._tell({"error": error.as_dict()})
            if self._is_stopped.is_set():
                break
        self._is_busy = False
        self._tell({"end": {"is_stopped": self._is_stopped.is_set()}})


class PageChats:
    """Those of one server. All of it runs in its event loop."""

    def __init__(self, cluster: Cluster, runs_dir: Path) -> None:
        self._cluster, self._runs_dir = cluster, runs_dir
        self._chats: dict[str, PageChat] = {}
        self._is_closing = False

    async def follow(self, run: str, models: Sequence[str]) -> AsyncGenerator[Event | None, None]:
        """Begin a conversation: what is told of it until it ends, or until the page leaves; None says only that we are there."""
        self._chats = {name: chat for name, chat in self._chats.items() if chat.thread.is_alive()}
        if len(self._chats) >= MOST_CHATS or self._is_closing:
            message = f"{MOST_CHATS} pages have a conversation already, and each holds a model in the memory of a node"
            error = BusyError(message, where="homelab web", hint=Hint("end one of them, or ask in a terminal: {}", homelab("chat", run)))
            yield {"refused": error.as_dict()}
            return
        chat = PageChat(self._cluster, self._runs_dir, run, models)
        self._chats[chat.name] = chat
        try:
            yield {"chat": chat.name}
            async with aclosing(event_stream.follow(chat.events)) as events:
                async for event in events:
                    yield event
        finally:
            chat.leave()

    def chat(self, name: str) -> PageChat:
        """The conversation of this name. Raises InputError where it has ended."""
        if name not in self._chats or not self._chats[name].thread.is_alive():
            raise InputError("this conversation has ended", where="this page", hint="begin another one")
        return self._chats[name]

    async def close(self) -> None:
        """End all of them, and let none begin."""
        self._is_closing = True
        for chat in self._chats.values():
            chat.leave()
        await asyncio.gather(*(asyncio.to_thread(chat.thread.join, _END_S) for chat in self._chats.values()))
