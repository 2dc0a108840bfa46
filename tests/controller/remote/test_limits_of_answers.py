"""What a node may say is limited before it is believed: bytes, values, depth, and the end of a command that waits for it."""

from __future__ import annotations

import io
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, get_args, get_origin, get_type_hints

import pytest

from homelab.controller.base.errors import HomelabError
from homelab.controller.remote.agent import Agent
from homelab.controller.remote.bootstrap import AGENT_MARK, ANSWER_MARK
from homelab.controller.remote.decoding import decoded
from homelab.controller.remote.local import LocalSession
from homelab.controller.remote.session import Completed
from homelab.controller.run import signals
from homelab.node.setup import pieces
from homelab.node.system import processes
from homelab.shared import markers
from homelab.shared.protocol import marks
from homelab.shared.protocol.message import Message
from homelab.shared.protocol.setup_messages import PieceRequest
from homelab.shared.protocol.verb_table import VERBS
from scripts.practice.desk import heed_signals
from tests import builders
from tests.fakes import FakeFleet, ask_node

pytestmark = pytest.mark.timeout(60)
NODE = builders.cluster().nodes[0]
MIB = 1 << 20


class Says:
    """A session that answers with these blocks, and counts what was taken of them."""

    node = NODE.name

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self.blocks, self.taken = blocks, 0

    def run(self, command: str, *, stdin: Any = b"", timeout_s: float, stdout: BinaryIO | None = None, head: bytes = b"") -> Completed:
        assert stdout is not None, "an answer is kept by who knows how long it may be"
        stdout.write(f"{ANSWER_MARK}\n{AGENT_MARK}\n".encode())
        for block in self.blocks:
            self.taken += len(block)
            stdout.write(block)
        return Completed(0, b"", b"")


def endless(block: bytes, total: int = 1 << 30) -> Iterator[bytes]:
    for _ in range(total // len(block)):
        yield block


def agent_saying(blocks: Iterator[bytes]) -> tuple[Agent, Says]:
    session = Says(blocks)
    return Agent(NODE, session), session  # type: ignore[arg-type]


@pytest.mark.parametrize("verb", VERBS)
def test_an_endless_answer_is_cut_off_for_every_verb(verb: str) -> None:
    agent, session = agent_saying(endless(b'{"a": "' + b"x" * 65536))
    with pytest.raises(HomelabError, match="more than") as caught:
        agent.ask(verb)
    assert session.taken < 32 * MIB and caught.value.where and caught.value.hint


@pytest.mark.parametrize("wanted", [0, 1, 1000, 5 * MIB])
def test_bytes_that_are_fetched_are_never_more_than_were_said(wanted: int) -> None:
    for extra in (1, 3 * MIB):
        into = io.BytesIO()
        agent, _ = agent_saying(endless(b"x" * 1000, wanted + extra + 1000))
        with pytest.raises(HomelabError, match="more than"):
            agent.fetch("result-part", {}, into, most_bytes=wanted)
        assert len(into.getvalue()) <= wanted


def test_a_refused_fetch_is_told_in_the_nodes_own_words_and_leaves_no_byte(tmp_path: Path) -> None:
    fleet, into = FakeFleet(tmp_path), io.BytesIO(b"so far")
    into.seek(0, io.SEEK_END)
    with pytest.raises(HomelabError, match=r"there is no .*step-00000020") as caught:
        fleet.agent("tower").fetch("send-checkpoint", {"run": builders.RUN, "step": 20}, into, most_bytes=10)
    assert "tower" in (caught.value.where or "") and into.getvalue() == b"so far"


BOMBS = {
    "empty lists": b"[" + b"[]," * 1_300_000 + b"[]]",
    "empty objects": b'{"runs": [' + b"{}," * 1_000_000 + b"{}]}",
    "numbers": b'{"good": [' + b"1," * 1_900_000 + b"1]}",
    "keys": b"{" + b",".join(b'"%d":0' % number for number in range(300_000)) + b"}",
    "depth of lists": b"[" * 100_000,
    "depth of objects": b'{"a":' * 100_000,
    "some depth": b"[" * 900 + b"]" * 900,
}  # fmt: skip


@pytest.mark.parametrize("text", BOMBS.values(), ids=BOMBS)
def test_a_small_text_that_is_large_as_objects_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError):
        decoded(text)
    agent, _ = agent_saying(iter([text]))
    with pytest.raises(HomelabError):
        agent.ask("runs")


@pytest.mark.parametrize("digits", [20, 4000, 100_000])
def test_a_number_that_no_machine_counts_is_none(digits: int) -> None:
    assert decoded(b'{"a": ' + b"9" * digits + b"}")["a"] >= 9e18
    agent, _ = agent_saying(iter([b'{"good": [' + b"9" * digits + b'], "bad": {}}']))
    with pytest.raises(HomelabError, match="never sends"):
        agent.ask("checkpoints")


def _endless_fields(kind: type[Message]) -> Iterator[str]:
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for inner, found in _parts_of(hint):
            if isinstance(inner, type) and issubclass(inner, Message):
                yield from _endless_fields(inner)
            is_open = (get_origin(inner) is dict and inner != marks.Json) or (get_origin(inner) is tuple and get_args(inner)[1:] == (...,))
            if is_open and name not in ("MARKS", "_defaults") and not any(isinstance(mark, markers.Longest) for mark in found):
                yield f"{kind.__name__}.{name}"


def _parts_of(hint: Any, found: tuple[Any, ...] = ()) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    if get_origin(hint) is Annotated:
        yield from _parts_of(get_args(hint)[0], get_args(hint)[1:])
    else:
        yield hint, found
        for part in get_args(hint):
            yield from _parts_of(part)


class Open(Message):
    good: Annotated[tuple[int, ...], markers.Longest(3)]
    bad: dict[str, tuple[int, ...]]


def test_every_list_of_every_answer_has_an_end() -> None:
    """A list without a limit grows with what a node sends; those of `facts` are bounded by the values of the whole answer."""
    found = {name for verb in VERBS.values() if (kind := verb.answer_type()) is not None for name in _endless_fields(kind)}
    assert set(_endless_fields(Open)) == {"Open.bad"}
    assert found == {"RankReply.metrics", "RankReply.before"}, "those are counted for the whole answer"


PROGRAM = """
import sys
sys.path.insert(0, {root!r})
from tests.controller.remote.test_limits_of_answers import agent_saying, endless
agent, _ = agent_saying({blocks})
try:
    agent.ask({verb!r})
except Exception as error:
    print(type(error).__name__, str(error)[:200])
# Not ru_maxrss, which a process has from the one that started it, too.
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""
LARGEST = {
    "a gigabyte": ("runs", 'endless(b"x" * 65536)'),
    "a poll of metrics": ("poll", "iter([b'{\"node\":\"a\",\"time\":1,\"run\":{\"name\":\"r\",\"ranks\":{\"0\":{\"metrics\":[' + b'{\"kind\":\"x\"},' * 700_000 + b'{}]}}}}'])"),
    "a poll of ranks": ("poll", "iter([b'{\"node\":\"a\",\"time\":1,\"run\":{\"name\":\"r\",\"ranks\":{' + b','.join(b'\"%d\":{}' % n for n in range(700_000)) + b'}}}'])"),
    "a poll of lines": ("poll", "iter([b'{\"node\":\"a\",\"time\":1,\"run\":{\"name\":\"r\",\"torchrun_tail\":[' + b'\"x\",' * 1_400_000 + b'\"x\"]}}'])"),
    "one wide text": ("poll", "iter([b'{\"node\":\"' + '\\N{GRINNING FACE}'.encode() + b'x' * (23 << 20) + b'\",\"time\":1}'])"),
    "plans": ("describe", "iter([b'{\"run_json\":null,\"plans\":{' + b','.join(b'\"%d\":{}' % n for n in range(1, 490_000)) + b'}}'])"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("verb", "blocks"),
    [
        pytest.param(*case, marks=pytest.mark.thorough if name in ("one wide text", "plans") else (), id=name)
        for name, case in LARGEST.items()
    ],
)
def test_the_largest_answers_take_less_than_half_a_gigabyte(verb: str, blocks: str) -> None:
    root = str(Path(__file__).parents[3])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(root=root, blocks=blocks, verb=verb)], capture_output=True, text=True, timeout=60, check=True
    )
    said, kilobytes = done.stdout.rsplit("\n", 2)[-3:-1] if done.stdout.count("\n") > 1 else ("", done.stdout.strip())
    assert int(kilobytes) < 500_000, (said, kilobytes)
    assert "HomelabError" in said or verb == "poll", done.stdout


class Endless(io.RawIOBase):
    """A peer that never stops sending."""

    def __init__(self) -> None:
        self.given = 0

    def read(self, size: int = -1) -> bytes:
        self.given += size
        assert self.given < 64 * MIB, "it was read to an end that never comes"
        return b"x" * size


@pytest.mark.parametrize("offset", [0, 10])
def test_never_more_bytes_are_written_than_the_size_that_was_said(tmp_path: Path, offset: int) -> None:
    folder, sha256 = tmp_path / "place", "a" * 64
    (folder / "partial").mkdir(parents=True)
    (folder / "partial" / sha256).write_bytes(b"x" * offset)
    request = PieceRequest(name="wheels/a.whl", sha256=sha256, size=1000, offset=offset)
    assert pieces.receive_into(str(folder), "a.whl", request, Endless()).have == 0  # type: ignore[arg-type]
    assert list(folder.rglob("*.whl")) == [] and not (folder / "partial" / sha256).exists()
    with pytest.raises(ValueError, match="more bytes arrived"):
        ask_node("receive-file", {"workdir": str(tmp_path), "name": "rows.jsonl", "sha256": sha256, "size": 3 * MIB}, Endless())
    assert [path for path in (tmp_path / "data").rglob("*") if path.is_file()] == []


def test_this_machine_as_a_node_is_read_block_by_block() -> None:
    session = LocalSession(NODE)
    kept = io.BytesIO()

    class Few(io.RawIOBase):
        def write(self, block: Any) -> int:
            kept.write(block)
            if len(kept.getvalue()) > 1 * MIB:
                raise HomelabError("enough", where="here", hint="none")
            return len(block)

    with pytest.raises(HomelabError, match="enough"):
        session.run("cat /dev/zero", timeout_s=30, stdout=Few())  # type: ignore[arg-type]
    assert len(kept.getvalue()) < 2 * MIB
    done = session.run("cat; echo end >&2; exit 3", head=b"a", stdin=io.BytesIO(b"b" * MIB), timeout_s=30)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"a" + b"b" * MIB, b"end\n")


ON_THIS_MACHINE = """
import sys
from homelab.controller.config.cluster import Node
from homelab.controller.remote.local import LocalSession
from homelab.controller.run import signals
signals.count_alike()
session = LocalSession(Node(name="here", host="local"))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_what_must_be_done_whole_on_this_machine_outlives_ctrl_c_and_the_terminal(tmp_path: Path, number: signal.Signals) -> None:
    """A terminal tells its whole group, and twice where a person is impatient."""
    begun, goes_on = tmp_path / "begun", tmp_path / "goes-on"
    step = f"touch {begun}; until test -e {goes_on}; do sleep 0.05; done; echo undone"
    text = f"with signals.held():\n  said = session.run({step!r}, timeout_s=20).stdout\n  print(said.decode(), flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", ON_THIS_MACHINE + text], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=heed_signals, start_new_session=True,
    )  # fmt: skip
    while not begun.exists() and process.poll() is None:
        time.sleep(0.01)
    for _ in range(2):
        os.killpg(process.pid, number)
    goes_on.touch()
    assert process.communicate(timeout=20)[0] == "undone\n\n"


def test_an_agent_on_this_machine_tidies_up_and_ends_with_its_command(tmp_path: Path) -> None:
    begun, tidied = tmp_path / "begun", tmp_path / "tidied"
    agent = f"import os, time\ntry:\n  open({str(begun)!r}, 'w').write(str(os.getpid()))\n  time.sleep(60)\nfinally:\n  open({str(tidied)!r}, 'w').close()"
    text = f"session.run({f'{sys.executable} -c {shlex.quote(agent)}; true'!r}, timeout_s=20)"
    process = subprocess.Popen([sys.executable, "-c", ON_THIS_MACHINE + text], stderr=subprocess.DEVNULL, preexec_fn=heed_signals)
    while not (begun.exists() and begun.read_text()) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.wait(20)
    assert tidied.exists() and not processes.is_alive(int(begun.read_text()))


STUCK = {
    "a thread": "import time; from concurrent.futures import ThreadPoolExecutor as Pool\nwith Pool() as pool:\n  it = pool.submit(time.sleep, 600); print(flush=True); it.result()",
    "work that is done whole": "import time\nwith signals.held():\n  print(flush=True)\n  while True: time.sleep(1)",
    "an end that does not end": "import time\ntry:\n  print(flush=True); time.sleep(600)\nfinally:\n  time.sleep(600)",
}  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
@pytest.mark.parametrize("program", STUCK.values(), ids=STUCK)
def test_a_command_that_waits_for_a_node_is_gone_at_the_limit(program: str, number: signal.Signals) -> None:
    assert signals._END_S < 5.0
    text = f"from homelab.controller.run import signals; signals.count_alike(); signals.limit_end(); signals._HURRY_S, signals._END_S = 0.2, 0.5\n{program}"
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_signals
    )
    assert process.stdout is not None and process.stdout.readline() == "\n"
    began_s = time.monotonic()
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert time.monotonic() - began_s < 5.0 and process.returncode == 130 and said.endswith("interrupted\n")


def test_what_must_be_asked_is_asked_before_that() -> None:
    text = (
        "import time; from homelab.controller.run import signals; signals.count_alike(); signals.limit_end(); signals._HURRY_S, signals._END_S = 0.2, 0.5\n"
        "with signals.held(), signals.hurried(lambda: print('undone', flush=True)):\n  print(flush=True)\n  while True: time.sleep(1)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", text], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, preexec_fn=heed_signals
    )
    assert process.stdout is not None and process.stdout.readline() == "\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=20)[0] == "undone\n"
