"""`homelab web` with a node: whatever ends a conversation in the middle of it, the model's program on the node is gone."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from homelab.lab import Lab
from scripts.practice import played_model
from scripts.practice.desk import wait_until
from tests.lab.conftest import namespaces_missing

pytest.importorskip("starlette", reason="homelab web needs it: pip install '.[web]'")
pytest.importorskip("uvicorn", reason="homelab web needs it: pip install '.[web]'")

MODEL = os.environ.get("HOMELAB_MODEL", "")
pytestmark = [pytest.mark.timeout(90), pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a node needs Linux")]


class Page:
    """What a browser does for a chat, over a socket."""

    def __init__(self, address: str, process: subprocess.Popen[str]) -> None:
        self.process = process
        found = re.fullmatch(r"http://(127\.0\.0\.1:\d+)/\S*\?token=([\w-]+)", address)
        assert found, address
        self.host, self.token = found[1], found[2]
        self.name = ""

    def post(self, path: str, body: dict[str, Any]) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = http.client.HTTPConnection(self.host, timeout=60)
        port = self.host.partition(":")[2]
        headers = {"Cookie": f"homelab-{port}={self.token}", "Origin": f"http://{self.host}", "Content-Type": "application/json"}
        connection.request("POST", path, json.dumps(body), headers)
        return connection, connection.getresponse()

    def begin(self, model: str = "trained") -> None:
        self.connection, self.stream = self.post("/chat", {"run": played_model.RUN, "model": model})
        self.name = self.event("chat")

    def event(self, kind: str) -> Any:
        """The next one of this kind."""
        while line := self.stream.readline():
            if line.strip() and kind in (event := json.loads(line)):
                return event[kind]
            assert "refused" not in (event if line.strip() else {}), line
        raise AssertionError(f"the stream ended without {kind}")

    def ask(self, text: str, most: int) -> None:
        assert self.post("/chat/ask", {"chat": self.name, "text": text, "max_new_tokens": most})[1].status == 204

    def answer(self, text: str, most: int) -> str:
        """The whole answer of one model."""
        self.ask(text, most)
        self.event("answering")
        said = ""
        while "end" not in (event := json.loads(self.stream.readline().strip() or "{}")):
            said += event.get("piece", "")
        return said

    def leave(self) -> None:
        self.stream.close()
        self.connection.close()


@contextmanager
def served(environment: dict[str, str], folder: Path) -> Iterator[Page]:
    """`homelab web`; at the end no program of a conversation is left."""
    command = [sys.executable, "-m", "homelab", "web", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield Page(process.stdout.readline().strip(), process)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.communicate(timeout=30)
    wait_until(lambda: not played_model.left(folder), 20, lambda: f"left: {played_model.left(folder)}")


def end(page: Page, how: str) -> None:
    """The page is closed, or the server gets a signal and ends in a few seconds."""
    if how == "page":
        page.leave()
        return
    page.process.send_signal(getattr(signal, how))
    said, errors = page.process.communicate(timeout=30)
    assert how == "SIGKILL" or (page.process.returncode == 0 and errors == "" and said.endswith("\n") and "Next: homelab status" in said)


@pytest.mark.parametrize("how", ["page", "SIGINT", "SIGTERM", "SIGKILL"])
def test_no_program_is_left_on_the_node(tmp_path: Path, how: str) -> None:
    with served(played_model.played(tmp_path), tmp_path) as page:
        page.begin()
        page.event("ready")
        ends_while_it_answers(page, how, tmp_path)


def ends_while_it_answers(page: Page, how: str, folder: Path) -> None:
    page.ask("hello", 4000)
    page.event("piece")
    assert len(played_model.left(folder)) == 1, "the control: it answers"
    end(page, how)
    wait_until(lambda: not played_model.left(folder), 20, lambda: "the model's program is still there")


@pytest.mark.thorough
@pytest.mark.namespaces
@pytest.mark.parametrize("how", ["page", "SIGTERM", "SIGKILL"])
def test_no_program_is_left_behind_ssh(tmp_path: Path, how: str) -> None:
    if missing := namespaces_missing():
        pytest.skip(missing)
    with Lab.up(tmp_path / "lab", nodes=1, backend="namespaces") as lab, served(played_model.played(tmp_path, lab=lab), tmp_path) as page:
        page.begin()
        assert "node1" in page.event("ready")
        ends_while_it_answers(page, how, tmp_path)


@pytest.mark.thorough
@pytest.mark.skipif(not MODEL, reason="HOMELAB_MODEL names no model")
@pytest.mark.timeout(300)
def test_the_real_model_answers_in_pieces_and_goes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    with served(played_model.make(tmp_path, MODEL), tmp_path) as page:
        page.begin("base")
        wait_until(lambda: bool(played_model.left(tmp_path)), 60, lambda: "no program began")
        page.leave()
        wait_until(lambda: not played_model.left(tmp_path), 10, lambda: "who leaves while it loads leaves it behind")
        page.begin("base")
        assert "node1" in page.event("step") and "it needs about 0." in page.event("step")
        page.event("ready")
        first = page.answer("What is the capital of France? Answer in one word.", 24)
        assert "Paris" in first, first
        assert page.answer("Of which country did I ask? Answer in one word.", 24), "the second turn"
        page.ask("Count from 1 to 1000.", 2000)
        page.event("piece")
        assert page.post("/chat/stop", {"chat": page.name})[1].status == 204
        assert page.event("end") == {"is_stopped": True}
        page.ask("Count from 1 to 1000.", 2000)
        page.event("piece")
        end(page, "SIGTERM")
        wait_until(lambda: not played_model.left(tmp_path), 20, lambda: "the model's program is still there")
