"""The page is for those who have its address: token, name of the host, policy. And nodes are asked only while a page is open."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import importlib.util
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from homelab.cli import main
from homelab.controller.base import secrets
from homelab.controller.base.errors import HomelabError
from homelab.controller.config.cluster import Cluster
from homelab.controller.features.status import monitor, run_index
from homelab.controller.features.web import observer, run_source
from homelab.controller.features.web.long_run import LineSample
from homelab.controller.features.web.observer import Observer
from homelab.controller.features.web.run_records import RunRecords
from homelab.controller.run.paths import RunPaths
from homelab.node.system import utilisation
from tests import builders
from tests.fakes import FakeFleet

pytest.importorskip("starlette", reason="homelab web needs it: pip install '.[web]'")
pytest.importorskip("uvicorn", reason="homelab web needs it: pip install '.[web]'")
from homelab.controller.features.web import app, guard, page_chats, run_acts, web_server

pytestmark = pytest.mark.timeout(60)
FIXTURES = Path(__file__).parents[3] / "fixtures" / "older_runs"
FAILED, DONE = "2026-11-26-0157-alone", "2026-11-26-0158-demo"
NODES = ("node1", "node2")
TOKEN = "the-token"
SECRET = "hf_abcdefghijklmnop"
WITH_COOKIE = {"cookie": f"homelab-1={TOKEN}"}

Answered = tuple[int, dict[str, str], str]


class Site:
    """A controller with two runs, their nodes, and the application over them; requests are made without a socket."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs, self.nodes, self.fleet = folder / "runs", folder / "nodes", FakeFleet(folder / "nodes", NODES)
        self.cluster: Cluster = builders.cluster(NODES)
        for module in (observer, run_source, page_chats):
            monkeypatch.setattr(module, "Fleet", lambda cluster: self.fleet)
        monkeypatch.setattr(self.fleet, "give_up_all", lambda: None)  # it is used again
        monkeypatch.setattr(utilisation, "cpu_percent", lambda: 12.0)

    def with_runs(self) -> Site:
        shutil.copytree(FIXTURES / "controller", self.runs)
        shutil.copytree(FIXTURES / "nodes", self.nodes, dirs_exist_ok=True)
        return self

    def observer(self) -> Observer:
        return Observer(self.cluster, self.runs, lambda name: "")

    def get(self, path: str, *, method: str = "GET", **headers: str) -> Answered:
        seen, chats = self.observer(), page_chats.PageChats(self.cluster, self.runs)
        acts = run_acts.RunActs(lambda name: "", seen.look_soon, does_act=True)
        made = app.make(seen, chats, acts, token=TOKEN, hosts=web_server.LOOPBACK, cookie="homelab-1")
        return asyncio.run(request(made, path, method, {"host": "127.0.0.1:8808", **headers}))


async def request(made: Any, path: str, method: str, headers: dict[str, str]) -> Answered:
    told: list[dict[str, Any]] = []

    first = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        return first.pop() if first else await asyncio.Future()

    async def send(message: dict[str, Any]) -> None:
        told.append(message)

    name, _, query = path.partition("?")
    scope = {
        "type": "http", "method": method, "path": name, "raw_path": name.encode(), "query_string": query.encode(), "root_path": "", "scheme": "http",
        "http_version": "1.1", "headers": [(key.encode(), value.encode()) for key, value in headers.items()],
    }  # fmt: skip
    await made(scope, receive, send)
    body = b"".join(message.get("body", b"") for message in told[1:])
    return told[0]["status"], {key.decode(): value.decode() for key, value in told[0]["headers"]}, body.decode()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


@pytest.mark.parametrize("path", ["/", "/live", "/logs?run=x", f"/?token={TOKEN}x", "/?token=", "/compare", "/nowhere", f"/runs/{DONE}"])
@pytest.mark.parametrize("cookie", ["", "homelab-1=other", f"homelab-2={TOKEN}", "homelab-1"])
def test_without_the_token_there_is_nothing(site: Site, path: str, cookie: str) -> None:
    status, headers, body = site.get(path, cookie=cookie)
    assert status == 403 and "needs the token" in body and "set-cookie" not in headers and DONE not in body
    assert site.fleet.asked == []


def test_the_token_becomes_a_cookie(site: Site) -> None:
    status, headers, body = site.get(f"/?token={TOKEN}")
    assert status == 200 and body.startswith("<!DOCTYPE html>")
    assert headers["set-cookie"] == f"homelab-1={TOKEN}; HttpOnly; SameSite=Strict; Path=/"
    status, headers, _ = site.get("/", **WITH_COOKIE)
    assert (
        status == 200
        and "set-cookie" not in headers
        and headers["referrer-policy"] == "no-referrer"
        and headers["cache-control"] == "no-store"
    )


@pytest.mark.parametrize("others", ['state={"a":1}; ', "a b=c; ", "homelab-1=of another server; ", "=; ;"])
def test_cookies_of_other_programs_hide_none_of_ours(site: Site, others: str) -> None:
    assert site.get("/", cookie=f"{others}homelab-1={TOKEN}; more=[1]")[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8808", "", "192.168.1.5", "[::2]:8808", "localhost.evil"])
def test_another_name_is_refused_even_with_the_token(site: Site, host: str) -> None:
    status, headers, body = site.get(f"/?token={TOKEN}", host=host, **WITH_COOKIE)
    assert status == 403 and "not served under that name" in body and "set-cookie" not in headers


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:9", "[::1]:8808", "LOCALHOST"])
def test_the_names_of_this_machine_are_taken(site: Site, host: str) -> None:
    assert site.get("/", host=host, **WITH_COOKIE)[0] == 200 and guard.host_of(host.encode()) in web_server.LOOPBACK


def test_nothing_but_what_is_posted_acts(site: Site) -> None:
    own = {**WITH_COOKIE, "origin": "http://127.0.0.1:8808"}
    paths = ("/", "/live", "/logs", "/compare", f"/runs/{DONE}")
    assert {site.get(path, method=method, **own)[0] for path in paths for method in ("POST", "PUT", "DELETE", "PATCH")} == {405}


def test_the_policy_allows_this_page_alone(site: Site) -> None:
    _, headers, body = site.get("/", **WITH_COOKIE)
    policy = headers["content-security-policy"]
    for element in ("style", "script"):
        (text,) = re.findall(f"<{element}>(.*?)</{element}>", body, re.DOTALL)
        assert f"{element}-src 'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in policy
    assert (
        policy.startswith("default-src 'none'")
        and "unsafe" not in policy
        and "connect-src 'self';" in policy
        and "frame-ancestors 'none'" in policy
    )


def test_a_run_that_nobody_knows_is_404_with_the_list(site: Site) -> None:
    site.with_runs()
    status, _, body = site.get("/runs/2026-11-26-0158-dem0", **WITH_COOKIE)
    assert status == 404 and body.startswith("<!DOCTYPE html>")
    for is_off in (False, True):
        site.fleet.nodes["node1"].is_off = site.fleet.nodes["node2"].is_off = is_off
        said = site.get("/live?run=2026-11-26-0158-dem0", **WITH_COOKIE)[2]
        told = json.loads(said.partition("event: refused\ndata: ")[2].partition("\n")[0])
        assert 'no run is called "2026-11-26-0158-dem0". Did you mean' in told["error"]["message"]
        assert told["error"]["hint"] == "homelab runs" and told["runs"] == [DONE, FAILED]
    assert site.get("/runs/%2e%2e%2f%2e%2e", **WITH_COOKIE)[0] == 404 and site.get(f"/logs?run={DONE}&attempt=77", **WITH_COOKIE)[0] == 404


async def events_of(seen: Observer, name: str | None, wanted: str, most: int = 30) -> dict[str, Any]:
    """The newest of each kind, when `wanted` has come."""
    found: dict[str, Any] = {}
    follow = seen.follow(name)
    async for kind, text in follow:
        if kind:
            found[kind] = json.loads(text)
        most -= 1
        if kind == wanted or not most:
            break
    await follow.aclose()
    return found


def run_in(seen: Observer, work: Coroutine[Any, Any, Any]) -> Any:
    async def whole() -> Any:
        try:
            return await work
        finally:
            await seen.close()

    return asyncio.run(whole())


def test_a_run_with_a_kill_and_a_recovery(site: Site) -> None:
    seen = site.with_runs().observer()
    told = run_in(seen, events_of(seen, DONE, "logs"))
    assert told["run"]["answer"].startswith("demo is done: 120 steps, loss 5.550 to") and told["run"]["is_asked"]
    assert [row["state"] for row in told["report"]["attempts"]] == ["failed", "done"]
    assert {section["name"] for section in told["report"]["sections"]} >= {"attempts", "events", "shares", "plan", "machines", "steps"}
    assert told["report"]["curves"][0]["name"] == "Loss" and [rank[0] for rank in told["logs"]["ranks"]] == [0, 1]
    older = json.loads(site.get(f"/logs?run={DONE}&attempt=1", **WITH_COOKIE)[2])
    assert older["attempt"] == 1 and older["newest_attempt"] == 2 and any("lora" in text for _, text in older["together"])
    compared = json.loads(site.get(f"/compare?run={DONE}&run={FAILED}&run=nothing", **WITH_COOKIE)[2])
    assert {name: curve["series"][0]["label"] for name, curve in compared["runs"].items()} == {DONE: "training", FAILED: "training"}


def test_a_long_run_that_is_done_has_its_logs_without_its_metrics(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_source.RunSource, "is_settled", property(lambda source: True))
    monkeypatch.setattr(monitor.Watcher, "look", lambda watcher: pytest.fail("its nodes would read all of its metrics"))
    seen = site.with_runs().observer()
    told = run_in(seen, events_of(seen, DONE, "trouble"))
    assert told["logs"]["attempt"] == 2 and [rank[0] for rank in told["logs"]["ranks"]] == [0, 1] and told["trouble"] is None


def test_a_run_whose_nodes_are_off_is_read_from_the_records(site: Site) -> None:
    seen = site.with_runs().observer()
    for node in site.fleet.nodes.values():
        node.is_off = True
    told = run_in(seen, events_of(seen, FAILED, "logs"))
    assert told["run"]["answer"].startswith("alone failed at step 22 of 120: rank 1 on node2 was killed") and told["run"]["are_all_silent"]
    assert any("as seen before" in note for note in told["run"]["notes"]) and len(told["report"]["curves"]) >= 3
    assert "homelab recover" in told["run"]["diagnosis"]["hint"]


@pytest.mark.parametrize("script", [None, {"path": "train.py"}])
def test_the_model_of_a_program_of_ones_own_has_no_chat(site: Site, script: dict[str, str] | None) -> None:
    seen = site.with_runs().observer()
    for folder in (site.runs, *(site.nodes / name / "runs" for name in NODES)):
        file = folder / DONE / "run.json"
        described = json.loads(file.read_text())
        if script:
            described["recipe"] |= {"script": script, **dict.fromkeys(("model", "data", "method", "train"))}
        file.write_text(json.dumps(described))
    told = run_in(seen, events_of(seen, DONE, "logs"))
    assert told["run"]["is_mute"] is (script is not None) and "if (!run.is_mute) part(" in site.get("/", **WITH_COOKIE)[2]


def test_two_that_ask_for_one_run_have_each_line_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    read, meeting, met = LineSample.read, threading.Barrier(2), []

    def reading(sample: LineSample) -> Any:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(1.0)
            met.append(sample)
        return read(sample)

    monkeypatch.setattr(LineSample, "read", reading)
    records = RunRecords(RunPaths(site.with_runs().runs / DONE), site.cluster)
    with ThreadPoolExecutor(2) as pool:
        reports = [each.result() for each in (pool.submit(records.report), pool.submit(lambda: records.read()[1]))]
    assert not met and reports[0].steps == reports[1].steps


def test_of_runs_that_no_page_shows_only_a_few_are_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "INTERVAL_S", 0.01)
    for name, value in (("_MOST_KEPT", 1), ("_OVER_S", 0.0), ("_PART", 0.0), ("_LINGER_S", 0.0)):
        monkeypatch.setattr(observer, name, value)
    seen = site.with_runs().observer()

    async def work() -> None:
        await seen.compared([FAILED, DONE])
        assert list(seen._records) == [DONE]
        await events_of(seen, FAILED, "run")
        while seen._runs:
            await asyncio.sleep(0.01)
        assert list(seen._records) == [FAILED]

    run_in(seen, asyncio.wait_for(work(), 30))


def test_no_runs_yet(site: Site) -> None:
    seen = site.observer()
    told = run_in(seen, events_of(seen, None, "overview"))
    assert told["overview"]["answer"] == "There is no run yet." and told["overview"]["begin"][0] == "homelab new DATA"


def test_a_damaged_folder_is_told(site: Site) -> None:
    site.with_runs()
    for node in site.fleet.nodes.values():
        node.is_off = True
    (site.runs / FAILED / "attempts" / "1" / "plan.json").write_text("{")
    said = site.get(f"/live?run={FAILED}", **WITH_COOKIE)[2]
    assert "this run's folder is damaged" in said and "mv " in said


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The folder of the runs cannot be listed until this is empty. Of root, every folder can be read."""
    listed, fails = run_index.kept_here, [True]

    def kept_here(runs_dir: Path) -> Any:
        if fails:
            raise HomelabError("the runs in it cannot be listed: Stale file handle", where=str(runs_dir), hint="ls")
        return listed(runs_dir)

    monkeypatch.setattr(run_index, "kept_here", kept_here)
    return fails


def test_trouble_with_the_folder_of_the_runs_ends_with_it(site: Site, monkeypatch: pytest.MonkeyPatch, unreadable: list[bool]) -> None:
    monkeypatch.setattr(observer, "_RUNS_S", 0.01)
    seen = site.with_runs().observer()

    async def told() -> tuple[str, dict[str, Any]]:
        found = dict[str, str]()
        follow = seen.follow(None)
        async for kind, text in follow:
            found[kind] = text
            if kind == "trouble of all" and unreadable:
                assert "Stale file handle" in text
                unreadable.clear()
            if "overview" in found and found["trouble of all"] == "null":
                break
        await follow.aclose()
        return found["trouble of all"], json.loads(found["overview"])

    trouble, overview = run_in(seen, asyncio.wait_for(told(), 30))
    assert trouble == "null" and [run["name"] for run in overview["runs"]] == [DONE, FAILED]


def test_a_run_that_is_refused_while_no_run_can_be_listed_says_why(site: Site, unreadable: list[bool]) -> None:
    said = site.with_runs().get("/live?run=nothing", **WITH_COOKIE)[2]
    told = json.loads(said.partition("event: refused\ndata: ")[2].partition("\n")[0])
    assert told["runs"] == [] and told["error"]["message"]


@pytest.mark.parametrize(
    ("name", "kind", "broken"), [(DONE, "trouble", (monitor.Watcher, "look")), (None, "trouble of all", (run_index, "all_runs"))]
)
def test_a_mistake_of_ours_is_told_on_the_page_and_in_the_log(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str | None, kind: str, broken: tuple[Any, str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    secrets.know({"HF_TOKEN": SECRET})

    def look(*_: Any, **__: Any) -> Any:
        raise KeyError(f"a key that nobody has foreseen {SECRET}")

    monkeypatch.setattr(*broken, look)
    seen = site.with_runs().observer()
    try:
        error = run_in(seen, events_of(seen, name, kind))[kind]["error"]
    finally:
        secrets.know({})
    assert (
        error["message"].startswith("internal error: KeyError: 'a key that nobody has foreseen ***")
        and "load this page again" in error["hint"]
    )
    assert "terminal in which homelab web runs" in error["where"] and "homelab status" in error["hint"]
    assert "Traceback" in caplog.text and "in look" in caplog.text and SECRET not in caplog.text


def test_a_report_that_cannot_be_made_is_told_until_it_can(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "INTERVAL_S", 0.01)
    for name, value in (("_OVER_S", 0.01), ("_PART", 0.0)):
        monkeypatch.setattr(observer, name, value)
    made, fails = run_source.RunSource.report, [True] * 3

    def report(source: run_source.RunSource) -> Any:
        if fails and fails.pop():
            raise HomelabError("the disk refuses", where="energy.json", hint="df -h")
        return made(source)

    monkeypatch.setattr(run_source.RunSource, "report", report)
    seen = site.with_runs().observer()

    async def troubles() -> list[str]:
        said = []
        follow = seen.follow(DONE)
        async for kind, text in follow:
            said += [text] if kind == "trouble" else []
            if said[-1:] == ["null"] and said[:-1] not in ([], ["null"]):
                break
        await follow.aclose()
        return said

    *before, told, last = [json.loads(text) for text in run_in(seen, asyncio.wait_for(troubles(), 30))]
    assert told["error"]["message"] == "the disk refuses" and last is None and before in ([], [None])


def test_one_look_serves_all_pages_and_none_is_made_without(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "INTERVAL_S", 0.01)
    for name, value in (("_OVER_S", 0.05), ("_PART", 0.0), ("_LINGER_S", 30.0)):
        monkeypatch.setattr(observer, name, value)
    seen = site.with_runs().observer()

    async def both() -> list[int]:
        first, second = await asyncio.gather(events_of(seen, DONE, "logs"), events_of(seen, DONE, "logs"))
        assert first["run"] == second["run"]
        polls = [site.fleet.asked.count(("node1", "poll"))]
        await asyncio.sleep(0.4)  # nothing to wait for: nothing may come
        polls.append(site.fleet.asked.count(("node1", "poll")))
        await events_of(seen, DONE, "nothing", most=8)
        return polls

    first, later = run_in(seen, both())
    assert first <= 2 and later - first <= 1, "a look that was under way ends; no other begins"


def test_a_run_with_which_something_was_done_is_looked_at_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "INTERVAL_S", 0.01)
    monkeypatch.setattr(observer, "_OVER_S", 1000.0)
    seen = site.with_runs().observer()

    async def polled(count: int) -> None:
        while site.fleet.asked.count(("node1", "poll")) < count:
            await asyncio.sleep(0.01)

    async def work() -> None:
        page = asyncio.create_task(events_of(seen, DONE, "nothing", most=1000))
        for count in (1, 2, 3):
            await asyncio.wait_for(polled(count), 20)
            seen.look_soon(DONE)
        page.cancel()

    run_in(seen, work())


def test_a_taken_port_names_the_next_free_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(HomelabError, match=f"port {port} is taken") as caught:
            web_server.bind(port, is_lan=False)
        match = re.fullmatch(r"homelab web --port (\d+)", caught.value.hint)
        assert match and caught.value.where == f"127.0.0.1:{port}"
        web_server.bind(int(match[1]) if int(match[1]) > port else 0, is_lan=False).listener.close()
    with web_server.bind(None, is_lan=False).listener as one, web_server.bind(None, is_lan=False).listener as two:
        assert one.getsockname()[1] < two.getsockname()[1], "two servers at once"


def test_the_lan_is_opened_by_name_only() -> None:
    place = web_server.bind(0, is_lan=False)
    assert place.listener.getsockname()[0] == "127.0.0.1" and place.names == web_server.LOOPBACK and place.addresses == ("127.0.0.1",)
    place.listener.close()
    place = web_server.bind(0, is_lan=True)
    assert place.listener.getsockname()[0] == "0.0.0.0" and socket.gethostname().lower() in place.names
    assert not [address for address in place.addresses[1:] if address.startswith(("127.", "169.254."))]
    place.listener.close()


def test_missing_packages_are_named_with_their_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "uvicorn" else find(name, *more))
    assert main.run(["web"]) == 1
    said = capsys.readouterr().err
    assert "the package uvicorn is not installed on this machine" in said and "-m pip install 'starlette>=0.40' 'uvicorn>=0.30'" in said


def test_ctrl_c_ends_the_page(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "controller", tmp_path / "runs")
    (tmp_path / "cluster.toml").write_text('[[nodes]]\nname = "node1"\nhost = "127.0.0.1"\nport = 1\n')
    command = [sys.executable, "-m", "homelab", "web", DONE, "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        found = re.fullmatch(rf"http://127\.0\.0\.1:(\d+)/runs/{DONE}\?token=[\w-]{{32}}", address)
        assert found, address + process.stderr.read() if process.stderr else address
        with socket.create_connection(("127.0.0.1", int(found[1]))) as stream:
            stream.sendall(f"GET /live{address[address.index('?') :]}&run={DONE} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            assert b"200 OK" in stream.recv(4096)
            process.send_signal(signal.SIGINT)
            said, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "") and said.endswith("Next: homelab status\n")
