"""Recorded failures of torchrun on three nodes (`record.py` makes them anew): the culprit is named, never a victim."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from homelab.controller.diagnose.cause import Context, Diagnosis, diagnose
from homelab.controller.diagnose.traces import child_failures, last_exceptions
from homelab.controller.remote.poll_reply import parse_replies
from homelab.controller.run.state import run_state
from homelab.shared.protocol.run_messages import Reply

DATA = Path(__file__).parent / "data"
RANKS = {0: "tower", 1: "tower", 2: "mini", 3: "laptop"}


@dataclass(frozen=True)
class Expect:
    """What the diagnosis of a recording is. `where` is the end of the place; `hint` is a part of the hint."""

    cause: str
    node: str
    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    retryable: bool = False
    where: str = ""
    hint: str = ""


EXPECTED = {
    "kill_9": Expect("killed", "mini", rank=2, signal=9, retryable=True, hint="journalctl"),
    "python_error": Expect("python-error", "mini", rank=2, exit_code=1, where="worker.py:29", hint="worker.py:29"),
    "python_error_recorded": Expect("python-error", "mini", rank=2, exit_code=1, where="worker.py:29", hint="worker.py:29"),
    "exit_3": Expect("exit-code", "mini", rank=2, exit_code=3, hint="homelab logs"),
    "memory_error": Expect("host-out-of-memory", "mini", rank=2, exit_code=1, retryable=True, where="worker.py:33", hint="free -h"),
    "host_allocation": Expect("host-out-of-memory", "mini", rank=2, exit_code=1, retryable=True, where="worker.py:35", hint="free -h"),
    "segfault": Expect("crashed", "mini", rank=2, signal=11, retryable=True, hint="reinstall torch"),
    "disk_full": Expect("disk-full", "mini", rank=2, exit_code=1, where="worker.py:40", hint="df -h"),
    "permission": Expect("permission", "mini", rank=2, exit_code=1, where="worker.py:44", hint="/etc/shadow"),
    "timeout": Expect("silent-rank", "mini", rank=2, retryable=True, hint="ssh mini"),
    "nan": Expect("nan-loss", "mini", rank=2, exit_code=1, where="worker.py:48", hint="learning_rate"),
    "missing_package": Expect("missing-package", "mini", rank=2, exit_code=1, where="worker.py:11", hint="install it"),
    "missing_file": Expect("missing-file", "mini", rank=2, exit_code=1, where="worker.py:50", hint="data/train.jsonl"),
    "port_in_use": Expect("port-in-use", "tower", exit_code=1, retryable=True, where="static_tcp_rendezvous.py:67", hint="ss -ltnp"),
    "head_missing": Expect("unreachable", "tower", retryable=True, hint="homelab preflight"),
    "stop_torchrun": Expect("stopped-from-outside", "mini", exit_code=1, retryable=True, where="api.py:86", hint="journalctl"),
}


def load(scenario: str) -> tuple[dict[str, Reply], dict[str, str], dict[str, Any]]:
    case = json.loads((DATA / f"{scenario}.json").read_text(encoding="utf-8"))
    return parse_replies(case["replies"]), case["unreachable"], case


def of(scenario: str, **arguments: Any) -> Diagnosis:
    replies, unreachable, _ = load(scenario)
    found = diagnose("practice", replies, unreachable, Context(**arguments))
    assert found is not None
    return found


def test_every_recording_is_judged() -> None:
    assert {path.stem for path in DATA.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("scenario", EXPECTED)
def test_the_culprit(scenario: str) -> None:
    expected, diagnosis = EXPECTED[scenario], of(scenario)
    assert diagnosis.cause == expected.cause
    assert diagnosis.first_node == expected.node
    assert diagnosis.first_rank == expected.rank
    assert diagnosis.exit_code == expected.exit_code
    assert diagnosis.signal == expected.signal
    assert diagnosis.retryable == expected.retryable
    assert diagnosis.where.endswith(expected.where) and bool(diagnosis.where) == bool(expected.where)
    assert expected.hint in diagnosis.hint
    assert diagnosis.because and "None" not in f"{diagnosis.title}{diagnosis.hint}{diagnosis.because}"
    assert "{" not in diagnosis.title + diagnosis.hint and "?" not in diagnosis.title + diagnosis.hint


@pytest.mark.parametrize("scenario", sorted(set(EXPECTED) - {"port_in_use", "head_missing", "stop_torchrun"}))
def test_all_others_are_victims(scenario: str) -> None:
    assert {(victim.rank, victim.node) for victim in of(scenario).victims} == set(RANKS.items()) - {(2, "mini")}


@pytest.mark.parametrize("scenario", EXPECTED)
def test_the_order_of_the_answers_does_not_matter(scenario: str) -> None:
    replies, unreachable, _ = load(scenario)
    turned = dict(reversed(replies.items()))
    found, again = diagnose("r", replies, unreachable), diagnose("r", turned, unreachable)
    assert found is not None and again is not None
    assert (found.cause, found.first_node, found.first_rank) == (again.cause, again.first_node, again.first_rank)


@pytest.mark.parametrize("scenario", EXPECTED)
def test_the_state_of_a_recording(scenario: str) -> None:
    replies, unreachable, _ = load(scenario)
    expected = "lost" if scenario == "head_missing" else "failed"
    assert run_state(("tower", "mini", "laptop"), replies, unreachable) == expected


@pytest.mark.parametrize("lines", [10, 20, 40])
@pytest.mark.parametrize("scenario", sorted(set(EXPECTED) - {"permission"}))
def test_a_short_tail_is_enough(scenario: str, lines: int) -> None:
    """An agent may send only the end of a log, from the middle of a traceback on (torchrun's own: 60 lines)."""
    _, unreachable, case = load(scenario)
    for reply in case["replies"].values():
        reply["run"]["torchrun_tail"] = reply["run"]["torchrun_tail"][-60:]
        for rank in reply["run"]["ranks"].values():
            rank["log_tail"] = {name: tail[-lines:] for name, tail in rank["log_tail"].items()}
    found = diagnose("practice", parse_replies(case["replies"]), unreachable)
    assert found is not None
    assert (found.cause, found.first_node, found.first_rank) == (EXPECTED[scenario].cause, EXPECTED[scenario].node, EXPECTED[scenario].rank)


def test_without_the_ranks_own_logs_torchruns_copy_of_the_traceback_is_read() -> None:
    _, _, case = load("python_error_recorded")
    for reply in case["replies"].values():
        for rank in reply["run"]["ranks"].values():
            rank["log_tail"] = {"stdout": [], "stderr": []}
    found = diagnose("practice", parse_replies(case["replies"]), {})
    assert found is not None
    assert (found.cause, found.first_rank, "KeyError: 'completion'" in found.title) == ("python-error", 2, True)


def test_a_stop_that_came_before_torchrun_had_noticed_leaves_the_silent_one() -> None:
    """The other ranks failed first, and whoever watched stopped mini before its own torchrun could say what happened."""
    _, _, case = load("kill_9")
    run = case["replies"]["mini"]["run"]
    run["exit"] = {"returncode": None, "signal": 15, "ended_at": run["exit"]["ended_at"] + 2, "stopped": True}
    run["torchrun_tail"] = []
    found = diagnose("practice", parse_replies(case["replies"]), {})
    assert found is not None
    assert (found.cause, found.first_node, found.first_rank) == ("silent-rank", "mini", 2)


def test_a_reason_is_believed_although_the_node_was_stopped() -> None:
    _, _, case = load("python_error")
    run = case["replies"]["mini"]["run"]
    run["exit"] = {"returncode": None, "signal": 15, "ended_at": run["exit"]["ended_at"] + 2, "stopped": True}
    run["torchrun_tail"] = []
    found = diagnose("practice", parse_replies(case["replies"]), {})
    assert found is not None
    assert (found.cause, found.first_rank) == ("python-error", 2)


def test_torchruns_list_of_failures() -> None:
    replies, _, _ = load("kill_9")
    tower = replies["tower"].run
    assert tower is not None and tower.exit is not None
    failures = {failure.rank: failure for failure in child_failures(tower.torchrun_tail, tower.exit.ended_at)}
    assert (failures[0].signal, failures[0].is_root) == (15, False)
    assert (failures[1].exit_code, failures[1].signal, failures[1].is_root) == (1, None, True)
    assert failures[1].traceback[-2].startswith("RuntimeError: ")


@pytest.mark.parametrize("zone_h", [-8, 0, 5.5, 12.75])
def test_torchruns_local_times_become_unix_times(zone_h: float) -> None:
    replies, _, _ = load("kill_9")
    mini = replies["mini"].run
    assert mini is not None and mini.exit is not None and mini.exit.ended_at is not None
    (failure,) = child_failures(mini.torchrun_tail, mini.exit.ended_at + zone_h * 3600)
    assert failure.time_s is not None
    assert 0 <= mini.exit.ended_at + zone_h * 3600 - failure.time_s < 2


def test_the_chain_of_exceptions_oldest_first() -> None:
    replies, _, _ = load("permission")
    mini = replies["mini"].run
    assert mini is not None
    chain = last_exceptions(mini.ranks[2].log_tail.stderr)
    assert ["/etc/shadow" in raised.text for raised in chain] == [True, False]
    assert chain[0].where.endswith("worker.py:44")


def test_what_homelab_run_starts_a_program_by_is_not_the_person_s_file() -> None:
    frames = (
        "/data/ab/homelab_program.py",
        "/env/lib/python3.11/site-packages/llamafactory/launcher.py",
        "/env/lib/python3.11/site-packages/audio/__init__.py",
    )
    lines = [
        "Traceback (most recent call last):",
        *(f'  File "{file}", line {line}, in <module>' for line, file in enumerate(frames, start=9)),
        "RuntimeError: odd",
    ]
    (raised,) = last_exceptions(lines)
    assert raised.where == f"{frames[-1]}:11"
    (raised,) = last_exceptions([*lines[:2], '  File "/data/ab/train.py", line 3, in main', *lines[2:]])
    assert raised.where == "/data/ab/train.py:3"
