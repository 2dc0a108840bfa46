"""A node that lies in every field it can: each key of each answer replaced by hostile values, under every command that asks nodes.

The real commands run in this process, with real agents; one node answers by its real verbs, the other with one key exchanged. Nothing outside
is read, nothing is run, nothing ends in an internal error, nothing that a terminal obeys is printed. The thorough version takes every value at
every key; the quick one takes a few keys of each command.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from homelab.cli import main
from homelab.node import verbs
from homelab.protocol import layout
from homelab.protocol.errors import EXIT_INTERNAL
from homelab.remote.session import Completed
from tests import builders
from tests.fakes import FakeFleet, FakeNode

pytestmark = pytest.mark.timeout(3600)
NAMES = ("tower", "laptop")
CANARY = "canary-0123456789"
COMMANDS = {
    "status": ["status", builders.RUN], "why": ["why", builders.RUN], "logs": ["logs", builders.RUN], "runs": ["runs"],
    "report": ["report", builders.RUN], "recover": ["recover", builders.RUN, "--yes", "--no-supervise"], "fetch": ["fetch", builders.RUN],
    "chat": ["chat", builders.RUN, "--prompt", "hello"], "stop": ["stop", builders.RUN], "orphans": ["stop", "--orphans"],
    "preflight": ["preflight", "--only", "disk", "--only", "memory", "--only", "python", "--only", "runs", "--only", "gpu"],
    "adopt": ["status", "--runs-dir", "elsewhere", builders.RUN], "adopt and recover": ["recover", "--runs-dir", "elsewhere2", builders.RUN, "--yes", "--no-supervise"],
}  # fmt: skip
opened: list[str] = []
started: list[str] = []


def _watch(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        opened.append(str(args[0]))
    elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"):
        started.append(str(args))


def hostile(outside: Path, many: int) -> list[Any]:
    deep: Any = 0
    for _ in range(300):
        deep = [deep]
    return [
        None, True, -1, 10**30, float("nan"), float("inf"), "", "x" * 20_000, f"../../../../{outside.name}/canary", str(outside / "canary"), "$(touch pwned)",
        "\x1b]52;c;cHduZWQ=\x07\x1b[2J", "\u202e\u200b\x00\x9b1m", "a\nfix: sh -c evil", "-rf", [], {}, [None], {"../x": {}}, deep, [0] * many, {str(n): 0 for n in range(many)},
    ]  # fmt: skip


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of an answer; of a long list its first two entries."""
    yield place
    if isinstance(value, dict):
        for key in list(value)[:60]:
            yield from places(value[key], (*place, key))
    elif isinstance(value, list):
        for number in range(min(2, len(value))):
            yield from places(value[number], (*place, number))


def exchanged(answer: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    answer = copy.deepcopy(answer)
    inner = answer
    try:
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
    except (KeyError, IndexError, TypeError):
        return answer
    return answer


class LyingNode(FakeNode):
    """Answers by its real verbs; one key of one verb's answer is another."""

    seen: dict[str, Any]
    lie: tuple[str, tuple[Any, ...], Any] | None = None

    def run(self, command: str, *, stdin: bytes | BinaryIO = b"", timeout_s: float, stdout: BinaryIO | None = None, head: bytes = b"") -> Completed:
        return super().run(command, stdin=stdin, timeout_s=timeout_s, stdout=stdout, head=head)

    def _answer(self, verb: str, request: dict[str, Any], body: BinaryIO, out: BinaryIO) -> int:
        content = body.read()
        assert CANARY.encode() not in content, f"the canary was sent with {verb}"
        own = io.BytesIO()
        code = super()._answer(verb, request, io.BytesIO(content), own)
        said = own.getvalue()
        if verbs.VERBS.get(verb, ("", "", ""))[2] != "stdout" and code == 0:
            answer = json.loads(said)
            self.seen.setdefault(verb, answer)
            if self.lie and self.lie[0] == verb:
                said = json.dumps(exchanged(answer, *self.lie[1:])).encode() + b"\n"
        out.write(said)
        return code


@pytest.fixture(scope="module", autouse=True)
def watched() -> None:
    sys.addaudithook(_watch)


@pytest.fixture
def lying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LyingNode:
    """The desk of a cluster of two whose second node lies; both have a run that has failed."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "canary").write_text(CANARY)
    desk = tmp_path / "desk"
    desk.mkdir()
    fleet = FakeFleet(tmp_path / "nodes", NAMES)
    node = fleet.nodes["laptop"] = LyingNode("laptop", tmp_path / "nodes" / "laptop", fleet.asked)
    node.seen = {}
    node.answers["chat"] = {"answer": "hello", "notes": ["on the CPU"]}  # the real one loads a model
    fleet.replace_connections(monkeypatch)
    text = "".join(f'[[nodes]]\nname = "{name}"\nhost = "127.0.0.{number}"\nworkdir = "{tmp_path / "nodes" / name}"\n' for number, name in enumerate(NAMES, 2))
    (desk / "cluster.toml").write_text(text)
    ranks = tuple(builders.rank_plan(number, name) for number, name in enumerate(NAMES))
    plan = builders.plan(ranks)
    data = {"train": {"kind": "file", "sent": "on-node", "path": "/data/train.jsonl", "name": None, "sha256": "a" * 64}, "eval": None}
    paths = builders.run_folder(desk / "runs", recipe=builders.recipe(), plan=plan, data=data)
    for number, name in enumerate(NAMES):
        _failed(fleet.nodes[name].workdir / layout.run(builders.RUN), paths.run_json, paths.plan_json(1), number, name)
    monkeypatch.chdir(desk)
    monkeypatch.setenv("HOMELAB_CLUSTER", str(desk / "cluster.toml"))
    monkeypatch.setenv("HOMELAB_RUNS", str(desk / "runs"))
    return node


def _failed(folder: Path, run_json: Path, plan: Path, number: int, name: str) -> None:
    place, rank = folder / layout.node(1, name), folder / layout.rank(1, number)
    for made in (place, rank):
        made.mkdir(parents=True)
    (folder / "run.json").write_bytes(run_json.read_bytes())
    (folder / layout.plan_json(1)).write_bytes(plan.read_bytes())
    (place / "start.json").write_text(json.dumps({"command": [], "attempt": 1, "run": builders.RUN}))
    (place / "exit.json").write_text(json.dumps({"returncode": 1, "ended_at": 2000.0}))
    (place / "err.log").write_text("Traceback\nRuntimeError: CUDA out of memory\n")
    (rank / "heartbeat.json").write_text(json.dumps({"time": 1500.0, "phase": "training", "step": 7, "total_steps": 10, "pid": 4}))
    line = {"kind": "train", "time": 1500.0, "attempt": 1, "rank": number, "node": name, "step": 7, "loss": 1.0, "tokens": 5, "step_s": 1.0}
    (rank / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (rank / "error.json").write_text(json.dumps({"message": "out of memory", "where": "here", "hint": "less"}))


def told(command: list[str]) -> tuple[int, str]:
    """The real command in this process: its exit code, and all that it said."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main.run(command)
        except KeyboardInterrupt:
            code = 130
    return code, out.getvalue()


def sweep(node: LyingNode, command: list[str], tmp_path: Path, values: list[Any], *, most: int = 0) -> int:
    """How many lies were told; with `most` only so many, spread over the keys, else every value at every key."""
    node.lie = None
    command = [command[0], "--cluster", "cluster.toml", *command[1:]]
    _, honest = told(command)
    cases = [(verb, place) for verb, answer in list(node.seen.items()) for place in places(answer)]
    turns = itertools.cycle(values)
    count = 0
    if most:
        cases = cases[:: max(1, len(cases) // most)]
    for verb, place in cases:
        for value in [next(turns)] if most else values:
            node.lie = (verb, place, value)
            opened.clear()
            started.clear()
            code, said = told(command)
            case = f"{command}: {verb} {place} = {str(value)[:60]!r}\n{said[-1500:]}"
            assert code != EXIT_INTERNAL and "internal error" not in said and "Traceback (most recent" not in said, case
            assert not any("outside/canary" in path for path in opened) and CANARY not in said, case
            assert not any("touch pwned" in words or "evil" in words for words in started), case
            assert "\x1b]" not in said and "\x1b[2J" not in said and "\x9b" not in said and "\x00" not in said, case
            count += 1
    assert count, honest
    assert not list(tmp_path.rglob("pwned")), command
    assert CANARY not in "".join(path.read_text(errors="replace") for path in (tmp_path / "nodes").rglob("*") if path.is_file())
    return count


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_some_keys_of_each_answer_lie(lying: LyingNode, tmp_path: Path, command: list[str]) -> None:
    assert sweep(lying, command, tmp_path, hostile(tmp_path / "outside", 1000), most=5) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_each_key_of_each_answer_lies_in_every_way(lying: LyingNode, tmp_path: Path, command: list[str]) -> None:
    count = sweep(lying, command, tmp_path, hostile(tmp_path / "outside", 100_000))
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    print(f"{command[0]}: {count} lies, peak {peak_mb} MB, {os.getpid()}")
    assert peak_mb < 500
