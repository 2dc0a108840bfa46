"""Ranks that could not connect to one node: the texts of gloo and c10d as torch 2.13 printed them, those of NCCL from its source."""

from __future__ import annotations

from typing import Any

import pytest

from homelab.controller.config.cluster import Node
from homelab.controller.diagnose.cause import Context, Diagnosis, diagnose
from homelab.controller.remote.poll_reply import parse_replies
from tests.controller.diagnose.test_cause import CLOSED, NOW, TIMED_OUT, block, node, traceback

pytestmark = pytest.mark.timeout(30)
# Recorded: three ranks in one network namespace, what goes to the ephemeral ports of 10.213.1.11 dropped.
GLOO = (
    "RuntimeError: Gloo connectFullMesh failed with [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:152] "
    "timed out connecting: SO_ERROR: Connection timed out, remote=[{0}]:62896$1"
)
STORE = "torch.distributed.DistNetworkError: The client socket has timed out after 4000ms while trying to connect to ({0}, 29500)."
# misc/socket.cc of NCCL 2.2x, and torch's words around it.
NCCL = (
    "torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:2251, unhandled system error",
    "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
    "Last error:",
    "socketPollConnect: connect to {0}<40131> returned 110(Connection timed out), exceeded error retry count after 35 attempts",
)
WARNING = (
    "[W1122 16:25:20.28 socket.cpp:767] [c10d] The client socket has failed to connect to [{0}]:29500 (errno: 111 - Connection refused)."
)
HEAD = "10.213.1.11"
NODES = {name: Node(name=name, host=f"{name}.lan", lan_address=f"10.213.1.1{number}") for number, name in enumerate(("n1", "n2", "n3"), 1)}
NODES_6 = {name: Node(name=name, host=f"fd00::1{number}") for number, name in enumerate(("n1", "n2", "n3"), 1)}


def waiting(name: str, rank: int, phase: str = "starting") -> dict[str, Any]:
    """Alive, without a word: it loads, or waits for the others to connect."""
    reply = node(name, rank, alive=True)
    reply["run"]["ranks"][str(rank)]["heartbeat"] = {"time": NOW - 95, "phase": phase, "step": 0}
    return reply


def said(name: str, rank: int, text: str, **more: Any) -> dict[str, Any]:
    """It failed with these words, which its worker wrote down."""
    return node(name, rank, error={"message": text, "where": f"rank {rank}", "hint": "see the other ranks"}, **more)


def found(*nodes: dict[str, Any], known: dict[str, Node] = NODES, **more: Any) -> Diagnosis | None:
    replies, unreachable = parse_replies({reply["node"]: reply for reply in nodes}), more.pop("unreachable", {})
    return diagnose("r", replies, unreachable, Context(nodes=known, **more))


def told(*nodes: dict[str, Any], **more: Any) -> Diagnosis:
    diagnosis = found(*nodes, **more)
    assert diagnosis is not None
    return diagnosis


@pytest.mark.parametrize("phase", ["absent", "starting", "loading", "connecting", "fetching"])
def test_the_node_that_the_others_name_is_the_place_and_not_the_rank_that_waits_there(phase: str) -> None:
    diagnosis = told(waiting("n1", 0, phase), said("n2", 1, GLOO.format(HEAD)), said("n3", 2, GLOO.format(HEAD)))
    assert (diagnosis.cause, diagnosis.first_node, diagnosis.first_rank, diagnosis.retryable) == ("unconnected", "n1", None, True)
    assert diagnosis.title == f"rank 1 on n2 and rank 2 on n3 could not connect to n1 ({HEAD})"
    assert "homelab preflight --only network" in diagnosis.hint and "homelab recover r" in diagnosis.hint
    assert diagnosis.because[0].startswith("rank 1 on n2: RuntimeError: Gloo connectFullMesh failed")
    assert {(victim.node, victim.rank) for victim in diagnosis.victims} == {("n2", 1), ("n3", 2)}
    assert diagnosis.topic == "hang-at-start"


def test_it_outranks_a_rank_whose_heartbeat_was_missed() -> None:
    diagnosis = told(waiting("n1", 0), said("n2", 1, GLOO.format(HEAD)), said("n3", 2, GLOO.format(HEAD)), silent_ranks={0})
    assert (diagnosis.cause, diagnosis.first_node) == ("unconnected", "n1")


@pytest.mark.parametrize(
    ("text", "address", "target"),
    [
        (STORE, HEAD, f"{HEAD}:29500"),
        (STORE, "fd00::11", "[fd00::11]:29500"),
        (STORE, "::ffff:10.213.1.11", f"{HEAD}:29500"),
        (GLOO, "fd00:0:0::11", "fd00::11"),
        (GLOO, "fd00::11%eth0", "fd00::11"),
    ],
)
def test_an_address_in_every_spelling(text: str, address: str, target: str) -> None:
    known = NODES_6 if address.startswith("fd00") else NODES
    diagnosis = told(waiting("n1", 0), said("n2", 1, text.format(address)), said("n3", 2, text.format(address)), known=known)
    assert (diagnosis.cause, diagnosis.title) == ("unconnected", f"rank 1 on n2 and rank 2 on n3 could not connect to n1 ({target})")


def test_what_a_program_without_an_account_of_its_own_printed() -> None:
    replies = [waiting("n1", 0), *(node(f"n{rank + 1}", rank, traceback(STORE.format(HEAD))) for rank in (1, 2))]
    assert told(*replies).cause == "unconnected"


def test_nccl_says_it_in_a_line_of_its_own() -> None:
    lines = [line.format(HEAD) for line in NCCL]
    inside = [node(f"n{rank + 1}", rank, [*traceback(lines[0]), *lines[1:]]) for rank in (1, 2)]
    diagnosis = told(waiting("n1", 0), *inside)
    assert diagnosis.title == f"rank 1 on n2 and rank 2 on n3 could not connect to n1 ({HEAD}:40131)"
    warned = []
    for rank in (1, 2):
        reply = node(f"n{rank + 1}", rank, traceback(NCCL[0]))
        line = f"n{rank + 1}:77:91 [0] misc/socket.cc:484 NCCL WARN socketStartConnect: Connect to {HEAD}<4013{rank}> failed : No route to host"
        reply["run"]["ranks"][str(rank)]["log_tail"]["stdout"] = ["step 0", line]
        warned.append(reply)
    diagnosis = told(waiting("n1", 0), *warned)
    assert diagnosis.title.endswith(f"could not connect to n1 ({HEAD}, ports 40131 and 40132)")


def test_of_two_nodes_the_other_one_is_all_others() -> None:
    known = {name: NODES[name] for name in ("n1", "n2")}
    assert told(waiting("n1", 0), said("n2", 1, GLOO.format(HEAD)), known=known).cause == "unconnected"


def test_torchrun_that_could_not_connect() -> None:
    ends = [node(f"n{rank + 1}", rank, tail=traceback(STORE.format(HEAD))) for rank in (1, 2)]
    diagnosis = told(waiting("n1", 0), *ends)
    assert (diagnosis.cause, diagnosis.title) == ("unconnected", f"n2 and n3 could not connect to n1 ({HEAD}:29500)")


def test_one_of_several_may_have_no_network_itself() -> None:
    diagnosis = told(node("n1", 0, traceback(TIMED_OUT)), said("n2", 1, GLOO.format(HEAD)), node("n3", 2, traceback(TIMED_OUT)))
    assert diagnosis.cause == "connection-refused" and diagnosis.first_node == "n2"


def test_two_that_name_two_nodes_accuse_nobody() -> None:
    diagnosis = told(waiting("n1", 0), said("n2", 1, GLOO.format("10.213.1.13")), said("n3", 2, GLOO.format(HEAD)))
    assert diagnosis.cause not in ("unconnected", "silent-rank")


def test_an_address_that_is_none_of_the_nodes_is_passed_over() -> None:
    replies = [waiting("n1", 0), *(said(f"n{rank + 1}", rank, GLOO.format("10.9.9.9")) for rank in (1, 2))]
    assert told(*replies).cause not in ("unconnected", "silent-rank")
    assert told(*replies, known={}).cause != "unconnected"


@pytest.mark.parametrize(
    "text", ["remote=[", "connect to (, )", "connect to (node1, 29500)", "connectFullMesh failed remote=[x y]", "Connect to <> failed"]
)
def test_odd_words_name_no_address(text: str) -> None:
    assert told(waiting("n1", 0), said("n2", 1, text), said("n3", 2, text)).cause != "unconnected"


def test_a_reason_or_a_node_that_is_gone_says_more() -> None:
    accusers = [said("n2", 1, GLOO.format(HEAD)), said("n3", 2, GLOO.format(HEAD))]
    assert told(node("n1", 0, traceback("MemoryError")), *accusers).cause == "host-out-of-memory"
    assert told(*accusers, unreachable={"n1": "no answer within 5 s"}).cause == "unreachable"
    early = node("n1", 0, code=3, ended_at=NOW - 60)
    assert told(early, *accusers).cause == "exit-code", "nobody listens where the rank has ended before"


def test_a_warning_while_a_peer_still_starts_accuses_nobody() -> None:
    lost = [node(f"n{rank + 1}", rank, [WARNING.format(HEAD), *traceback(CLOSED)]) for rank in (1, 2)]
    assert told(node("n1", 0, tail=block(0, code=3)), *lost).cause == "exit-code"


def test_those_that_were_stopped_say_nothing() -> None:
    stopped = [node(f"n{rank + 1}", rank, traceback(GLOO.format(HEAD)), code=None, signal=15, stopped=True) for rank in range(3)]
    assert found(*stopped) is None


def test_a_rank_that_loads_is_not_said_to_hang() -> None:
    """Nobody names an address: it is only known who had not begun."""
    diagnosis = told(waiting("n1", 0, "loading"), node("n2", 1, traceback(TIMED_OUT)), node("n3", 2, traceback(TIMED_OUT)))
    assert (diagnosis.cause, diagnosis.first_node, diagnosis.first_rank) == ("not-begun", "n1", 0)
    assert diagnosis.because[0] == "rank 0 on n1: it was loading, and its last sign of life was 95 s old"
    assert "hangs" not in diagnosis.hint and "homelab preflight --only network" in diagnosis.hint
    trains = node("n1", 0, alive=True, step=3)
    assert told(trains, node("n2", 1, traceback(TIMED_OUT)), node("n3", 2, traceback(TIMED_OUT))).cause == "silent-rank"
