"""What a page may ask a conversation, by POST (`posted.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from homelab.controller.base.errors import BusyError, HomelabError
from homelab.controller.features.web import event_stream, posted
from homelab.controller.features.web.page_chats import PageChat, PageChats
from homelab.controller.features.web.posted import Kind, Name, Posted

MOST_QUESTION = 20_000  # letters
_MOST_BODY = 12 * MOST_QUESTION + 1000  # bytes: a letter is at most twelve, as two escapes of JSON
_MODELS = {"trained": ["trained"], "base": ["base"], "both": ["base", "trained"]}


class Beginning(Posted):
    """A conversation with the models of a run."""

    run: Name
    model: Literal["trained", "base", "both"]


class OfChat(Posted):
    """Something that a conversation shall do."""

    chat: Name


class Question(OfChat):
    """The next question, as `homelab chat` asks it."""

    text: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=MOST_QUESTION)]
    max_new_tokens: Annotated[int, Field(ge=1, le=4096)]


class ChatRequests:
    """The answers of a server to its pages."""

    def __init__(self, chats: PageChats) -> None:
        self._chats = chats

    async def begin(self, request: Request) -> Response:
        """A stream with one event a line. The conversation lives as long as it does; a refusal is an event of it."""
        wanted = await _read(request, Beginning)
        return event_stream.answer(self._chats.follow(wanted.run, _MODELS[wanted.model]))

    async def ask(self, request: Request) -> Response:
        """The next question; its answer comes in the stream."""
        question = await _read(request, Question)
        return self._answered(question, lambda chat: chat.ask(question.text, question.max_new_tokens))

    async def stop(self, request: Request) -> Response:
        """No further word of this answer."""
        return self._answered(await _read(request, OfChat), PageChat.stop)

    async def new(self, request: Request) -> Response:
        """The models forget what was said."""
        return self._answered(await _read(request, OfChat), PageChat.new)

    def _answered(self, wanted: OfChat, act: Callable[[PageChat], None]) -> Response:
        """204; 404 where that conversation has ended, 409 where it cannot do that now."""
        try:
            act(self._chats.chat(wanted.chat))
        except HomelabError as error:
            return PlainTextResponse(str(error), 409 if isinstance(error, BusyError) else 404)
        return Response(status_code=204)


async def _read(request: Request, kind: type[Kind]) -> Kind:
    return await posted.read(request, kind, _MOST_BODY, f"A question has at most {MOST_QUESTION} letters.")
