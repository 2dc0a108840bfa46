"""A page's conversation with a model: who may ask, in which form, what is shown of the answer; and nothing is left of it on a node."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from homelab.controller.base.errors import NoRoomError
from homelab.controller.base.hint import homelab
from tests.controller.features.web.test_web_server import DONE, NODES, TOKEN, WITH_COOKIE, Site
from tests.fakes import FakeStream

pytest.importorskip("starlette", reason="homelab web needs it: pip install '.[web]'")
pytest.importorskip("uvicorn", reason="homelab web needs it: pip install '.[web]'")
from homelab.controller.features.web import app, chat_requests, page_chats, run_acts, web_server

pytestmark = pytest.mark.timeout(60)
HOST = "127.0.0.1:8808"
OWN = {"host": HOST, "origin": f"http://{HOST}", "content-type": "application/json", **WITH_COOKIE}
BEGIN = {"run": DONE, "model": "trained"}
LOADED = [{"loading": "it needs about 0.30 GB; RAM has 8.00 GB free"}, {"ready": {"notes": ["on the CPU"]}}]
EVIL = "<img src=x onerror=window.hit=1>\x1b[31m\x1b]0;owned\x07\u202e"

T = TypeVar("T")


@pytest.fixture
def site(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch).with_runs()


@pytest.fixture(autouse=True)
def in_short_times(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(page_chats, "_LOOK_S", 0.02)
    monkeypatch.setattr("homelab.controller.features.chat.conversation._LOOK_S", 0.02)
    yield


async def until(condition: Callable[[], T], what: str) -> T:
    """Wait for it."""
    ends_s = time.monotonic() + 20
    while not (found := condition()):
        assert time.monotonic() < ends_s, what
        await asyncio.sleep(0.01)
    return found


class Request:
    """One request to the application, without a socket: `told` is what came so far, and the page can leave."""

    def __init__(self, made: Any, path: str, body: bytes | list[bytes], method: str = "POST", **headers: str) -> None:
        self.status, self.text = 0, ""
        self.blocks_read = 0
        self._blocks = [body] if isinstance(body, bytes) else body
        self._is_left = asyncio.Event()
        name, _, query = path.partition("?")
        given = {key.replace("_", "-"): value for key, value in headers.items()}
        scope = {
            "type": "http", "method": method, "path": name, "raw_path": name.encode(), "query_string": query.encode(), "root_path": "", "scheme": "http",
            "http_version": "1.1", "headers": [(key.encode(), value.encode()) for key, value in given.items()],
            "asgi": {"version": "3.0", "spec_version": "2.3"},
        }  # fmt: skip
        self.task = asyncio.ensure_future(made(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self.blocks_read < len(self._blocks):
            self.blocks_read += 1
            block = self._blocks[self.blocks_read - 1]
            return {"type": "http.request", "body": block, "more_body": self.blocks_read < len(self._blocks)}
        await self._is_left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.status = message.get("status", self.status)
        self.text += message.get("body", b"").decode()

    @property
    def told(self) -> list[dict[str, Any]]:
        """The whole lines so far."""
        return [json.loads(line) for line in self.text.split("\n")[:-1] if line]

    async def event(self, kind: str, number: int = 1) -> Any:
        """The content of the n-th event of this kind, when it has come."""

        def found() -> list[Any]:
            return [event[kind] for event in self.told if kind in event][number - 1 : number]

        (content,) = await until(found, f"no event {kind} came: {self.told}")
        return content

    async def leave(self) -> None:
        """The page is closed."""
        self._is_left.set()
        await self.task


class Talk:
    """The server's part, and the requests of a page. `stream`: what the fake node has open."""

    def __init__(self, site: Site, *, does_act: bool = True) -> None:
        self.site = site
        self.chats = page_chats.PageChats(site.cluster, site.runs)
        seen = site.observer()
        self.acts = run_acts.RunActs(lambda name: "", seen.look_soon, does_act=does_act)
        self.made = app.make(seen, self.chats, self.acts, token=TOKEN, hosts=web_server.LOOPBACK, cookie="homelab-1")
        self.pages: list[Request] = []

    def begin(self, **changes: Any) -> Request:
        self.pages.append(self.post("/chat", BEGIN | changes))
        return self.pages[-1]

    def post(self, path: str, body: Any, **headers: str) -> Request:
        return Request(self.made, path, json.dumps(body).encode(), **{**OWN, **headers})

    async def done(self, path: str, body: Any, **headers: str) -> tuple[int, str]:
        request = self.post(path, body, **headers)
        await request.task
        return request.status, request.text

    async def ready(self, **changes: Any) -> tuple[Request, str]:
        """A page whose model is loaded, and the name of its conversation."""
        page = self.begin(**changes)
        name = str(await page.event("chat"))
        await page.event("ready")
        return page, name

    @property
    def stream(self) -> FakeStream:
        return self.site.fleet.nodes["node1"].opened[-1]

    def threads(self) -> list[str]:
        return [chat.name for chat in self.chats._chats.values() if chat.thread.is_alive()]


@asynccontextmanager
async def talk_with(site: Site, lines: list[Any] = LOADED, *, does_act: bool = True) -> AsyncIterator[Talk]:
    """A server; at the end nothing of it is left: no thread, and no open program on a node."""
    site.fleet.nodes["node1"].streams["converse"] = lines
    talk = Talk(site, does_act=does_act)
    try:
        yield talk
    finally:
        await asyncio.gather(talk.chats.close(), talk.acts.close())
        assert not talk.threads(), "a thread is left"
        assert all(stream.is_closed for name in NODES for stream in site.fleet.nodes[name].opened), "a program is left on a node"
        for page in talk.pages:
            await asyncio.wait_for(page.task, 20)


def played(site: Site, work: Callable[[Talk], Awaitable[None]], lines: list[Any] = LOADED, *, does_act: bool = True) -> None:
    async def whole() -> None:
        async with talk_with(site, lines, does_act=does_act) as talk:
            await work(talk)

    asyncio.run(whole())


PATHS = ("/chat", "/chat/ask", "/chat/stop", "/chat/new", "/act")
STRANGERS: dict[str, dict[str, str | None]] = {
    "without a cookie": {"cookie": None}, "another cookie": {"cookie": "homelab-1=other"}, "without an origin": {"origin": None}, "origin null": {"origin": "null"},
    "another port of this machine": {"origin": "http://127.0.0.1:9999"}, "the port's name alone": {"origin": HOST}, "tls": {"origin": f"https://{HOST}"},
    "another name of this machine": {"origin": "http://localhost:8808"}, "another site": {"origin": "http://evil.example"},
    "another host": {"host": "evil.example:8808", "origin": "http://evil.example:8808"}, "an address that only looks so": {"origin": f"http://{HOST}.evil.example"},
}  # fmt: skip


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_only_the_page_itself_may_ask(site: Site, stranger: dict[str, str | None]) -> None:
    async def work(talk: Talk) -> None:
        headers = {key: value for key, value in {**OWN, **stranger}.items() if value is not None}
        for path in (*PATHS, f"/chat?token={TOKEN}"):
            request = Request(talk.made, path, json.dumps(BEGIN).encode(), **headers)
            await asyncio.wait_for(request.task, 20)
            assert request.status == 403 and DONE not in request.text and request.blocks_read == 0, "it is not even read"

    played(site, work)
    assert site.fleet.asked == []


def test_a_link_begins_nothing(site: Site) -> None:
    for path in PATHS:
        for method in ("GET", "HEAD"):
            assert site.get(f"{path}?run={DONE}&token={TOKEN}", method=method, **WITH_COOKIE)[0] == 405
    assert site.fleet.asked == []


BODIES: list[Any] = [
    None, 5, [], "text", {}, {"run": DONE}, {**BEGIN, "model": "other"}, {**BEGIN, "run": ""}, {**BEGIN, "run": 5}, {**BEGIN, "run": "x" * 201},
    {**BEGIN, "more": 1}, {**BEGIN, "model": ["trained"]},
]  # fmt: skip
ASKED = {"chat": "x", "text": "hello", "max_new_tokens": 5}
QUESTIONS: list[Any] = [
    {}, {**ASKED, "text": ""}, {**ASKED, "text": " \n"}, {**ASKED, "text": "x" * 20_001}, {**ASKED, "max_new_tokens": 0}, {**ASKED, "max_new_tokens": 4097},
    {**ASKED, "max_new_tokens": "5"}, {**ASKED, "max_new_tokens": True}, {**ASKED, "max_new_tokens": 1e400}, {**ASKED, "text": "\ud800"}, {**ASKED, "model": "x"},
]  # fmt: skip


def test_a_body_of_another_form_is_refused(site: Site) -> None:
    async def work(talk: Talk) -> None:
        for path, bodies in (("/chat", BODIES), ("/chat/ask", QUESTIONS), ("/chat/stop", [{}, {"chat": ""}, {"chat": "x", "more": 1}])):
            for body in bodies:
                assert (await talk.done(path, body))[0] == 400, (path, body)
        for raw in (b"", b"{", b'{"run": "a"', b"\xff\xfe", b"run=a&model=trained", b"[" * 100_000):
            request = Request(talk.made, "/chat", raw, **OWN)
            await request.task
            assert request.status == 400, raw[:20]
        for kind in ("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "application/json-seq"):
            assert (await talk.done("/chat", BEGIN, **{"content-type": kind}))[0] == 415, kind
        assert (await talk.done("/chat/ask", ASKED))[0] == 404, "the form is right, and no such conversation is there"

    played(site, work)
    assert site.fleet.asked == []


def test_a_long_body_is_not_read_to_its_end(site: Site) -> None:
    async def work(talk: Talk) -> None:
        blocks = [b'{"run": "'] + [b"x" * 65536] * 1000
        request = Request(talk.made, "/chat", blocks, **OWN)
        await request.task
        assert request.status == 413 and request.blocks_read < 10
        longest = json.dumps({**ASKED, "text": "\U0001f600" * chat_requests.MOST_QUESTION}).encode()
        request = Request(talk.made, "/chat/ask", longest, **OWN)
        await request.task
        assert request.status == 404, "the longest question is read, whatever its letters are"

    played(site, work)


def test_an_answer_comes_in_pieces_and_as_clean_text(site: Site) -> None:
    async def work(talk: Talk) -> None:
        page, name = await talk.ready()
        steps = [event["step"] for event in page.told if "step" in event]
        assert steps[-2:] == ["node1 is asked for the model", "node1 loads the model: it needs about 0.30 GB; RAM has 8.00 GB free"]
        ready = next(event for event in page.told if "ready" in event)
        assert re.fullmatch(r"node1 has loaded the model, in \d+ s", ready["ready"]) and ready["notes"] == ["on the CPU"]
        assert (await talk.done("/chat/ask", {"chat": name, "text": " who are\nyou? ", "max_new_tokens": 9}))[0] == 204
        assert await page.event("answering") == "trained"
        talk.stream.say(json.dumps({"piece": "I am "}).encode())
        assert await page.event("piece") == "I am ", "before the answer is whole"
        talk.stream.say(json.dumps({"piece": EVIL}).encode())
        talk.stream.say(b'{"end": {"tokens": 3, "stopped": false}}')
        assert await page.event("end") == {"is_stopped": False}
        assert await page.event("piece", 2) == "<img src=x onerror=window.hit=1>", "markup is text; what steers a terminal is gone"
        await talk.done("/chat/ask", {"chat": name, "text": "and now?", "max_new_tokens": 9})
        await until(lambda: len(talk.stream.written) == 2, "no second question")
        first, second = map(json.loads, talk.stream.written)
        assert first == {"messages": [{"role": "user", "content": "who are\nyou?"}], "model": "trained", "max_new_tokens": 9}
        roles = [(turn["role"], turn["content"]) for turn in second["messages"]]
        said = "I am <img src=x onerror=window.hit=1>"
        assert roles == [("user", "who are\nyou?"), ("assistant", said), ("user", "and now?")]
        assert site.fleet.nodes["node1"].requests[-1]["silent_s"] > page_chats.SILENT_S, "the node ends it, too, if it hears nobody"

    played(site, work)


def test_a_new_conversation_has_heard_nothing_and_both_models_answer(site: Site) -> None:
    async def work(talk: Talk) -> None:
        page, name = await talk.ready(model="both")
        for number in (1, 2):
            await talk.done("/chat/ask", {"chat": name, "text": "hello", "max_new_tokens": 9})
            for model in ("base", "trained"):
                await until(
                    lambda want=model: json.loads(talk.stream.written[-1])["model"] == want if talk.stream.written else False, model
                )
                talk.stream.say(b'{"piece": "hi"}')
                talk.stream.say(b'{"end": {}}')
            await page.event("end", number)
            assert (await talk.done("/chat/new", {"chat": name}))[0] == 204
        assert [len(json.loads(line)["messages"]) for line in talk.stream.written] == [1, 1, 1, 1]
        assert [event["answering"] for event in page.told if "answering" in event] == ["base", "trained"] * 2

    played(site, work)


def test_stop_ends_the_answers_and_the_conversation_goes_on(site: Site) -> None:
    async def work(talk: Talk) -> None:
        page, name = await talk.ready(model="both")
        await talk.done("/chat/ask", {"chat": name, "text": "hello", "max_new_tokens": 9})
        assert (await talk.done("/chat/stop", {"chat": name}))[0] == 204
        await until(lambda: b'{"stop": true}\n' in talk.stream.written, "the node was not told")
        talk.stream.say(b'{"end": {"stopped": true}}')
        assert await page.event("end") == {"is_stopped": True}
        assert len(talk.stream.written) == 2, "the other model is not asked"
        await talk.done("/chat/ask", {"chat": name, "text": "again", "max_new_tokens": 9})
        await until(lambda: len(talk.stream.written) == 3, "no further question")
        talk.stream.say(json.dumps({"error": {"message": "the conversation has 9 tokens", "where": "here", "hint": "/new"}}).encode())
        assert (await page.event("error"))["message"] == "the conversation has 9 tokens"

    played(site, work)


def test_one_question_at_a_time(site: Site) -> None:
    async def work(talk: Talk) -> None:
        page = talk.begin()
        name = await page.event("chat")
        question = {"chat": name, "text": "hello", "max_new_tokens": 9}
        assert (await talk.done("/chat/ask", question))[0] == 409, "it is being loaded"
        await until(lambda: site.fleet.nodes["node1"].opened, "nothing was opened")
        for line in LOADED:
            site.fleet.nodes["node1"].say(line)
        await page.event("ready")
        both = await asyncio.gather(*(talk.done("/chat/ask", question) for _ in range(2)))
        assert sorted(status for status, _ in both) == [204, 409]
        assert "press Stop" in max(both)[1] and (await talk.done("/chat/new", {"chat": name}))[0] == 409

    played(site, work, [])


def test_a_server_has_a_limit_of_conversations_and_a_conversation_one_of_questions(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_chats, "MOST_QUESTIONS", 1)

    async def work(talk: Talk) -> None:
        pages = [await talk.ready() for _ in range(page_chats.MOST_CHATS)]
        refused = await talk.begin().event("refused")
        assert "2 pages have a conversation already" in refused["message"] and f"homelab chat {DONE}" in refused["hint"]
        await pages[0][0].leave()
        await until(lambda: len(talk.threads()) == 1, "the first goes on")
        page, name = await talk.ready()
        question = {"chat": name, "text": "hello", "max_new_tokens": 9}
        await talk.done("/chat/ask", question)
        await until(lambda: talk.stream.written, "no question")
        talk.stream.say(b'{"end": {}}')
        await page.event("end")
        status, said = await talk.done("/chat/ask", question)
        assert status == 404 and "begin a new conversation" in said

    played(site, work)


@pytest.mark.parametrize("when", ["loading", "ready", "answering"])
@pytest.mark.parametrize("who", ["page", "server"])
def test_nothing_is_left_when_the_page_leaves_or_the_server_ends(site: Site, when: str, who: str) -> None:
    async def work(talk: Talk) -> None:
        page = talk.begin()
        name = await page.event("chat")
        await until(lambda: site.fleet.nodes["node1"].opened, "nothing was opened")
        if when != "loading":
            await page.event("ready")
        if when == "answering":
            await talk.done("/chat/ask", {"chat": name, "text": "hello", "max_new_tokens": 900})
            talk.stream.say(b'{"piece": "word"}')
            await page.event("piece")
        assert not talk.stream.is_closed, "the control"
        await (page.leave() if who == "page" else talk.chats.close())
        await until(lambda: talk.stream.is_closed and not talk.threads(), "it goes on")
        assert (await talk.done("/chat/ask", {"chat": name, "text": "hello", "max_new_tokens": 9}))[0] == 404
        if who == "server":
            assert (await talk.begin().event("refused"))["hint"]

    played(site, work, [] if when == "loading" else LOADED)


def test_a_silent_page_gives_the_memory_back(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_chats, "SILENT_S", 0.1)

    async def work(talk: Talk) -> None:
        page, _ = await talk.ready()
        assert "node1 has its memory back" in await page.event("over")
        await page.task
        assert talk.stream.is_closed

    played(site, work)


REFUSALS: dict[str, tuple[list[Any], str, str]] = {
    "no room": (
        [{"error": {"message": "the model needs about 14.00 GB", "where": "/m", "hint": "ask again when the run is done, or end it first: homelab stop r", "kind": "no-room"}}],
        "the model needs about 14.00 GB", "homelab stop r",
    ),
    "ended": ([b""], "ended without an answer", "homelab chat"),
    "other words": ([{"loading": EVIL}, {"error": {"message": EVIL, "where": EVIL, "hint": 5}}], "<img src=x onerror=window.hit=1>", "homelab"),
    "no end": ([{"loading": "x"}, {"loading": "x"}], "the model's program failed", "homelab"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_the_node_refuses_is_told_in_three_parts(site: Site, case: str) -> None:
    lines, message, hint = REFUSALS[case]
    site.fleet.answer("result-look", NoRoomError("not here either", where="node2", hint=homelab("status")), ["node2"])

    async def work(talk: Talk) -> None:
        page = talk.begin()
        refused = await page.event("refused")
        assert message in refused["message"] and hint in refused["hint"] and set(refused) == {"message", "where", "hint"}
        assert not {"\x1b", "\u202e"} & set(page.text)
        await page.task

    played(site, work, lines)


def test_a_node_that_never_ends_is_left(site: Site) -> None:
    async def work(talk: Talk) -> None:
        page, name = await talk.ready()
        await talk.done("/chat/ask", {"chat": name, "text": "hello", "max_new_tokens": 3})
        for _ in range(100):
            talk.stream.say(b'{"piece": "more "}')
        assert "more than it was asked for" in (await page.event("refused"))["message"]
        await until(lambda: talk.stream.is_closed, "it goes on")

    played(site, work)


def test_a_run_that_nobody_knows(site: Site) -> None:
    async def work(talk: Talk) -> None:
        assert 'no run is called "nothing"' in (await talk.begin(run="nothing").event("refused"))["message"]
        assert (await talk.begin(run="../../etc").event("refused"))["hint"]

    played(site, work)


def test_the_page_says_the_limits_that_hold(site: Site) -> None:
    page = site.get("/", **WITH_COOKIE)[2]
    assert f"for {page_chats.SILENT_S / 60:.0f} minutes" in page and f"MOST_QUESTION = {chat_requests.MOST_QUESTION};" in page


def test_a_mistake_of_ours_is_told_and_ends_no_page_in_silence(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr(page_chats, "begin", broken)

    async def work(talk: Talk) -> None:
        page = talk.begin()
        refused = await page.event("refused")
        assert "internal error: RuntimeError: nobody thought of this" in refused["message"] and "homelab status" in refused["hint"]

    played(site, work)
