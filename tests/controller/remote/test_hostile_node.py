"""A node that lies in every field it can: each key of each answer replaced by hostile values, under every command that asks nodes.

The real commands run in this process, with real agents; one node answers by its real verbs, the other with one key exchanged. Nothing outside
is read, nothing is run, nothing ends in an internal error, nothing that a terminal obeys is printed. The thorough version takes every value at
every key; the quick one takes a few keys of each command. Of the values that the agent refuses in the same words the first alone is told: the
command sees these words and nothing else of the answer.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from homelab.cli import command_list, main
from homelab.controller.base.errors import NoRoomError
from homelab.controller.features.setup import wheelhouse
from homelab.controller.features.setup.requirements import Lock
from homelab.controller.remote import answers, ship
from homelab.controller.remote.decoding import MOST_VALUES, decoded
from homelab.controller.remote.session import Stream
from homelab.shared.protocol.errors import EXIT_INTERNAL
from homelab.shared.protocol.message import Done
from homelab.shared.protocol.verb_table import VERBS
from tests import builders, watched
from tests.controller.remote import desks
from tests.controller.remote.desks import DONE, NAMES, OTHER
from tests.fakes import FakeFleet, FakeNode
from tests.watched import Apart, opened, started

pytestmark = pytest.mark.timeout(3600)
CANARY = "canary-0123456789"
MISSING = "the key is left out"
_CASES = 10  # of one process, with every value: some hundred commands, of which each leaves a little
SKIPPED = ("--skip", "network", "--skip", "collective")
_CHECKS = ("disk", "memory", "python", "runs", "gpu")
COMMANDS = {
    "status": ["status", builders.RUN], "why": ["why", builders.RUN], "logs": ["logs", builders.RUN], "runs": ["runs"],
    "report": ["report", builders.RUN], "recover": ["recover", builders.RUN, "--yes", "--no-supervise"], "fetch": ["fetch", builders.RUN],
    "chat": ["chat", builders.RUN, "--prompt", "hello"], "stop": ["stop", builders.RUN], "orphans": ["stop", "--orphans"],
    "preflight": ["preflight", *(word for check in _CHECKS for word in ("--only", check))], "doctor": ["doctor", "laptop"],
    "adopt": ["status", "--runs-dir", "elsewhere", builders.RUN], "adopt and recover": ["recover", "--runs-dir", "elsewhere2", builders.RUN, "--yes", "--no-supervise"],
    "new": ["new", "train.jsonl", "--model", "~/models/smol", "--output", "new.toml"],
    "plan": ["plan", "recipe.toml", "--no-dry-run"], "launch": ["launch", "recipe.toml", "--dry-run", "--nodes", "laptop", *SKIPPED],
    "run": ["run", "--dry-run", *SKIPPED, "--", "train.py"],
    "setup": ["setup", "--check"], "teardown": ["teardown", "--yes"], "prune": ["runs", "--prune", "--yes", "--keep", "0"],
    "track": ["track", "--once", "--to", "wandb", builders.RUN], "compare": ["compare", builders.RUN, OTHER],
    "profile": ["profile", DONE], "fetch of a model": ["fetch", DONE], "merge": ["merge", DONE],
}  # fmt: skip
# Command -> why no lie is told to it here.
NOT_SWEPT = {
    "explain": "asks no node", "data": "asks no node", "schema": "asks no node", "demo": "its nodes are its own", "lab": "its nodes are its own", "export": "asks no node",
    "trust": "asks for host keys alone (test_hostkeys.py)",
    "gguf": "makes as merge does, brings as fetch does", "push": "brings the model as fetch does, then asks the hub", "tensorboard": "asks as track does, and serves until Ctrl-C",
    "bench": "launches, follows and reports as launch, status and report do", "supervise": "looks as status does and recovers as recover does, as long as a run lives",
    "wake": "asks for one true or false, and waits for minutes", "init": "asks for the facts, as preflight does; its words become a file (test_proposal.py)",
    "queue": "plans, launches, stops and recovers as those commands do", "web": "looks as status and report do; its words stay text (test_web_server.py)",
    "verify": "reads files as fetch does, launches and follows as launch and status do; its record is typed (test_record.py)",
    "yield": "asks what supervise asks, and whether a supervisor is on a node, as status does",
}  # fmt: skip


def hostile(outside: Path, many: int) -> list[Any]:
    deep: Any = 0
    for _ in range(300):
        deep = [deep]
    return [
        MISSING, None, True, -1, 10**30, float("nan"), float("inf"), "", "x" * 20_000, f"../../../../{outside.name}/canary", str(outside / "canary"), "$(touch pwned)",
        "\x1b]52;c;cHduZWQ=\x07\x1b[2J", "\u202e\u200b\x00\x9b1m", "a\nfix: sh -c evil", "-rf", [], {}, [None], {"../x": {}}, deep, [0] * many, {str(n): 0 for n in range(many)},
    ]  # fmt: skip


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every key of an answer; of the entries of a list that are alike the first."""
    yield place
    if isinstance(value, dict):
        for key in list(value)[:60]:
            yield from places(value[key], (*place, key))
    elif isinstance(value, list):
        firsts: dict[str, int] = {}
        for number, entry in enumerate(value):
            firsts.setdefault(_kind(entry), number)
        for number in list(firsts.values())[:5]:
            yield from places(value[number], (*place, number))


def _kind(value: Any) -> str:
    """Equal for values of which every key and entry is of one type."""
    if isinstance(value, dict):
        return str({key: _kind(inner) for key, inner in sorted(value.items())})
    return str(sorted({_kind(inner) for inner in value})) if isinstance(value, list) else type(value).__name__


def exchanged(answer: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return {} if value is MISSING else value
    answer = copy.deepcopy(answer)
    inner = answer
    assert isinstance(place, tuple), "else nothing is exchanged"
    try:
        for key in place[:-1]:
            inner = inner[key]
        if value is MISSING:
            del inner[place[-1]]
        else:
            inner[place[-1]] = value
    except (KeyError, IndexError, TypeError):
        return answer
    return answer


class LyingNode(FakeNode):
    """Answers by its real verbs; one key of one verb's answer is another."""

    def __init__(self, name: str, workdir: Path, asked: list[tuple[str, str]]) -> None:
        super().__init__(name, workdir, asked)
        self.seen: dict[str, Any] = {}
        self.lie: tuple[str, tuple[Any, ...], Any] | None = None

    def open(self, command: str, *, stdin: bytes = b"") -> Stream:
        honest = self.streams
        if self.lie and self.lie[0] in honest:
            verb, place, value = self.lie
            self.streams = {**honest, verb: [*honest[verb][:-2], exchanged(honest[verb][-2], place, value), b""]}
        try:
            return super().open(command, stdin=stdin)
        finally:
            self.streams = honest

    def _begun(self, command: str, head: bytes, **details: Any) -> tuple[str, dict[str, Any]]:
        verb, request = super()._begun(command, head, **details)
        if verb in self.streams:
            self.seen.setdefault(verb, self.streams[verb][-2])
        return verb, request

    def _answer(self, verb: str, request: dict[str, Any], body: BinaryIO, out: BinaryIO) -> int:
        content = body.read()
        assert CANARY.encode() not in content, f"the canary was sent with {verb}"
        own = io.BytesIO()
        code = super()._answer(verb, request, io.BytesIO(content), own)
        said = own.getvalue()
        if (verb not in VERBS or VERBS[verb].stream != "stdout") and code == 0:
            answer = json.loads(said)
            self.seen.setdefault(verb, answer)
            if self.lie and self.lie[0] == verb:
                said = json.dumps(exchanged(answer, *self.lie[1:])).encode() + b"\n"
        out.write(said)
        return code

    def refusal(self) -> str | None:
        """In which words the lie is refused before a command sees it; None where it is not."""
        assert self.lie is not None
        verb, place, value = self.lie
        if verb in self.streams:
            return None
        try:
            answer = decoded(json.dumps(exchanged(self.seen[verb], place, value)).encode(), MOST_VALUES)
        except ValueError:
            return None
        return answers.fault(verb, answers.without_damage(verb, answer))


@pytest.fixture
def lying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LyingNode:
    """The desk of a cluster of two whose second node lies. Both have two runs that have failed; the second node a run that is done."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "canary").write_text(CANARY)
    desk = tmp_path / "desk"
    desk.mkdir()
    fleet = FakeFleet(tmp_path / "nodes", NAMES)
    node = fleet.nodes["laptop"] = LyingNode("laptop", tmp_path / "nodes" / "laptop", fleet.asked)
    workdirs = {name: fleet.nodes[name].workdir for name in NAMES}
    _answer_for_others(fleet, desks.write_runs(desk, workdirs))
    fleet.replace_connections(monkeypatch)
    desks.write(desk, workdirs)
    monkeypatch.setattr(wheelhouse, "_resolve", _resolved)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(desk)
    monkeypatch.setenv("HOMELAB_CLUSTER", str(desk / "cluster.toml"))
    monkeypatch.setenv("HOMELAB_RUNS", str(desk / "runs"))
    return node


def _resolved(wanted: Any, options: Any, constraints: Any) -> Lock:
    """No package index is asked; the words of the command that would ask it count as started."""
    started.append(str(options))
    return Lock(packages=())


def _answer_for_others(fleet: FakeFleet, recipe_hash: str) -> None:
    """What a real node would do for minutes, or what depends on this machine."""
    for name in NAMES:
        fleet.answer("facts", functools.partial(_facts, name), [name])
    fleet.answer("chat", {"answer": "hello", "notes": ["on the CPU"]}, ["laptop"])
    fleet.answer("checkpoints", {"good": [5], "bad": {}})
    fleet.answer("manifest", {"recipe_hash": recipe_hash, "path": "/c", "files": {"trainer.pt": "a" * 64}, "sizes": {"trainer.pt": 1}})
    fleet.answer("start", Done(), ["laptop"])
    fleet.answer("start", NoRoomError("the disk is full", where="here", hint="make room"), ["tower"])  # so nothing is begun
    fleet.answer("build-model", {"built": {"trained": 7, "total": 9, "findings": [{"topic": "kind", "level": "warn", "message": "odd"}]}})
    fleet.answer("run-remove", {})
    sampled = {"whole": True, "rows_read": 20, "form": "text", "tokens_sampled": 60, "rows_bad": [{"where": "a:1", "message": "no text"}]}
    fleet.answer("sample-data", {"sample": {"node": "laptop", "files": {"train": sampled}}})
    environment = {
        "environment_exists": True,
        "environment_is_ours": True,
        "environment_python": "3.11.7",
        "packages": {"torch": "2.9.0"},
        "lock": "a" * 64,
    }
    found = {"good": ["uv.whl"], "partial": {"python.tar.gz": 5}, "disk_free": 10**11, "folders": ["/home/me/.homelab"]}
    fleet.answer(
        "setup-look", {"machine": "x86_64", "libc": "glibc 2.36", "pythons": {"3.11": "/usr/bin/python3.11"}, **environment, **found}
    )
    fleet.answer("setup-remove", {"removed": ["/home/me/.homelab"], "left": []})
    fleet.nodes["laptop"].streams["result-make"] = [
        {"say": "loading"},
        {"made": {"folder": "final", "notes": ["as trained"], "figures": {"adapter": 1.0}}},
        b"",
    ]


def _facts(name: str, request: dict[str, Any]) -> dict[str, Any]:
    facts = builders.facts(name, with_gpus=True, recipe=builders.recipe()).model_dump(mode="json")
    facts["system"]["time"] = time.time()
    facts["python"]["code_hash"] = ship.CODE.content_hash()
    return facts


def told(command: list[str]) -> tuple[int, str]:
    """The real command in this process: its exit code, and all that it said."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = main.run(command)
        except KeyboardInterrupt:
            code = 130
    return code, out.getvalue()


def sweep(node: LyingNode, command: list[str], tmp_path: Path, values: list[Any], *, most: int = 0) -> Apart[tuple[int, int]]:
    """How many lies were told, and how many more are refused in the same words as one of them; in a process that is watched.

    With `most` only so many are told, spread over the keys, else every value at every key.
    """
    kept = {folder: tmp_path / "before the lies" / folder.name for folder in (Path.cwd(), *(tmp_path / "nodes" / name for name in NAMES))}
    for folder, copy_of in kept.items():
        shutil.copytree(folder, copy_of)
    refusals: set[tuple[str, str]] = set()
    count = alike = peak_mb = first = 0
    while first >= 0:  # a person's command has a process of its own; what many in one process leave there is not its memory
        part = watched.apart(lambda: _sweep(node, command, tmp_path, values, most, kept, first, refusals))  # noqa: B023
        own_count, own_alike, first, refusals = part.result
        count, alike, peak_mb = count + own_count, alike + own_alike, max(peak_mb, part.peak_mb)
    return Apart((count, alike), peak_mb)


def _sweep(
    node: LyingNode,
    command: list[str],
    tmp_path: Path,
    values: list[Any],
    most: int,
    kept: dict[Path, Path],
    first: int,
    refusals: set[tuple[str, str]],
) -> tuple[int, int, int, set[tuple[str, str]]]:
    """(lies told, lies alike, the first case that is left or -1, refusals) of some cases from number `first` on."""
    node.lie = None
    for folder, copy_of in kept.items():
        _as_before(folder, copy_of)
    command = [command[0], "--cluster", "cluster.toml", *command[1:]]
    _, honest = told(command)
    cases = [(verb, place) for verb, answer in list(node.seen.items()) for place in places(answer)]
    turns = itertools.cycle(values)
    count = alike = 0
    if most:
        cases = cases[:: max(1, len(cases) // most)]
    for verb, place in cases[first : first + _CASES]:
        for value in [next(turns)] if most else values:
            node.lie = (verb, place, value)
            refusal = None if most else node.refusal()
            if refusal is not None and (verb, refusal) in refusals:
                alike += 1
                continue
            if refusal is not None:
                refusals.add((verb, refusal))
            for folder, copy_of in kept.items():
                _as_before(folder, copy_of)
            opened.clear()
            started.clear()
            code, said = told(command)
            case = f"{command}: {verb} {place} = {str(value)[:60]!r}\n{said[-1500:]}"
            assert code != EXIT_INTERNAL and "internal error" not in said and "Traceback (most recent" not in said, case
            assert not any("outside/canary" in path for path in opened) and CANARY not in said, case
            assert not any("touch pwned" in words or "evil" in words for words in started), case
            assert "\x1b]" not in said and "\x1b[2J" not in said and "\x9b" not in said and "\x00" not in said, case
            count += 1
    assert count + alike, honest
    assert not list(tmp_path.rglob("pwned")), command
    assert CANARY not in "".join(path.read_text(errors="replace") for path in (tmp_path / "nodes").rglob("*") if path.is_file())
    return count, alike, first + _CASES if first + _CASES < len(cases) else -1, refusals


def _as_before(place: Path, kept: Path) -> None:
    """Each lie is told to the same desk and nodes: what an earlier one has left there is neither adopted nor removed already, nor read each time."""
    for entry in place.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.copytree(kept, place, dirs_exist_ok=True)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_some_keys_of_each_answer_lie(lying: LyingNode, tmp_path: Path, command: list[str]) -> None:
    assert sweep(lying, command, tmp_path, hostile(tmp_path / "outside", 1000), most=5).result[0] > 0


def test_every_command_hears_lies_or_has_a_reason() -> None:
    swept = {command[0] for command in COMMANDS.values()}
    assert not swept & set(NOT_SWEPT)
    assert swept | set(NOT_SWEPT) == {*command_list.NAMES, *(group.name for group in command_list.app.registered_groups)}


@pytest.mark.thorough
@pytest.mark.shares_nothing
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_each_key_of_each_answer_lies_in_every_way(
    lying: LyingNode, tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    swept = sweep(lying, command, tmp_path, hostile(tmp_path / "outside", 100_000))
    with capsys.disabled():
        print(f"\n{' '.join(command)}: {swept.result[0]} lies, {swept.result[1]} refused alike, peak {swept.peak_mb} MB")
    assert swept.peak_mb < 400
