"""The pages as a web application: one HTML file, one stream of events, and two questions by GET. The chat and two commands act, by POST."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re
from collections.abc import AsyncIterator, Collection
from contextlib import aclosing

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from homelab.controller.base.errors import HomelabError, InputError
from homelab.controller.features.web import page_values
from homelab.controller.features.web.act_requests import ActRequests
from homelab.controller.features.web.chat_requests import ChatRequests
from homelab.controller.features.web.guard import PageGuard
from homelab.controller.features.web.observer import Observer
from homelab.controller.features.web.page_chats import PageChats
from homelab.controller.features.web.run_acts import RunActs


def make(observer: Observer, chats: PageChats, acts: RunActs, *, token: str, hosts: Collection[str], cookie: str) -> ASGIApp:
    """The application behind its guard."""
    page = importlib.resources.files("homelab.controller.features.web").joinpath("page.html").read_text(encoding="utf-8")
    asked, acting = ChatRequests(chats), ActRequests(acts, observer)
    answers = _Answers(observer, page, acting.may())
    routes = [
        Route("/", answers.page, methods=["GET"]), Route("/runs/{name:path}", answers.page, methods=["GET"]),
        Route("/live", answers.live, methods=["GET"]), Route("/logs", answers.logs, methods=["GET"]), Route("/compare", answers.compare, methods=["GET"]),
        Route("/chat", asked.begin, methods=["POST"]), Route("/chat/ask", asked.ask, methods=["POST"]), Route("/chat/stop", asked.stop, methods=["POST"]),
        Route("/chat/new", asked.new, methods=["POST"]), Route("/act", acting.act, methods=["POST"]),
    ]  # fmt: skip
    return PageGuard(Starlette(routes=routes), token=token, hosts=hosts, cookie=cookie, policy=policy(page))


def policy(page: str) -> str:
    """Nothing but the style and the script of this file, by their digests, and requests to where it came from."""

    def digests(element: str) -> str:
        found = re.findall(rf"<{element}>(.*?)</{element}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found)

    return (
        f"default-src 'none'; style-src {digests('style')}; script-src {digests('script')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class _Answers:
    def __init__(self, observer: Observer, page: str, may: str) -> None:
        self._observer, self._page, self._may = observer, page, may

    async def page(self, request: Request) -> Response:
        """The file; for a run that nobody knows with the status 404: it shows the words of `live` then."""
        status = 200
        if name := request.path_params.get("name"):
            try:
                await self._observer.run(name)
            except InputError:
                status = 404
            except HomelabError:
                pass  # its page says what is wrong
        return Response(self._page, status, media_type="text/html; charset=utf-8")

    async def live(self, request: Request) -> Response:
        """The stream of events. An error is one of them: a browser tells a page nothing of a refused stream."""
        name = request.query_params.get("run") or None
        headers = {"x-accel-buffering": "no"}
        return StreamingResponse(self._events(name), media_type="text/event-stream", headers=headers)

    async def _events(self, name: str | None) -> AsyncIterator[bytes]:
        yield f"retry: 3000\n\nevent: may\ndata: {self._may}\n\n".encode()
        try:
            whole = None if name is None else await self._observer.run(name)
            async with aclosing(self._observer.follow(whole)) as events:
                async for kind, text in events:
                    yield f"event: {kind}\ndata: {text}\n\n".encode("utf-8", "replace") if kind else b": still here\n\n"
        except HomelabError as error:
            yield f"event: refused\ndata: {self._refused(error)}\n\n".encode("utf-8", "replace")

    async def logs(self, request: Request) -> Response:
        """Of an attempt of a run: ?run=NAME&attempt=2."""
        attempt = request.query_params.get("attempt", "")
        try:
            number = int(attempt) if attempt.isdecimal() and len(attempt) < 9 else 0
            return _json(await self._observer.logs(request.query_params.get("run", ""), number))
        except HomelabError as error:
            return _json(self._refused(error), 404 if isinstance(error, InputError) else 503)

    async def compare(self, request: Request) -> Response:
        """The losses of runs: ?run=NAME&run=NAME."""
        try:
            return _json(await self._observer.compared(request.query_params.getlist("run")))
        except HomelabError as error:
            return _json(self._refused(error), 503)

    def _refused(self, error: HomelabError) -> str:
        return page_values.failed(error.message, error.where, str(error.hint), self._observer.names())


def _json(text: str, status: int = 200) -> Response:
    return Response(text.encode("utf-8", "replace"), status, media_type="application/json")
