"""Recorded failures of torchrun on three nodes (`record.py` makes them anew): the culprit is named, never a victim."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from homelab.diagnose.cause import Diagnosis, diagnose
from homelab.diagnose.traces import child_failures, last_exceptions
from homelab.runs.reply import Reply, parse_replies
from homelab.runs.state import run_state

DATA = Path(__file__).parent / "data"
RANKS = {0: "tower", 1: "tower", 2: "mini", 3: "laptop"}

# scenario -> cause, node, rank, exit code, signal, retryable, end of where, a word of the hint
EXPECTED: dict[str, tuple[str, str, int | None, int | None, int | None, bool, str, str]] = {
    "kill_9": ("killed", "mini", 2, None, 9, True, "", "journalctl"),
    "python_error": ("python-error", "mini", 2, 1, None, False, "worker.py:29", "worker.py:29"),
    "python_error_recorded": ("python-error", "mini", 2, 1, None, False, "worker.py:29", "worker.py:29"),
    "exit_3": ("exit-code", "mini", 2, 3, None, False, "", "homelab logs"),
    "memory_error": ("host-out-of-memory", "mini", 2, 1, None, True, "worker.py:33", "free -h"),
    "host_allocation": ("host-out-of-memory", "mini", 2, 1, None, True, "worker.py:35", "free -h"),
    "segfault": ("crashed", "mini", 2, None, 11, True, "", "reinstall torch"),
    "disk_full": ("disk-full", "mini", 2, 1, None, False, "worker.py:40", "df -h"),
    "permission": ("permission", "mini", 2, 1, None, False, "worker.py:44", "/etc/shadow"),
    "timeout": ("silent-rank", "mini", 2, None, None, True, "", "ssh mini"),
    "nan": ("nan-loss", "mini", 2, 1, None, False, "worker.py:48", "learning_rate"),
    "missing_package": ("missing-package", "mini", 2, 1, None, False, "worker.py:11", "install it"),
    "missing_file": ("missing-file", "mini", 2, 1, None, False, "worker.py:50", "data/train.jsonl"),
    "port_in_use": ("port-in-use", "tower", None, 1, None, True, "static_tcp_rendezvous.py:67", "ss -ltnp"),
    "head_missing": ("unreachable", "tower", None, None, None, True, "", "homelab preflight"),
    "stop_torchrun": ("stopped-from-outside", "mini", None, 1, None, True, "api.py:86", "journalctl"),
}  # fmt: skip


def load(scenario: str) -> tuple[dict[str, Reply], dict[str, str], dict[str, Any]]:
    case = json.loads((DATA / f"{scenario}.json").read_text(encoding="utf-8"))
    return parse_replies(case["replies"]), case["unreachable"], case


def of(scenario: str, **arguments: Any) -> Diagnosis:
    replies, unreachable, _ = load(scenario)
    found = diagnose("practice", replies, unreachable, **arguments)
    assert found is not None
    return found


def test_every_recording_is_judged() -> None:
    assert {path.stem for path in DATA.glob("*.json")} == set(EXPECTED)


@pytest.mark.parametrize("scenario", EXPECTED)
def test_the_culprit(scenario: str) -> None:
    cause, node, rank, code, signal, retryable, where, word = EXPECTED[scenario]
    found = of(scenario)
    assert (found.cause, found.first_node, found.first_rank) == (cause, node, rank)
    assert (found.exit_code, found.signal, found.retryable) == (code, signal, retryable)
    assert found.where.endswith(where) and bool(found.where) == bool(where)
    assert word in found.hint
    assert found.because and "None" not in f"{found.title}{found.hint}{found.because}"
    assert "{" not in found.title + found.hint and "?" not in found.title + found.hint


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
    assert (found.cause, found.first_node, found.first_rank) == EXPECTED[scenario][:3]


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
